"""Checking and healing where files have replicas: a real HDFS."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from collecting import DAY_S, pass_time, states
from pushing import push, read_back
from sqlalchemy import update

from weightyard.names import Digest, Ref
from weightyard.records import Version
from weightyard.registry import binding, migrate, schema
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.opening import open_store
from weightyard.storage.store import Store, StorePath
from weightyard.testing.cluster import MiniCluster, damage
from weightyard.transfer.publish import read_manifest
from weightyard.transfer.writer import WriteOptions

pytestmark = pytest.mark.cluster

LIMIT_S = 120.0
CONTENTS = [random.Random(seed).randbytes(200_000) for seed in (1, 2)]


@pytest.fixture
def store(cluster: MiniCluster) -> Iterator[Store]:
    with open_store(cluster.fresh_dir(), Settings(hadoop_conf_dir=cluster.conf_dir)) as store:
        yield store


@pytest.fixture
def registry(store: Store, tmp_path: Path) -> Iterator[Registry]:
    database = Database(f"sqlite:///{tmp_path}/registry.db")
    migrate.upgrade(database)
    binding.bind(database, store)
    with Registry(database, who="alice") as registry:
        yield registry


@pytest.fixture
def version(registry: Registry, store: Store, cluster: MiniCluster) -> Version:
    options = WriteOptions(replication=2, min_replicas=2)
    pushed = push(registry, store, *CONTENTS, options=options, replication=2)
    registry.flush_outbox(store)
    for file in (the_pack(store), layout.manifest(Digest(pushed.digest))):
        cluster.wait_for_replication(f"{store.url}/{file}", 2, LIMIT_S)
    return pushed


def the_pack(store: Store) -> StorePath:
    (pack,) = store.list(layout.PACKS)
    return pack.path


def test_one_damaged_replica_is_found_by_its_datanode_and_its_pack_written_anew(
    registry: Registry, store: Store, version: Version, cluster: MiniCluster
) -> None:
    pack = the_pack(store)
    bad, _good = cluster.replica_files(f"{store.url}/{pack}")
    damage(bad, offset=1000, hide=True)
    report = registry.check(store, read_data=True)
    (finding,) = report.findings
    assert (finding.code, finding.subject) == ("replica-damaged", pack.text)
    assert bad.datanode.plan.address in finding.detail
    assert finding.versions == (version.ref,)
    assert report.replicas_named
    assert not registry.resolve(Ref.parse(version.ref)).damaged, "the other replica is well"
    assert read_back(registry, store, version) == CONTENTS
    assert registry.heal(store, report).healed == (pack.text,)
    (fresh,) = {file.path for file in store.list(layout.PACKS)} - {pack}
    cluster.wait_for_replication(f"{store.url}/{fresh}", 2, LIMIT_S)
    assert registry.check(store, read_data=True).is_clean, "the old one only waits for gc"
    assert states(registry.database) == ["damaged", "live"]
    pass_time(registry.database, 8 * DAY_S)
    registry.gc(store)
    assert the_pack(store) == fresh
    assert read_back(registry, store, version) == CONTENTS, f"it lies in {fresh} now"


def test_a_pack_damaged_on_every_replica_makes_its_versions_damaged(
    registry: Registry, store: Store, version: Version, cluster: MiniCluster
) -> None:
    for replica in cluster.replica_files(f"{store.url}/{the_pack(store)}"):
        damage(replica, offset=1000, hide=True)
    report = registry.check(store, read_data=True)
    assert [finding.code for finding in report.findings] == ["damaged"]
    assert report.damaged_versions == (version.ref,)


def test_a_manifest_with_one_damaged_replica_is_read_and_written_anew(
    registry: Registry, store: Store, version: Version, cluster: MiniCluster
) -> None:
    path = layout.manifest(Digest(version.digest))
    bad, _good = cluster.replica_files(f"{store.url}/{path}")
    damage(bad, offset=20, hide=True)
    assert len(read_manifest(store, Digest(version.digest)).tensors) == 2
    report = registry.check(store, read_data=True)
    assert [(one.code, one.subject) for one in report.findings] == [("replica-damaged", path.text)]
    assert registry.heal(store, report).healed == (path.text,)
    copies = store.stat(path).replication
    cluster.wait_for_replication(f"{store.url}/{path}", copies, LIMIT_S)
    assert registry.check(store, read_data=True).is_clean
    assert not registry.resolve(Ref.parse(version.ref)).damaged


def test_a_pack_kept_on_too_few_datanodes_is_found_and_hdfs_is_told(
    registry: Registry, store: Store, version: Version, cluster: MiniCluster
) -> None:
    pack = the_pack(store)
    asks_for_three = update(schema.packs).values(replication=3)
    registry.database.write(lambda tx: tx.execute(asks_for_three))
    report = registry.check(store)
    assert {one.code for one in report.findings} == {"replication-low", "under-replicated"}
    assert {one.subject for one in report.findings} == {pack.text}
    registry.heal(store, report)
    cluster.wait_for_replication(f"{store.url}/{pack}", 3, LIMIT_S)
    assert registry.check(store).is_clean


def test_what_is_on_datanodes_that_are_away_is_unreachable_and_never_marked_damaged(
    registry: Registry, store: Store, version: Version, cluster: MiniCluster
) -> None:
    pack = the_pack(store)
    away = [replica.datanode for replica in cluster.replica_files(f"{store.url}/{pack}")]
    try:
        for datanode in away:
            datanode.kill()
        report = registry.check(store, read_data=True)
    finally:
        for datanode in away:
            cluster.restart(datanode)
    assert ("unreachable", pack.text) in {(one.code, one.subject) for one in report.findings}
    assert {one.code for one in report.findings} <= {"unreachable", "under-replicated"}
    assert report.damaged_versions == ()
    assert not registry.resolve(Ref.parse(version.ref)).damaged
    assert registry.check(store, read_data=True).is_clean
    assert read_back(registry, store, version) == CONTENTS
