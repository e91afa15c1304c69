"""On how many DataNodes packs are that a version found in the store: a real HDFS."""

from __future__ import annotations

import pytest
from collecting import noise
from pushing import push

from weightyard.registry import binding
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.opening import open_store
from weightyard.storage.store import Store
from weightyard.testing.cluster import MiniCluster
from weightyard.transfer import durable
from weightyard.transfer.writer import WriteOptions

pytestmark = pytest.mark.cluster


def _datanodes(store: Store) -> list[int]:
    """Of each pack's bytes, those that are on the fewest."""
    return [
        min(len(span.replicas) for span in store.locate(file.path).spans)
        for file in store.list(layout.PACKS)
    ]


def test_a_published_version_refers_to_no_pack_on_a_single_datanode(
    cluster: MiniCluster, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "REPLICAS_TIMEOUT_S", 120.0)  # HDFS copies in its own time
    settings = Settings(hadoop_conf_dir=cluster.conf_dir)
    with open_store(cluster.fresh_dir(), settings) as store:
        binding.bind(database, store)
        registry = Registry(database, store=store)
        push(registry, store, noise(1), replication=1, options=WriteOptions(replication=1))
        assert _datanodes(store) == [1]
        push(registry, store, noise(1))
        assert len(_datanodes(store)) == 1, "nothing is written twice"
        assert _datanodes(store)[0] >= 2
