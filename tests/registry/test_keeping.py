"""How many copies of a version there are, where versions share packs."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightyard.format.block import MIB
from weightyard.names import Ref
from weightyard.records import Version
from weightyard.registry import binding
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore
from weightyard.storage.store import FileOptions, StorePath
from weightyard.yard import Yard


class ReplicatingStore(LocalStore):
    """A folder that notes what it was told of copies, as HDFS would follow it."""

    replicates = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.told: dict[StorePath, FileOptions] = {}

    def adjust(self, path: StorePath, options: FileOptions) -> None:
        self.stat(path)
        self.told[path] = options

    @property
    def copies(self) -> set[int | None]:
        return {options.replication for options in self.told.values()}


@pytest.fixture
def store(tmp_path: Path) -> ReplicatingStore:
    return ReplicatingStore(tmp_path / "store")


@pytest.fixture
def two(database: Database, store: ReplicatingStore, tmp_path: Path) -> Registry:
    """Two versions with the same content: one pack serves both."""
    registry = Registry(database, who="test")
    binding.bind(database, store)
    yard = Yard(LocalStore(store.folder), registry, block_bytes=MIB)
    (tmp_path / "file").write_bytes(b"weights" * 1000)
    for _ in range(2):
        yard.push(tmp_path / "file", "team/bert")
    return registry


def _keep(registry: Registry, store: ReplicatingStore, ref: str, copies: int) -> Version:
    kept = registry.keep(Ref.parse(ref), copies=copies, policy=None)
    registry.settle_replication(store)
    return kept


def test_a_pack_is_kept_as_the_most_demanding_version_asks(
    two: Registry, store: ReplicatingStore
) -> None:
    assert _keep(two, store, "team/bert@v1", 3).replication == 3
    assert store.copies == {3}
    _keep(two, store, "team/bert@v2", 5)
    assert store.copies == {5}
    _keep(two, store, "team/bert@v1", 2)
    assert store.copies == {5}
    _keep(two, store, "team/bert@v2", 1)
    assert store.copies == {2}


def test_who_asked_for_copies_is_in_the_audit_log(two: Registry, store: ReplicatingStore) -> None:
    _keep(two, store, "team/bert@v1", 3)
    (entry,) = [entry for entry in two.audit() if entry.action == "version.kept"]
    assert (entry.who, entry.subject) == ("test", "team/bert@v1")
    assert entry.detail == {"replication": 3}
