from __future__ import annotations

import pytest
from collecting import KIB, gc, noise
from pushing import BERT, push, push_delta, write_pack

from weightyard.errors import NoSuchThing
from weightyard.names import ModelName, Ref
from weightyard.records import Publication
from weightyard.registry import binding, cost
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.opening import open_store
from weightyard.testing.cluster import MiniCluster
from weightyard.transfer.writer import WriteOptions

ONE = 66 * KIB
"""A block; it does not shrink, and takes as much when stored."""


def test_a_version_costs_what_it_has_and_frees_what_it_has_alone(
    registry: Registry, store: LocalStore
) -> None:
    push(registry, store, noise(1), noise(2))
    push(registry, store, noise(2), noise(3), noise(4))
    push(registry, store, noise(4), model=ModelName("other", "m"))
    cost = registry.cost(Ref.parse("team/bert@v2"), copies=3)
    assert cost.ref == "team/bert@v2"
    assert (cost.logical_bytes, cost.stored_bytes, cost.cold_load_bytes) == (3 * ONE,) * 3
    assert (cost.unique_bytes, cost.unique_stored_bytes) == (ONE, ONE)
    assert cost.replicated_bytes == 9 * ONE
    assert cost.packs == 2
    assert cost.namenode_objects == 2 * (2 + 3), "packs, manifest, record, journal: file and block"
    assert cost.shared_with == {"other/m@v1": ONE, "team/bert@v1": ONE}
    assert registry.freed_by_removing(Ref.parse("team/bert@v1")) == ONE
    assert registry.freed_by_removing(Ref.parse("other/m")) == 0
    assert registry.cost(Ref.parse("team/bert@v2"), shown=1).shared_with == {"other/m@v1": ONE}
    with pytest.raises(NoSuchThing):
        registry.cost(Ref.parse("team/bert@v9"))


def test_what_removing_promises_to_free_gc_frees(registry: Registry, store: LocalStore) -> None:
    push(registry, store, *(noise(seed) for seed in range(6)))
    push(registry, store, noise(1), noise(2))
    promised = registry.freed_by_removing(Ref.parse("team/bert@v1"))
    assert promised == 4 * ONE
    before = sum(file.length for file in store.list(layout.PACKS))
    registry.remove(Ref.parse("team/bert@v1"))
    gc(registry, store)
    after = sum(file.length for file in store.list(layout.PACKS))
    assert promised <= before - after < promised + 4 * KIB


def test_a_removed_version_shares_nothing(registry: Registry, store: LocalStore) -> None:
    push(registry, store, noise(1))
    push(registry, store, noise(1))
    registry.remove(Ref.parse("team/bert@v1"))
    cost = registry.cost(Ref.parse("team/bert"))
    assert cost.shared_with == {}
    assert cost.unique_stored_bytes == ONE


