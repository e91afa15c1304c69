from __future__ import annotations

from collections.abc import Callable, Iterator

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


def _publish(store: Store) -> PackId:
    pack = PackId.new()
    with store.stage(layout.staging(UploadId.new(), pack.hex), FileOptions(replication=1)) as stage:
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


def _before(call: str, act: Callable[[], None]) -> Callable[[int, str], None]:
    """Act once, before the first call of this name."""
    done = False

    def on_call(index: int, name: str) -> None:
        nonlocal done
        if name == call and not done:
            done = True
            act()

    return on_call


@pytest.mark.parametrize("call", ["stage", "write", "close", "publish", "locate"])
def test_a_publish_survives_a_fail_over_before_any_of_its_calls(
    ha_cluster: MiniCluster, hdfs: HdfsStore, call: str
) -> None:
    before = ha_cluster.active
    store = RetryingStore(FaultyStore(hdfs, on_call=_before(call, ha_cluster.fail_over)), PATIENT)
    pack = _publish(store)
    assert ha_cluster.active is not before
    assert get(store, layout.pack(pack)) == CONTENT
    assert [file.path for file in store.list(layout.PACKS)] == [layout.pack(pack)]


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
        pack = _publish(store)
        assert get(store, layout.pack(pack)) == CONTENT
    finally:
        ha_cluster.restart(killed)
