from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from over_webhdfs import ask, create
from patience import be_patient

from weightyard.errors import (
    DataNodeFailed,
    FileMissing,
    StaleLocation,
    TooLarge,
    YardError,
)
from weightyard.names import UploadId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.retry import Retry, RetryingStore
from weightyard.storage.store import (
    FileOptions,
    Location,
    Read,
    ReadPath,
    Replica,
    StorePath,
)
from weightyard.testing.cluster import MiniCluster, damage
from weightyard.testing.store_contract import put

pytestmark = pytest.mark.cluster

CONTENT = os.urandom(3 << 20)
LIMIT_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        be_patient(patched)
        yield


@pytest.fixture(scope="module")
def store(cluster: MiniCluster) -> Iterator[HdfsStore]:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir, hadoop_home=None, libhdfs_dir=None)
    with HdfsStore(cluster.fresh_dir(), settings) as store:
        store.init()
        yield store


@pytest.fixture(scope="module")
def path(store: HdfsStore) -> StorePath:
    return put(store, CONTENT, FileOptions(replication=2, planned_bytes=2 << 20))


def by(store: HdfsStore, *paths: ReadPath) -> HdfsStore:
    return HdfsStore(store.url, store._settings, read_paths=paths)


@contextmanager
def nobody() -> Iterator[Replica]:
    """Where nobody listens, nor comes to listen meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield Replica(f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1")


def test_where_no_datanode_answers_any_more_bytes_come_another_way(
    store: HdfsStore, path: StorePath
) -> None:
    with by(store, ReadPath.DIRECT, ReadPath.NATIVE) as reading, nobody() as gone:
        location = reading.locate(path)
        assert reading.read(location, reads()).path == ReadPath.DIRECT
        spans = tuple(dataclasses.replace(span, replicas=(gone,)) for span in location.spans)
        cut_off = dataclasses.replace(location, spans=spans)
        wanted = reads()
        assert reading.read(cut_off, wanted).path == ReadPath.NATIVE
        assert all(one.into == CONTENT[one.offset :][: len(one.into)] for one in wanted)
        with pytest.raises(DataNodeFailed, match=gone.datanode):
            reading.read(cut_off, reads(), replica=gone)
        assert reading.read(location, reads()).path == ReadPath.DIRECT


def test_a_file_located_while_no_datanode_that_has_it_was_up_is_located_again(
    store: HdfsStore, path: StorePath
) -> None:
    """What a NameNode tells of a block whose DataNodes are all gone: that it is nowhere."""
    location = store.locate(path)
    nowhere = tuple(dataclasses.replace(span, replicas=()) for span in location.spans)
    while_away, wanted = dataclasses.replace(location, spans=nowhere), reads()
    with pytest.raises(StaleLocation, match=str(path)):
        store.read(while_away, reads())
    served = RetryingStore(store, Retry(deadline_s=LIMIT_S)).read(while_away, wanted)
    assert served.path == ReadPath.DIRECT
    assert_filled(wanted)


def test_a_record_with_a_wrong_byte_on_disk_is_read_from_another_replica(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    with store.stage(layout.staging(UploadId.new(), "yard"), FileOptions(replication=2)) as stage:
        stage.write(CONTENT[:1000])
        store.publish(stage.close(), layout.YARD)
    url = f"{store.url}/{layout.YARD}"
    cluster.wait_for_replication(url, 2)
    location = store.locate(layout.YARD)
    first = location.spans[0].replicas[0].datanode
    (file,) = [one for one in cluster.replica_files(url) if one.datanode.plan.address == first]
    damage(file, offset=17)
    out = bytearray(1000)
    served = store.read(location, [Read(0, memoryview(out))])
    assert out == CONTENT[:1000]
    assert served.path != ReadPath.DIRECT


def test_two_silent_datanodes_do_not_use_up_the_time_to_read_a_record_from_the_third(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    path = StorePath("models/team/record.json")
    with store.stage(layout.staging(UploadId.new(), "record"), FileOptions(replication=3)) as stage:
        stage.write(CONTENT[:1000])
        store.publish(stage.close(), path)
    cluster.wait_for_replication(f"{store.url}/{path}", 3)
    location = store.locate(path)
    # Of any test before: hdfs-native keeps connections for so long, and tries them first.
    time.sleep(3)
    for silent in cluster.datanodes[:2]:
        silent.pause()
    try:
        for _ in range(4):  # hdfs-native is told the replicas in another order each time
            out = bytearray(1000)
            store.read(location, [Read(0, memoryview(out))], timeout_s=9.0)
            assert out == CONTENT[:1000]
    finally:
        for silent in cluster.datanodes[:2]:
            cluster.bring_back(silent)


def test_a_record_is_read_without_starting_a_jvm(
    store: HdfsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hadoop, asked = tmp_path / "bin" / "hadoop", tmp_path / "asked"
    for file in (hadoop, tmp_path / "lib" / "native" / "libhdfs.so"):
        file.parent.mkdir(parents=True)
        file.touch()
    hadoop.write_text(f"#!/bin/sh\ntouch {asked}\nexit 1\n")
    hadoop.chmod(0o755)
    monkeypatch.setenv("CLASSPATH", "")
    record = layout.journal(7)
    with store.stage(layout.staging(UploadId.new(), "record")) as stage:
        stage.write(CONTENT[:1000])
        store.publish(stage.close(), record)
    settings = store._settings.model_copy(update={"hadoop_home": tmp_path})
    with HdfsStore(store.url, settings) as installed:
        served = installed.read(store.locate(record), [Read(0, memoryview(bytearray(1000)))])
        assert served.path == ReadPath.NATIVE
        assert not asked.exists()
    with HdfsStore(store.url, settings, read_paths=[ReadPath.LIBHDFS]) as only:
        with pytest.raises(YardError, match="CLASSPATH"):
            only.read(store.locate(record), [Read(0, memoryview(bytearray(1000)))])
        assert asked.exists()


def reads() -> list[Read]:
    ranges = [(0, 1), (9, 0), (511, 70_000), (len(CONTENT) - 5, 5), ((2 << 20) - 3, 7)]
    return [Read(offset, memoryview(bytearray(length))) for offset, length in ranges]


def assert_filled(filled: list[Read]) -> None:
    for read in filled:
        assert bytes(read.into) == CONTENT[read.offset : read.offset + len(read.into)]


def test_each_way_brings_the_same_bytes_and_says_its_name(
    store: HdfsStore, path: StorePath, way: ReadPath, only_way: Callable[[str], HdfsStore]
) -> None:
    with only_way(store.url) as one:
        wanted = reads()
        served = one.read(store.locate(path), wanted)
        assert served.path == way
        assert_filled(wanted)


def test_each_way_refuses_what_is_not_there(
    store: HdfsStore, path: StorePath, way: ReadPath, only_way: Callable[[str], HdfsStore]
) -> None:
    location = store.locate(path)
    gone = Location(StorePath("packs/no/such"), location.length, location.spans)
    past_the_end = [Read(len(CONTENT) - 1, memoryview(bytearray(2)))]
    with only_way(store.url) as one:
        if way is not ReadPath.DIRECT:  # which knows blocks, not files
            with pytest.raises(FileMissing):
                one.read(gone, reads())
        with pytest.raises(TooLarge):
            one.read(location, past_the_end)


def test_where_no_datanode_can_be_reached_another_way_serves(
    store: HdfsStore, path: StorePath
) -> None:
    located = store.locate(path)
    with nobody() as there, by(store, ReadPath.DIRECT, ReadPath.LIBHDFS, ReadPath.NATIVE) as one:
        spans = tuple(dataclasses.replace(span, replicas=(there,)) for span in located.spans)
        wanted = reads()
        served = one.read(Location(path, located.length, spans), wanted)
        assert served.path == ReadPath.NATIVE
        assert_filled(wanted)


def test_once_direct_reads_have_worked_a_dead_datanode_is_an_error(
    store: HdfsStore, path: StorePath
) -> None:
    located = store.locate(path)
    with nobody() as there:
        spans = tuple(
            dataclasses.replace(span, replicas=(there, *span.replicas)) for span in located.spans
        )
        location = Location(path, located.length, spans)
        with pytest.raises(DataNodeFailed, match=there.datanode):
            store.read(location, reads(), replica=there)
        wanted = reads()
        assert store.read(location, wanted).path == ReadPath.DIRECT
        assert_filled(wanted)


def test_an_erasure_coded_file_is_read_another_way(cluster: MiniCluster, store: HdfsStore) -> None:
    policy = "XOR-2-1-1024k"
    coded = urlsplit(store.url).path + "/packs/coded"

    ask(cluster, "PUT", "/", op="ENABLEECPOLICY", ecpolicy=policy)
    ask(cluster, "PUT", coded, op="MKDIRS")
    ask(cluster, "PUT", coded, op="SETECPOLICY", ecpolicy=policy)
    create(cluster, f"{coded}/file", CONTENT)

    location = store.locate(StorePath("packs/coded/file"))
    assert [span.access for span in location.spans] == [None] * len(location.spans)
    wanted = reads()
    served = store.read(location, wanted)
    assert served.path == ReadPath.NATIVE
    assert_filled(wanted)


def test_a_probe_says_which_ways_work_and_leaves_nothing(store: HdfsStore) -> None:
    found = store.probe().ways
    works = {way for way, why_not in found.items() if why_not is None}
    assert works == {ReadPath.DIRECT, ReadPath.NATIVE, ReadPath.WEBHDFS}
    assert "libhdfs" in (found[ReadPath.LIBHDFS] or "")
    assert list(store.list(StorePath("staging"))) == []


def test_a_way_that_cannot_work_says_why(store: HdfsStore, path: StorePath) -> None:
    with by(store, ReadPath.LIBHDFS) as one, pytest.raises(YardError, match="HADOOP_HOME"):
        one.read(store.locate(path), reads())