def test_however_many_versions_share_so_many_are_looked_at(
    registry: Registry, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        push(registry, store, noise(1), noise(100 + number))
    for number in range(4):
        push(registry, store, noise(1), model=ModelName("other", f"m{number}"))
    third = Ref.parse("team/bert@v3")
    assert len(registry.cost(third).shared_with) == 11, "few are all looked at"
    assert registry.cost(third).shared_with_is_complete
    assert not registry.cost(third, shown=10).shared_with_is_complete
    for name, most in (("BESIDE", 1), ("FOUND", 2)):
        monkeypatch.setattr(cost, name, most)
    looked_at = {"team/bert@v2", "team/bert@v4", "other/m2@v1", "other/m3@v1"}
    assert registry.cost(third).shared_with == dict.fromkeys(looked_at, ONE)
    assert not registry.cost(third).shared_with_is_complete
    monkeypatch.setattr(cost, "FOUND", 32)
    monkeypatch.setattr(cost, "WAYS", 5)
    assert not registry.cost(third).shared_with_is_complete
    monkeypatch.setattr(cost, "WAYS", 0)
    assert registry.cost(third).shared_with.keys() == {"team/bert@v2", "team/bert@v4"}
    registry.remove(Ref.parse("team/bert@v2"))
    assert registry.cost(third).shared_with.keys() == {"team/bert@v1", "team/bert@v4"}


def test_a_delta_needs_its_base_and_frees_it_with_itself(
    registry: Registry, store: LocalStore
) -> None:
    base = noise(1)
    delta = bytes(100) + base[100:]
    push(registry, store, base)
    push_delta(registry, store, delta, base)
    cost = registry.cost(Ref.parse("team/bert@v2"))
    assert cost.stored_bytes < KIB
    assert cost.cold_load_bytes == cost.stored_bytes + ONE
    assert cost.unique_stored_bytes == cost.stored_bytes, "another version has the base"
    assert registry.freed_by_removing(Ref.parse("team/bert@v1")) == 0, "a delta needs it"
    registry.remove(Ref.parse("team/bert@v1"))
    assert registry.freed_by_removing(Ref.parse("team/bert@v2")) == cost.stored_bytes + ONE


def test_what_is_stored_whole_and_as_a_delta_takes_both_and_is_loaded_once(
    registry: Registry, store: LocalStore
) -> None:
    base = noise(1)
    data = bytes(100) + base[100:]
    push(registry, store, base)
    only = registry.cost(Ref.parse(push_delta(registry, store, data, base).ref))
    upload = registry.open_upload(BERT, Publication())
    write_pack(upload, store, (data, None))
    upload.abandon()
    both = registry.cost(Ref.parse("team/bert@v2"))
    whole = both.cold_load_bytes
    assert whole > only.stored_bytes
    assert both.stored_bytes == only.stored_bytes + whole
    assert (both.packs, both.unique_stored_bytes) == (2, both.stored_bytes)
    promised = registry.freed_by_removing(Ref.parse("team/bert@v2"))
    before = sum(file.length for file in store.list(layout.PACKS))
    registry.remove(Ref.parse("team/bert@v2"))
    gc(registry, store)
    after = sum(file.length for file in store.list(layout.PACKS))
    assert promised <= before - after < promised + 4 * KIB


def test_the_base_of_a_delta_goes_when_the_cost_says_so_though_the_block_lies_whole_too(
    registry: Registry, store: LocalStore
) -> None:
    base = noise(1)
    data = bytes(100) + base[100:]
    push(registry, store, base)
    push_delta(registry, store, data, base)
    upload = registry.open_upload(BERT, Publication())
    write_pack(upload, store, (data, None))
    upload.abandon()
    for number in (1, 2):  # the base's own version first: the delta still needs it, for gc too
        ref = Ref.parse(f"team/bert@v{number}")
        promised = registry.freed_by_removing(ref)
        before = sum(file.length for file in store.list(layout.PACKS))
        registry.remove(ref)
        gc(registry, store)
        after = sum(file.length for file in store.list(layout.PACKS))
        assert promised <= before - after < promised + 4 * KIB


@pytest.mark.cluster
def test_hdfs_keeps_packs_and_manifests_as_the_most_demanding_version_asks(
    cluster: MiniCluster, database: Database
) -> None:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir)
    with open_store(cluster.fresh_dir(), settings) as store:
        binding.bind(database, store)
        registry = Registry(database)
        one = WriteOptions(replication=1)

        def copies() -> list[int]:
            registry.settle_replication(store)
            folders = (layout.PACKS, layout.MANIFESTS)
            return [file.replication for folder in folders for file in store.list(folder)]

        push(registry, store, noise(1), replication=1, options=one)
        assert copies() == [1, 1]
        push(registry, store, noise(1), replication=3)
        assert registry.settle_replication(store) == 2
        assert copies() == [3, 3]
        push(registry, store, noise(1), replication=2)
        assert copies() == [3, 3]
        assert registry.cost(Ref.parse("team/bert")).replicated_bytes == 3 * ONE
        registry.remove(Ref.parse("team/bert@v2"))
        gc(registry, store)
        assert copies() == [2, 2]
        for number in (1, 3):
            registry.remove(Ref.parse(f"team/bert@v{number}"))
        assert gc(registry, store).packs_deleted == 1
