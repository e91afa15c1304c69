from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from hdfs_native import Client
from over_webhdfs import ask
from patience import be_patient
from waiting import eventually

from weightyard.errors import (
    BadSetting,
    DataNodeFailed,
    FileMissing,
    Retryable,
    StaleLocation,
    StoreFull,
    StoreUnavailable,
)
from weightyard.names import PackId, UploadId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Configuration
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.retry import RetryingStore
from weightyard.storage.store import (
    FileOptions,
    Location,
    Ownership,
    Read,
    ReadPath,
    Stage,
    StagedFile,
    Store,
    StorePath,
)
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.store_contract import StoreContract, files_of, get, put, stage

pytestmark = pytest.mark.cluster

LIMIT_S = 60.0


def opened(cluster: MiniCluster, url: str | None = None, deadline_s: float = 30) -> HdfsStore:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir, deadline_s=deadline_s)
    return HdfsStore(url or cluster.fresh_dir(), settings)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def store(cluster: MiniCluster) -> Iterator[HdfsStore]:
    with opened(cluster) as store:
        store.init()
        yield store


class TestHdfsStore(StoreContract):
    @pytest.fixture
    def store(self, cluster: MiniCluster) -> Iterator[Store]:
        with opened(cluster) as store:
            yield store


class TestRetryingHdfsStore(StoreContract):
    """What people get who open a yard in HDFS."""

    @pytest.fixture
    def store(self, cluster: MiniCluster) -> Iterator[Store]:
        with RetryingStore(opened(cluster)) as store:
            yield store


class TestHdfsStoreThatWritesByHdfsNative(StoreContract):
    """As clusters with Kerberos or protected transfers are written to."""

    @pytest.fixture
    def store(self, cluster: MiniCluster) -> Iterator[Store]:
        settings = Settings(hadoop_conf_dir=cluster.conf_dir)
        inner = HdfsStore(cluster.fresh_dir(), settings, writes_directly=False)
        with RetryingStore(inner) as store:
            yield store


class TestHdfsStoreWithBlockTokens(StoreContract):
    @pytest.fixture
    def store(self, token_cluster: MiniCluster) -> Iterator[Store]:
        with opened(token_cluster) as store:
            yield store


class TestHdfsStoreWithEncryptedTransfer(StoreContract):
    """As people get it: of one DataNode, hdfs-native may miss the word that it has all."""

    @pytest.fixture
    def store(self, encrypted_cluster: MiniCluster) -> Iterator[Store]:
        with RetryingStore(opened(encrypted_cluster)) as store:
            yield store


class TestHdfsStoreWithTwoNameNodes(StoreContract):
    @pytest.fixture
    def store(self, ha_cluster: MiniCluster) -> Iterator[Store]:
        with opened(ha_cluster) as store:
            yield store


def test_a_planned_file_lies_in_one_hdfs_block(store: HdfsStore) -> None:
    content = os.urandom(5 << 20)
    for planned, spans in ((len(content), 1), (2 << 20, 3)):
        path = put(store, content, FileOptions(replication=1, planned_bytes=planned))
        assert len(store.locate(path).spans) == spans
        assert get(store, path) == content


def test_a_policy_holds_from_the_first_byte(cluster: MiniCluster, store: HdfsStore) -> None:
    path = put(store, b"x" * 1000, FileOptions(replication=1, policy="ALL_SSD"))
    (file,) = cluster.replica_files(f"{store.url}/{path}")
    assert "/ssd/" in str(file.path)


