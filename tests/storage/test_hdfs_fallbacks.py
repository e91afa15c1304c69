from __future__ import annotations

import dataclasses
import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlencode, urlsplit

import pytest

from weightyard.errors import DataNodeFailed, FileMissing, TooLarge, YardError
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.store import (
    FileOptions,
    Location,
    Read,
    ReadPath,
    Replica,
    StorePath,
)
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.store_contract import put

pytestmark = pytest.mark.cluster

CONTENT = os.urandom(3 << 20)


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


def reads() -> list[Read]:
    ranges = [(0, 1), (9, 0), (511, 70_000), (len(CONTENT) - 5, 5), ((2 << 20) - 3, 7)]
    return [Read(offset, memoryview(bytearray(length))) for offset, length in ranges]


def assert_filled(filled: list[Read]) -> None:
    for read in filled:
        assert bytes(read.into) == CONTENT[read.offset : read.offset + len(read.into)]


@pytest.mark.parametrize("way", [ReadPath.DIRECT, ReadPath.NATIVE, ReadPath.WEBHDFS])
def test_each_way_brings_the_same_bytes_and_says_its_name(
    store: HdfsStore, path: StorePath, way: ReadPath
) -> None:
    with by(store, way) as one:
        wanted = reads()
        served = one.read(store.locate(path), wanted)
        assert served.path == way
        assert_filled(wanted)


@pytest.mark.parametrize("way", [ReadPath.NATIVE, ReadPath.WEBHDFS])
def test_each_way_refuses_what_is_not_there(
    store: HdfsStore, path: StorePath, way: ReadPath
) -> None:
    location = store.locate(path)
    gone = Location(StorePath("packs/no/such"), location.length, location.spans)
    past_the_end = [Read(len(CONTENT) - 1, memoryview(bytearray(2)))]
    with by(store, way) as one:
        with pytest.raises(FileMissing):
            one.read(gone, reads())
        with pytest.raises(TooLarge):
            one.read(location, past_the_end)


def test_where_no_datanode_can_be_reached_another_way_serves(
    store: HdfsStore, path: StorePath
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = Replica(f"127.0.0.1:{server.getsockname()[1]}", "127.0.0.1")
    located = store.locate(path)
    spans = tuple(dataclasses.replace(span, replicas=(nobody,)) for span in located.spans)
    unreachable = Location(path, located.length, spans)
    with by(store, ReadPath.DIRECT, ReadPath.LIBHDFS, ReadPath.NATIVE) as one:
        wanted = reads()
        assert one.read(unreachable, wanted).path == ReadPath.NATIVE
        assert_filled(wanted)


def test_once_direct_reads_have_worked_a_dead_datanode_is_an_error(
    store: HdfsStore, path: StorePath
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = Replica(f"127.0.0.1:{server.getsockname()[1]}", "127.0.0.1")
    located = store.locate(path)
    spans = tuple(
        dataclasses.replace(span, replicas=(nobody, *span.replicas)) for span in located.spans
    )
    location = Location(path, located.length, spans)
    with pytest.raises(DataNodeFailed, match=nobody.datanode):
        store.read(location, reads(), replica=nobody)
    wanted = reads()
    assert store.read(location, wanted).path == ReadPath.DIRECT
    assert_filled(wanted)


def test_an_erasure_coded_file_is_read_another_way(cluster: MiniCluster, store: HdfsStore) -> None:
    policy = "XOR-2-1-1024k"
    coded = urlsplit(store.url).path + "/packs/coded"

    def ask(path: str, **query: str) -> bytes:
        query["user.name"] = store._cluster.user
        return put_http(f"{cluster.http_addresses[0]}/webhdfs/v1{path}?{urlencode(query)}")

    ask("/", op="ENABLEECPOLICY", ecpolicy=policy)
    ask(coded, op="MKDIRS")
    ask(coded, op="SETECPOLICY", ecpolicy=policy)
    answer = json.loads(ask(f"{coded}/file", op="CREATE", noredirect="true"))
    put_http(answer["Location"], CONTENT)

    location = store.locate(StorePath("packs/coded/file"))
    assert [span.access for span in location.spans] == [None] * len(location.spans)
    wanted = reads()
    served = store.read(location, wanted)
    assert served.path == ReadPath.NATIVE
    assert_filled(wanted)


def put_http(url: str, data: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, method="PUT", data=data)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return bytes(answer.read())


def test_a_probe_says_which_ways_work_and_leaves_nothing(store: HdfsStore) -> None:
    found = store.probe()
    works = {way for way, why_not in found.items() if why_not is None}
    assert works == {ReadPath.DIRECT, ReadPath.NATIVE, ReadPath.WEBHDFS}
    assert "libhdfs" in (found[ReadPath.LIBHDFS] or "")
    assert list(store.list(StorePath("staging"))) == []


def test_a_way_that_cannot_work_says_why(store: HdfsStore, path: StorePath) -> None:
    with by(store, ReadPath.LIBHDFS) as one, pytest.raises(YardError, match="HADOOP_HOME"):
        one.read(store.locate(path), reads())
