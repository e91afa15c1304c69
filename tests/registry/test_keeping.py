"""How many copies of a version there are, where versions share packs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pushing import BERT, push, write

from weightyard.errors import Refused, UnderReplicated
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import Digest, Ref
from weightyard.records import Publication, Version
from weightyard.registry import binding
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import FileOptions, FileStat, Location, Stage, StorePath
from weightyard.transfer import durable
from weightyard.transfer.publish import publish
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, Writer
from weightyard.yard import Yard


class ReplicatingStore(LocalStore):
    """A folder that notes what it was told of copies, as HDFS would follow it."""

    replicates = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.told: dict[StorePath, FileOptions] = {}
        self.located: list[StorePath] = []
        self.usual = 1
        self.datanodes = 1

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        return super().stage(path)

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        self.located.append(path)
        found = super().locate(path, timeout_s=timeout_s)
        spans = tuple(
            dataclasses.replace(span, replicas=span.replicas * self.datanodes)
            for span in found.spans
        )
        return dataclasses.replace(found, spans=spans)

    def stat(self, path: StorePath) -> FileStat:
        return dataclasses.replace(super().stat(path), replication=self.usual)

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
    # Once its records are written: that thread would tell its own store of copies asked for now.
    assert yard.registry is registry
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


def test_who_tells_the_store_late_does_not_undo_what_it_was_told_since(
    two: Registry, store: ReplicatingStore
) -> None:
    class Late(ReplicatingStore):
        """Before it passes on what it was told of a pack, another has asked for more."""

        def adjust(self, path: StorePath, options: FileOptions) -> None:
            if path.text.startswith("packs/"):
                _keep(two, store, "team/bert@v1", 5)
            store.adjust(path, options)

    two.keep(Ref.parse("team/bert@v1"), copies=4, policy=None)
    two.settle_replication(Late(store.folder))
    two.settle_replication(store)
    assert store.copies == {5}
    assert two.settle_replication(store) == 0, "nothing is left to tell"


def test_who_asks_for_neither_copies_nor_a_policy_is_refused(two: Registry) -> None:
    with pytest.raises(Refused, match="copies"):
        two.keep(Ref.parse("team/bert@v1"), copies=None, policy=None)


def test_who_asked_for_copies_is_in_the_audit_log(two: Registry, store: ReplicatingStore) -> None:
    _keep(two, store, "team/bert@v1", 3)
    (entry,) = [entry for entry in two.audit() if entry.action == "version.kept"]
    assert (entry.who, entry.subject) == ("test", "team/bert@v1")
    assert entry.detail == {"replication": 3}


def _manifest(version: Version) -> StorePath:
    return layout.manifest(Digest(version.digest))


def test_a_manifest_is_kept_as_the_most_demanding_version_asks(
    database: Database, store: ReplicatingStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database, who="test")
    plain = LocalStore(store.folder)
    path = _manifest(push(registry, plain, b"weights" * 1000))
    assert registry.settle_replication(store) == 0, "nobody asked"
    _ask(registry, store, "team/bert@v1", 3)
    push(registry, plain, b"weights" * 1000)  # asks for nothing: the usual is less
    registry.flush_outbox(store)
    assert store.told[path].replication == 3
    _ask(registry, store, "team/bert@v2", 5)
    assert store.told[path].replication == 5
    registry.remove(Ref.parse("team/bert@v2"))
    registry.gc(store, GcOptions(grace_s=0, unsafe_grace=True))
    assert store.told[path].replication == 3
    registry.remove(Ref.parse("team/bert@v1"))
    push(registry, plain, b"weights" * 1000)
    registry.gc(store, GcOptions(grace_s=0, unsafe_grace=True))
    assert store.told[path].replication == 1, "as the store keeps any file"


def _ask(registry: Registry, store: ReplicatingStore, ref: str, copies: int) -> None:
    registry.keep(Ref.parse(ref), copies=copies, policy=None)
    registry.flush_outbox(store)


def test_a_commit_raises_the_copies_of_a_manifest_and_packs_it_found_there(
    database: Database, store: ReplicatingStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database, who="test")
    version = push(registry, store, b"weights" * 1000, replication=1)
    assert push(registry, store, b"weights" * 1000, replication=4).digest == version.digest
    registry.flush_outbox(store)
    assert store.copies == {4}
    assert _manifest(version) in store.told
    assert len(store.told) == 2, "the pack, too"


def test_a_version_that_asks_for_few_copies_takes_none_from_one_that_asks_for_nothing(
    database: Database, store: ReplicatingStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database, who="test")
    plain = LocalStore(store.folder)
    store.usual = 3
    push(registry, plain, b"weights" * 1000)
    push(registry, plain, b"weights" * 1000, replication=1)
    registry.flush_outbox(store)
    assert store.copies <= {3}
    first = push(registry, plain, b"other" * 1000, replication=1)
    push(registry, plain, b"other" * 1000)
    registry.flush_outbox(store)
    assert store.told[_manifest(first)].replication == 3
    assert store.copies == {3}


def test_a_version_is_not_published_before_its_manifest_is_on_enough_datanodes(
    database: Database, store: ReplicatingStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database, who="test")
    split = split_state([StateTensor("t", DType.U8, (5,))], MIB)
    upload = registry.open_upload(BERT, Publication())
    ids = Writer(store, upload).write([Content(split, [MemorySource(b"12345")])])
    manifest = manifest_of([split], ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "REPLICAS_TIMEOUT_S", 0.2)
        with pytest.raises(UnderReplicated, match="manifests/"):
            publish(store, upload, manifest, Publication(), "key", min_replicas=2)
    assert registry.models() == []
    path = next(file.path for file in store.list(layout.MANIFESTS))
    assert store.told[path].replication == 2, "HDFS was asked for more copies of what is there"


def test_a_manifest_that_was_found_and_read_is_not_located_once_more_to_count_its_copies(
    database: Database, store: ReplicatingStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database, who="test")
    path = _manifest(push(registry, store, b"weights" * 1000))
    store.located.clear()
    push(registry, store, b"weights" * 1000)
    assert [one for one in store.located if one == path] == [path]


@pytest.mark.parametrize(("asked", "there"), [(2, 1), (1, 2)])
def test_a_manifest_that_was_found_counts_neither_on_too_few_datanodes_nor_if_fewer_are_asked_for(
    database: Database,
    store: ReplicatingStore,
    monkeypatch: pytest.MonkeyPatch,
    asked: int,
    there: int,
) -> None:
    """`asked` of the store by whoever wrote it, and `there` for now."""
    binding.bind(database, store)
    registry = Registry(database, who="test")
    version = push(registry, store, b"weights" * 1000)
    path = _manifest(version)
    store.usual, store.datanodes = asked, there
    monkeypatch.setattr(durable, "REPLICAS_TIMEOUT_S", 0.2)
    upload = registry.open_upload(BERT, Publication())
    manifest = write(upload, store, b"weights" * 1000)
    if there < 2:
        with pytest.raises(UnderReplicated, match="manifests/"):
            publish(store, upload, manifest, Publication(), "key", min_replicas=2)
    else:
        publish(store, upload, manifest, Publication(), "key", min_replicas=2)
        assert store.told[path].replication == 2, "it would lose the second copy again"


def test_a_version_is_not_published_before_packs_it_found_are_on_enough_datanodes(
    database: Database, store: ReplicatingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding.bind(database, store)
    registry = Registry(database, store=store, who="test")
    push(registry, store, b"weights" * 1000, replication=1)
    (pack,) = (file.path for file in store.list(layout.PACKS))
    monkeypatch.setattr(durable, "REPLICAS_TIMEOUT_S", 0.2)
    with pytest.raises(UnderReplicated, match=str(pack)):
        push(registry, store, b"weights" * 1000)
    assert [version.number for version in registry.versions(BERT)] == [1]
    assert store.told[pack].replication == 2, "HDFS was asked for more copies of what is there"


def test_a_pack_is_doubtful_until_the_store_was_told_of_its_copies(
    database: Database, store: ReplicatingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding.bind(database, store)
    registry = Registry(database, store=store, who="test")
    push(registry, store, b"weights" * 1000, replication=1)
    registry.keep(Ref.parse("team/bert@v1"), copies=3, policy=None)
    monkeypatch.setattr(durable, "REPLICAS_TIMEOUT_S", 0.2)
    with pytest.raises(UnderReplicated, match="packs/"):
        push(registry, store, b"weights" * 1000)


@pytest.mark.parametrize("copies", [None, 1])
def test_packs_that_are_kept_as_this_version_needs_them_are_not_looked_at(
    database: Database, store: ReplicatingStore, copies: int | None
) -> None:
    binding.bind(database, store)
    registry = Registry(database, store=store, who="test")
    push(registry, store, b"weights" * 1000, replication=copies)
    store.located.clear()
    push(registry, store, b"weights" * 1000, replication=copies)
    assert [path for path in store.located if path.text.startswith("packs/")] == []