def test_a_policy_of_a_new_file_is_one_call_for_it_has_nothing_to_move(
    store: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    send = requests.Session.send

    def noted(session: Any, request: requests.PreparedRequest, **more: Any) -> Any:
        url = urlsplit(str(request.url))
        if urlsplit(store.url).path in url.path:  # not of other stores that tests left open
            asked.append(parse_qs(url.query)["op"][0])
        return send(session, request, **more)

    monkeypatch.setattr(requests.Session, "send", noted)
    put(store, b"x", FileOptions(policy="ALL_SSD"))
    assert asked == ["SETSTORAGEPOLICY"]


def test_the_namenode_knows_the_policy_a_pack_has_from_staging_and_from_adjusting(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    def policy(path: StorePath) -> object:
        said = ask(cluster, "GET", f"{store.url}/{path}", op="GETSTORAGEPOLICY")
        assert isinstance(said["BlockStoragePolicy"], dict)
        return said["BlockStoragePolicy"]["name"]

    path, other = put(store, b"x", FileOptions(policy="ALL_SSD")), put(store, b"x")
    assert (policy(path), policy(other)) == ("ALL_SSD", "HOT")
    store.adjust(path, FileOptions(policy="ONE_SSD"))
    assert (policy(path), policy(other)) == ("ONE_SSD", "HOT")


def test_a_full_quota_is_said_so_and_leaves_nothing(cluster: MiniCluster, store: HdfsStore) -> None:
    ask(cluster, "PUT", store.url, op="SETQUOTA", storagespacequota=2 << 20)
    upload = UploadId.new()

    def write_too_much() -> None:
        with store.stage(
            layout.staging(upload, "p"), FileOptions(replication=1, planned_bytes=4 << 20)
        ) as writing:
            writing.write(bytes(4 << 20))
            writing.close()

    with pytest.raises(StoreFull):
        write_too_much()
    assert files_of(store, upload) == []
    put(store, b"small", FileOptions(replication=1, planned_bytes=5))


def test_a_full_quota_of_names_is_said_so_and_leaves_nothing(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    upload = UploadId.new()

    def write(name: str) -> StagedFile:
        with store.stage(layout.staging(upload, name), FileOptions(replication=1)) as writing:
            writing.write(b"x")
            return writing.close()

    first = write("first")
    summary = ask(cluster, "GET", store.url, op="GETCONTENTSUMMARY")["ContentSummary"]
    assert isinstance(summary, dict)
    names = summary["directoryCount"] + summary["fileCount"]
    ask(cluster, "PUT", store.url, op="SETQUOTA", namespacequota=names)
    for act in (
        lambda: write("second"),
        lambda: stage(store, b"in a folder of its own"),
        lambda: store.publish(first, layout.pack(PackId.new())),  # makes a folder
    ):
        with pytest.raises(StoreFull):
            act()
    assert files_of(store, upload) == [first.path]
    assert list(store.list(layout.PACKS)) == []
    ask(cluster, "PUT", store.url, op="SETQUOTA", namespacequota=names + 1)
    path = layout.pack(PackId.new())
    store.publish(first, path)
    assert get(store, path) == b"x"


def test_datanodes_follow_when_the_replication_of_a_file_changes(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    path = put(store, b"x" * 1000, FileOptions(replication=1))

    def lies_on(datanodes: int) -> bool:
        told = store.locate(path).spans[0].replicas
        return len(told) == len(cluster.replica_files(f"{store.url}/{path}")) == datanodes

    for replication in (2, 1):
        store.adjust(path, FileOptions(replication=replication))
        eventually(partial(lies_on, replication))
    assert get(store, path) == b"x" * 1000


def test_a_cluster_with_block_tokens_is_read_directly(token_cluster: MiniCluster) -> None:
    with opened(token_cluster) as store:
        store.init()
        path = put(store, b"x" * 1000)
        location = store.locate(path)
        for replica in (None, location.spans[0].replicas[0]):
            out = bytearray(1000)
            served = store.read(location, [Read(0, memoryview(out))], replica=replica)
            assert served.path == ReadPath.DIRECT
            assert out == b"x" * 1000


def test_a_file_that_was_deleted_can_in_the_end_no_longer_be_read(store: HdfsStore) -> None:
    path = put(store, b"x" * 1000)
    location = store.locate(path)
    store.delete(path)

    def is_gone() -> bool:
        out = bytearray(1000)
        try:
            store.read(location, [Read(0, memoryview(out))])
        except (FileMissing, StaleLocation):
            return True
        except DataNodeFailed:  # it is about to remove its copy
            return False
        assert out == b"x" * 1000
        return False

    eventually(is_gone)


def test_a_probe_that_had_to_be_written_again_leaves_nothing(
    store: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, tries = store.stage, itertools.count()

    def hesitating(path: StorePath, options: FileOptions | None = None) -> Stage:
        opened = stage(path, options)
        if next(tries) < 4:
            opened.abort()
            raise StoreUnavailable("the DataNode hesitates")
        return opened

    monkeypatch.setattr(store, "stage", hesitating)
    assert store.probe().ways[ReadPath.DIRECT] is None
    assert next(tries) == 5
    folder = f"{store._cluster.at(layout.STAGING)}"
    left = store._namespace.call("looking", lambda client: list(client.list_status(folder)))
    assert left == []


def test_two_users_of_a_group_work_in_each_others_folders(cluster: MiniCluster) -> None:
    url = cluster.fresh_dir()
    with opened(cluster, url) as store:
        store.init(Ownership(owner="alice", group="team", folder_mode=0o770))
    script = """
import sys
from weightyard.names import *
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.testing.store_contract import *
store = HdfsStore(sys.argv[1], Settings())
for path in map(StorePath, sys.argv[2:]):
    assert get(store, path) == b"of alice"
    assert store.delete(path)
upload = UploadId("ab" * 16)
path = layout.pack(PackId("cd" + PackId.new().hex[2:]))
with store.stage(layout.staging(upload, path.text[-9:])) as writing:
    writing.write(b"of alice")
    store.publish(writing.close(), path)
print(path)
"""

    def run(user: str, *arguments: str) -> str:
        environment = {
            "PATH": os.environ["PATH"],
            "HADOOP_CONF_DIR": str(cluster.conf_dir),
            "WEIGHTYARD_HDFS_USER": user,
        }
        done = subprocess.run(
            [sys.executable, "-c", script, url, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    of_alice = run("alice")
    of_bob = run("bob", of_alice)
    found = ask(cluster, "GET", f"{url}/{of_bob}", op="GETFILESTATUS")["FileStatus"]
    assert isinstance(found, dict)
    assert (found["owner"], found["group"], found["permission"]) == ("bob", "team", "660")
    run("alice", of_bob)


def test_a_second_hdfs_user_in_one_process_is_refused(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir, hdfs_user="someone-else")
    with pytest.raises(BadSetting, match="someone-else"):
        HdfsStore(store.url, settings)


def test_a_store_nobody_made_is_missing(cluster: MiniCluster) -> None:
    with opened(cluster) as store, pytest.raises(FileMissing):
        stage(store, b"x")


def test_a_namenode_that_hangs_is_an_error_in_time_and_forgiven_later(
    cluster: MiniCluster,
) -> None:
    with opened(cluster) as patient:
        patient.init()
        path = put(patient, b"x")
    (namenode,) = cluster.namenodes
    with opened(cluster, patient.url, deadline_s=1.5) as store:

        def look_on_and_on() -> None:
            while True:
                store.stat(path)

        namenode.pause()
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                look_on_and_on()
            assert time.monotonic() - began < 9, "before hdfs-native's own limit of 10 s"
        finally:
            namenode.resume()
        forgiven_by = time.monotonic() + LIMIT_S
        while True:
            try:
                found = store.stat(path)
                break
            except Retryable:
                assert time.monotonic() < forgiven_by
        assert found.length == 1


def test_a_store_outlives_the_active_namenode(ha_cluster: MiniCluster) -> None:
    with RetryingStore(opened(ha_cluster)) as store:
        store.init()
        path = put(store, b"before")
        active = ha_cluster.active
        active.kill()
        ha_cluster.fail_over()
        try:
            assert get(store, path) == b"before"
            assert get(store, put(store, b"after")) == b"after"
        finally:
            ha_cluster.restart(active)


def test_a_viewfs_folder_is_a_store(cluster: MiniCluster, tmp_path: Path) -> None:
    values = dict(Configuration.load(Settings(hadoop_conf_dir=cluster.conf_dir)).values)
    values["fs.viewfs.mounttable.all.link./mnt"] = cluster.fresh_dir()
    properties = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in values.items()
    )
    (tmp_path / "core-site.xml").write_text(f"<configuration>{properties}</configuration>")
    with HdfsStore("viewfs://all/mnt/yard", Settings(hadoop_conf_dir=tmp_path)) as store:
        store.init()
        path = put(store, b"mounted")
        assert get(store, path) == b"mounted"
        assert [file.path for file in store.list(layout.PACKS)] == [path]


def test_files_of_strangers_are_listed_past(cluster: MiniCluster, store: HdfsStore) -> None:
    path = put(store, b"x")
    ask(cluster, "PUT", f"{store.url}/packs/_odd%20name", op="MKDIRS")
    hostile = StorePath("packs/zz")
    staged = stage(store, b"y")
    store._namespace.rename(
        store._cluster.at(staged.path), store._cluster.at(hostile) + "/ö ä", 0o755
    )
    assert [file.path for file in store.list(layout.PACKS)] == [path]


def test_a_folder_that_someone_removed_is_made_again(store: HdfsStore) -> None:
    path = layout.pack(PackId.new())
    staged = [stage(store, b"x"), stage(store, b"y")]
    for number, one in enumerate(staged):
        store.publish(one, StorePath(f"{path}.{number}"))
        with opened_again(store) as other:
            other.delete(StorePath(f"{path}.{number}"))
            assert other.delete(StorePath(path.text.rpartition("/")[0]))
            assert other.delete(StorePath(one.path.text.rpartition("/")[0]))
    with store.stage(staged[0].path) as writing:
        writing.write(b"z")
        store.publish(writing.close(), path)
    assert get(store, path) == b"z"


def test_files_staged_at_once_have_their_folder_made_once(
    store: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    call = store._namespace.call

    def counted(doing: str, function: Callable[[Client], object]) -> object:
        if doing.startswith("making"):
            made.append(doing)
            time.sleep(0.2)  # so that the others come meanwhile
            if len(made) == 1:
                raise StoreUnavailable("nobody answers")
        return call(doing, function)

    monkeypatch.setattr(store._namespace, "call", counted)
    upload = UploadId.new()

    def staged(number: int) -> int:
        with store.stage(layout.staging(upload, f"file{number}")) as writing:
            writing.write(bytes(number))
            return writing.close().length

    with pytest.raises(StoreUnavailable):
        staged(0)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(staged, range(1, 5))) == [1, 2, 3, 4]
    assert len(made) == 2


def test_closing_a_file_tells_on_how_many_datanodes_it_lies_if_that_is_asked(
    store: HdfsStore,
) -> None:
    options = FileOptions(replication=2, counts_replicas=True)
    with store.stage(layout.staging(UploadId.new(), "file"), options) as writing:
        writing.write(b"x" * 1000)
        staged = writing.close()
    assert staged.length == 1000
    assert staged.replicas in (1, 2)  # of the second one the NameNode may not have heard yet
    assert stage(store, b"x").replicas is None


def test_a_file_that_is_whole_is_not_lost_because_its_replicas_could_not_be_counted(
    store: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> NoReturn:
        raise StoreUnavailable("the HTTP side does not answer")

    monkeypatch.setattr(store._namenode, "spread", silent)
    with store.stage(
        layout.staging(UploadId.new(), "file"), FileOptions(counts_replicas=True)
    ) as writing:
        writing.write(b"x" * 1000)
        staged = writing.close()
    assert (staged.length, staged.replicas) == (1000, None)


def test_a_file_of_another_length_than_was_written_is_not_taken_for_whole(
    store: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = store._namenode.spread

    def shortened(path: StorePath, deadline: Deadline) -> Location:
        return replace(spread(path, deadline), length=999)

    monkeypatch.setattr(store._namenode, "spread", shortened)
    upload = UploadId.new()
    with store.stage(layout.staging(upload, "file"), FileOptions(counts_replicas=True)) as writing:
        writing.write(b"x" * 1000)
        with pytest.raises(StoreUnavailable, match="wrote 1000, has 999 bytes"):
            writing.close()
    assert files_of(store, upload) == []


def opened_again(store: HdfsStore) -> HdfsStore:
    return HdfsStore(store.url, store._settings)
