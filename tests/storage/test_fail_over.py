from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightyard.names import PackId, UploadId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.retry import Retry, RetryingStore
from weightyard.storage.store import FileOptions, Store
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.faults import FaultyStore
from weightyard.testing.store_contract import get

pytestmark = pytest.mark.cluster

CONTENT = bytes(range(256)) * 5000
PATIENT = Retry(deadline_s=120.0)
"""The fail-over itself happens in a call, and takes a busy machine longer than a call may."""


def _publish(store: Store, policy: str | None = None) -> PackId:
    pack = PackId.new()
    options = FileOptions(replication=1, policy=policy)
    with store.stage(layout.staging(UploadId.new(), pack.hex), options) as stage:
        stage.write(CONTENT[:1000])
        stage.write(CONTENT[1000:])
        staged = stage.close()
    store.publish(staged, layout.pack(pack))
    store.locate(layout.pack(pack))
    return pack


@pytest.fixture
def hdfs(ha_cluster: MiniCluster) -> Iterator[HdfsStore]:
    with HdfsStore(ha_cluster.fresh_dir(), Settings(hadoop_conf_dir=ha_cluster.conf_dir)) as store:
        store.init()
        yield store


def _before(call: str, act: Callable[[], None], turn: int = 1) -> Callable[[int, str], None]:
    """Act once, before the call of this name whose turn it is."""
    seen = 0

    def on_call(index: int, name: str) -> None:
        nonlocal seen
        seen += name == call
        if name == call and seen == turn:
            act()

    return on_call


def _require_published(store: Store, pack: PackId) -> None:
    """The pack is there, and nothing else is, in staging neither."""
    assert get(store, layout.pack(pack)) == CONTENT
    assert [file.path for file in store.list(layout.PACKS)] == [layout.pack(pack)]
    assert list(store.list(layout.STAGING)) == []


@pytest.mark.parametrize(
    ("call", "turn"),
    [("stage", 1), ("write", 1), ("write", 2), ("close", 1), ("publish", 1), ("locate", 1)],
)
def test_a_publish_survives_a_fail_over_before_any_of_its_calls(
    ha_cluster: MiniCluster, hdfs: HdfsStore, call: str, turn: int
) -> None:
    before = ha_cluster.active
    failing = FaultyStore(hdfs, on_call=_before(call, ha_cluster.fail_over, turn))
    store = RetryingStore(failing, PATIENT)
    pack = _publish(store)
    assert ha_cluster.active is not before
    _require_published(store, pack)


def test_a_publish_survives_a_fail_over_between_making_a_file_and_giving_it_its_policy(
    ha_cluster: MiniCluster, hdfs: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, set_policy = ha_cluster.active, hdfs._namenode.set_policy
    to_do = [ha_cluster.fail_over]

    def set_after_fail_over(*asked: Any, **more: Any) -> None:
        while to_do:
            to_do.pop()()
        set_policy(*asked, **more)

    monkeypatch.setattr(hdfs._namenode, "set_policy", set_after_fail_over)
    store = RetryingStore(hdfs, PATIENT)
    pack = _publish(store, policy="ALL_SSD")
    assert ha_cluster.active is not before
    _require_published(store, pack)
    (replica,) = ha_cluster.replica_files(f"{hdfs.url}/{layout.pack(pack)}")
    assert "/ssd/" in str(replica.path)


def test_a_publish_survives_the_kill_of_the_active_namenode(
    ha_cluster: MiniCluster, hdfs: HdfsStore
) -> None:
    killed = ha_cluster.active

    def kill_and_fail_over() -> None:
        killed.kill()
        ha_cluster.fail_over()

    store = RetryingStore(
        FaultyStore(hdfs, on_call=_before("publish", kill_and_fail_over)), PATIENT
    )
    try:
        _require_published(store, _publish(store))
    finally:
        ha_cluster.restart(killed)


@pytest.mark.long  # hdfs-native waits for the silent one, too, call by call
def test_a_publish_survives_an_active_namenode_that_falls_silent(
    ha_cluster: MiniCluster, hdfs: HdfsStore
) -> None:
    silent = ha_cluster.active

    def pause_and_fail_over() -> None:
        silent.pause()
        ha_cluster.fail_over()

    store = RetryingStore(FaultyStore(hdfs, on_call=_before("write", pause_and_fail_over)), PATIENT)
    try:
        pack = _publish(store)
        assert ha_cluster.active is not silent
        assert get(store, layout.pack(pack)) == CONTENT
    finally:
        # Not resumed: it would still take itself for the active one, until its next edit.
        ha_cluster.restart(silent)
