"""A yard under a space quota: HDFS charges a whole block to it while one is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from collecting import noise
from over_webhdfs import ask
from pushing import push, read_back

from weightyard.format.block import MIB
from weightyard.registry import binding
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.opening import open_store
from weightyard.storage.retry import RetryingStore
from weightyard.storage.store import FileOptions
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.store_contract import get, put

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_small_version_fits_a_small_space_quota(cluster: MiniCluster, database: Database) -> None:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir)
    with open_store(cluster.fresh_dir(), settings) as store:
        store.init()
        ask(cluster, "PUT", store.url, op="SETQUOTA", storagespacequota=64 * MIB)
        binding.bind(database, store)
        registry = Registry(database, store=store)
        contents = [noise(seed) for seed in range(4)]
        version = push(registry, store, *contents)
        registry.flush_outbox(store)
        assert read_back(registry, store, version) == contents


def test_small_files_can_be_written_where_no_block_may_be_small(
    own_cluster: Callable[..., MiniCluster],
) -> None:
    properties = {"dfs.namenode.fs-limits.min-block-size": str(8 * MIB)}
    with own_cluster(racks=("a",), properties=properties) as cluster:
        settings = Settings(hadoop_conf_dir=cluster.conf_dir)
        with RetryingStore(HdfsStore(cluster.fresh_dir(), settings)) as store:
            store.init()
            path = put(store, b"small", FileOptions(planned_bytes=5))
            assert get(store, path) == b"small"
