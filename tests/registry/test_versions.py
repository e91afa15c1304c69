from __future__ import annotations

import random
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from collecting import noise, pass_time
from pushing import BERT, push, push_delta, read_back, write
from sqlalchemy import Connection, select, update
from waiting import eventually

from weightyard import catalogued
from weightyard.errors import (
    AliasMoved,
    BlockMissing,
    ForeignStore,
    KeyReused,
    NoSuchThing,
    Protected,
    QuotaExceeded,
    Refused,
    TooLarge,
    UploadExpired,
    VersionMoved,
)
from weightyard.format import manifest as manifests
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import AliasName, Digest, FilePath, ModelName, PackId, Ref
from weightyard.records import Publication, Version
from weightyard.registry import binding, migrate, received, schema, versions
from weightyard.registry.database import Database, now_ms
from weightyard.registry.registry import Registry
from weightyard.registry.schema import FileState
from weightyard.registry.uploads import Reading
from weightyard.registry.versions import stored_bytes_of_project
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store
from weightyard.transfer import alive
from weightyard.transfer.publish import publish, read_manifest
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer
from weightyard.yard import Yard

NOISE = noise(1)


def test_versions_are_numbered_one_after_the_other(registry: Registry, store: Store) -> None:
    first = push(registry, store, b"one" * 30_000, message="first", metrics={"loss": 0.5})
    second = push(registry, store, b"two" * 30_000, parent="team/bert@v1", tags={"k": "v"})
    assert (first.ref, second.ref) == ("team/bert@v1", "team/bert@v2")
    assert registry.resolve(Ref.parse("team/bert")) == second
    assert registry.resolve(Ref.parse("team/bert@v1")) == first
    assert registry.resolve(Ref.parse(f"team/bert@{first.digest}")) == first
    assert (second.parent, second.tags, first.metrics) == (
        "team/bert@v1",
        {"k": "v"},
        {"loss": 0.5},
    )
    assert [version.number for version in registry.versions(BERT)] == [2, 1]
    (model,) = registry.models()
    assert (model.name, model.latest, model.versions) == ("team/bert", 2, 2)
    assert read_manifest(store, Digest(second.digest)).tensors[0].shape == (90_000,)


def test_what_is_there_is_claimed_and_not_written_again(registry: Registry, store: Store) -> None:
    push(registry, store, b"a" * MIB, b"b" * MIB)
    packs = list(store.list(layout.PACKS))
    push(registry, store, b"b" * MIB, b"a" * MIB)
    assert list(store.list(layout.PACKS)) == packs


def test_a_lost_answer_of_a_commit_is_asked_for_again_by_its_key(
    registry: Registry, store: Store
) -> None:
    publication = Publication()
    upload = registry.open_upload(BERT, publication)
    split = split_state([StateTensor("t", DType.U8, (5,))], MIB)
    ids = Writer(store, upload).write([Content(split, [MemorySource(b"12345")])])
    manifest = manifest_of([split], ids)
    first = publish(store, upload, manifest, publication, "key-1")
    again = upload.commit(Digest(first.digest), manifest, publication, "key-1")
    assert again == first
    assert [version.number for version in registry.versions(BERT)] == [1]


def test_a_key_used_for_other_content_is_refused(registry: Registry, store: Store) -> None:
    push(registry, store, b"one", key="key-1")
    with pytest.raises(KeyReused):
        push(registry, store, b"two", key="key-1")
    assert len(registry.versions(BERT)) == 1


def test_a_commit_repeated_with_other_content_is_refused(registry: Registry, store: Store) -> None:
    publication = Publication()
    upload = registry.open_upload(BERT, publication)
    splits = [split_state([StateTensor(name, DType.U8, (5,))], MIB) for name in ("t", "u")]
    ids = Writer(store, upload).write([Content(splits[0], [MemorySource(b"12345")])])
    publish(store, upload, manifest_of([splits[0]], ids), publication, "key-1")
    other = manifest_of([splits[1]], ids)
    with pytest.raises(KeyReused, match="other content"):
        upload.commit(manifests.encode(other)[0], other, publication, "key-1")
    assert len(registry.versions(BERT)) == 1


def test_a_publisher_that_expects_another_version_is_told_the_current_one(
    registry: Registry, store: Store
) -> None:
    push(registry, store, b"one", expect_latest=0)
    with pytest.raises(VersionMoved) as moved:
        push(registry, store, b"two", expect_latest=0)
    assert moved.value.current == 1
    push(registry, store, b"two", expect_latest=1)


def test_a_publisher_expects_the_newest_version_there_is_now(
    registry: Registry, store: Store
) -> None:
    push(registry, store, b"one")
    push(registry, store, b"two")
    registry.remove(Ref.parse("team/bert@v2"))
    with pytest.raises(VersionMoved) as moved:
        push(registry, store, b"three", expect_latest=2)
    assert moved.value.current == 1
    assert push(registry, store, b"three", expect_latest=1).number == 3
    registry.remove(Ref.parse("team/bert@v1"))
    registry.remove(Ref.parse("team/bert@v3"))
    assert push(registry, store, b"four", expect_latest=0).number == 4


def test_the_parent_is_the_version_that_was_meant_when_the_upload_was_opened(
    registry: Registry, store: Store
) -> None:
    push(registry, store, b"one", alias="prod")
    push(registry, store, b"two")
    upload = registry.open_upload(BERT, Publication(parent="team/bert@prod"))
    registry.move_alias(BERT, AliasName("prod"), 2)
    assert registry.find_upload(upload.id).publication.parent == "team/bert@v1"
    with pytest.raises(NoSuchThing):
        registry.open_upload(BERT, Publication(parent="team/bert@v9"))


def test_a_block_the_upload_does_not_hold_cannot_be_published(
    registry: Registry, store: Store
) -> None:
    publication = Publication()
    upload = registry.open_upload(BERT, publication)
    split = split_state([StateTensor("t", DType.U8, (5,))], MIB)
    ids = Writer(store, upload).write([Content(split, [MemorySource(b"12345")])])
    other = registry.open_upload(BERT, publication)
    with pytest.raises(BlockMissing):
        publish(store, other, manifest_of([split], ids), publication, "k")


def test_an_upload_whose_lease_ended_cannot_commit(database: Database, store: Store) -> None:
    binding.bind(database, store)
    short = Registry(database, lease_s=0)
    with pytest.raises(UploadExpired, match="push again"):
        push(short, store, b"late")
    assert short.models() == []


LEASE_S = 1000.0
NEARLY_S = 900.0


def test_a_heartbeat_makes_a_lease_begin_anew_and_only_that(
    database: Database, store: Store
) -> None:
    binding.bind(database, store)
    upload = Registry(database, lease_s=LEASE_S).open_upload(BERT, Publication())
    for _ in range(3):
        pass_time(database, NEARLY_S)
        upload.heartbeat()
    pass_time(database, NEARLY_S)
    manifest = write(upload, store, NOISE)  # does not, though it asks and tells
    pass_time(database, NEARLY_S)
    with pytest.raises(UploadExpired, match="silent for too long"):
        upload.heartbeat()
    with pytest.raises(UploadExpired):
        publish(store, upload, manifest, Publication(), "k")


class SlowSource(MemorySource):
    """Takes nearly a lease for each of its reads, and then as long as nobody says it lives."""

    def __init__(self, data: bytes, database: Database, is_beating: bool) -> None:
        super().__init__(data)
        self._database = database
        self._is_beating = is_beating

    def read_into(self, offset: int, into: memoryview) -> None:
        for _ in range(2):
            pass_time(self._database, NEARLY_S)
            if self._is_beating:
                eventually(lambda: self._left_s() > NEARLY_S)
        super().read_into(offset, into)

    def _left_s(self) -> float:
        left_ms = select(schema.uploads.c.lease_ms - now_ms())
        return self._database.read(lambda tx: tx.scalar(left_ms) or 0) / 1000


@pytest.mark.parametrize("is_beating", [True, False])
def test_a_push_outlives_its_lease_as_long_as_its_heart_beats(
    database: Database, store: Store, monkeypatch: pytest.MonkeyPatch, is_beating: bool
) -> None:
    monkeypatch.setattr(alive, "HEARTBEAT_S", 0.02 if is_beating else 3600.0)
    binding.bind(database, store)
    registry = Registry(database, lease_s=LEASE_S)
    split = split_state([StateTensor("t", DType.U8, (len(NOISE),))], MIB)

    def slow_push() -> Version:
        with alive.kept_alive(registry.open_upload(BERT, Publication())) as upload:
            content = Content(split, [SlowSource(NOISE, database, is_beating)])
            manifest = manifest_of([split], Writer(store, upload).write([content]))
            return publish(store, upload, manifest, Publication(), "k")

    if is_beating:
        assert read_back(registry, store, slow_push()) == [NOISE]
    else:
        with pytest.raises(UploadExpired):
            slow_push()
        assert registry.models() == []


def test_concurrent_publishers_get_consecutive_numbers(registry: Registry, store: Store) -> None:
    wrong: list[BaseException] = []

    def work(i: int) -> None:
        try:
            push(registry, store, b"%d" % i * 1000, b"shared" * 1000)
        except BaseException as why:  # noqa: BLE001 - told to the test
            wrong.append(why)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert [version.number for version in registry.versions(BERT)] == list(range(16, 0, -1))


def test_an_alias_moves_with_its_history(registry: Registry, store: Store) -> None:
    prod = AliasName("prod")
    push(registry, store, b"one", alias="prod")
    push(registry, store, b"two")
    before = datetime.now(UTC)
    time.sleep(0.01)  # times of moves are in milliseconds
    registry.move_alias(BERT, prod, 2, reason="better", expect=1)
    assert registry.resolve(Ref.parse("team/bert@prod")).number == 2
    with pytest.raises(AliasMoved) as moved:
        registry.move_alias(BERT, prod, 1, expect=1)
    assert moved.value.current == 2
    assert [(m.before, m.after, m.who, m.reason) for m in registry.alias_log(BERT, prod)] == [
        (1, 2, "alice", "better"),
        (None, 1, "alice", "published"),
    ]
    assert registry.alias_log(BERT, prod, as_of=before)[0].after == 1
    registry.rollback_alias(BERT, prod)
    assert registry.alias(BERT, prod) == 1


def test_a_rollback_goes_back_along_the_history_and_never_to_what_was_left(
    registry: Registry, store: Store
) -> None:
    prod = AliasName("prod")
    for content in (b"one", b"two", b"three"):
        push(registry, store, content, alias="prod")
    registry.move_alias(BERT, prod, 3, reason="once more")
    assert registry.rollback_alias(BERT, prod).after == 2, "a move on the spot is none"
    assert registry.rollback_alias(BERT, prod).after == 1
    with pytest.raises(NoSuchThing, match="nowhere before"):
        registry.rollback_alias(BERT, prod)
    registry.move_alias(BERT, prod, 3)
    assert registry.rollback_alias(BERT, prod).after == 1
    registry.move_alias(BERT, prod, None)
    assert registry.rollback_alias(BERT, prod).after == 1, "a removal is taken back, too"
    assert len(registry.alias_log(BERT, prod)) == 10, "every move is kept"


def test_a_version_with_an_alias_or_a_child_is_protected(registry: Registry, store: Store) -> None:
    push(registry, store, b"one", alias="prod")
    push(registry, store, b"two", parent="team/bert@v1")
    with pytest.raises(Protected, match="alias prod"):
        registry.remove(Ref.parse("team/bert@v1"))
    registry.move_alias(BERT, AliasName("prod"), None)
    with pytest.raises(Protected, match="parent"):
        registry.remove(Ref.parse("team/bert@v1"))
    registry.remove(Ref.parse("team/bert@v2"))
    registry.remove(Ref.parse("team/bert@v1"))
    with pytest.raises(NoSuchThing):
        registry.resolve(Ref.parse("team/bert"))
    assert push(registry, store, b"three").number == 3, "a number is never given out twice"


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"loss": "abc"}},
        {"metrics": {"loss": float("nan")}},
        {"message": "a\0b"},
        {"message": "half \udcff"},
        {"tags": {"k\0": "v"}},
        {"tags": {"k": "\udcff"}},
        {"metadata": {"x": float("nan")}},
        {"metadata": {"x": [{1, 2}]}},
        {"metadata": {"x": {1: 2}}},
        {"metadata": {"x": {"\udcff": 2}}},
        {"metadata": {"x": 1 << 64}},
        {"tags": ["a"]},
        {"message": None},
        {"message": "m" * 10_001},
    ],
)
def test_what_a_version_cannot_say_of_itself_is_refused_and_changes_nothing(
    registry: Registry, store: Store, changes: dict[str, object]
) -> None:
    before = push(registry, store, NOISE, message="first")
    with pytest.raises(Refused, match=next(iter(changes))):
        registry.annotate(Ref.parse("team/bert"), changes)
    assert registry.resolve(Ref.parse("team/bert")) == before


def test_a_file_received_again_counts_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received, "MAX_FILES", 2)
    upload = registry.open_upload(BERT, Publication())
    for path, manifest in (("a", b"1"), ("b", b"2"), ("b", b"3")):
        upload.put_file(FilePath(path), manifest)
    with pytest.raises(TooLarge, match="2 files"):
        upload.put_file(FilePath("c"), b"4")
    assert upload.received() == [b"1", b"3"]


def test_records_and_journal_reach_the_store(registry: Registry, store: Store) -> None:
    push(registry, store, b"one", alias="prod")
    assert registry.flush_outbox(store) == 4
    assert registry.flush_outbox(store) == 0
    assert {file.path for file in store.list(layout.MODELS)} == {layout.record(BERT, 1)}
    assert len(list(store.list(layout.JOURNAL))) == 3, "model made, version published, alias moved"


def test_those_who_open_a_new_yard_at_once_get_the_same_one(
    database: Database, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "new")
    together = threading.Barrier(8)
    yards: list[str] = []

    def open_it() -> None:
        together.wait(60)
        yards.append(binding.bind(database, store).yard_id)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(yards) == 8
    assert len(set(yards)) == 1


def test_a_store_of_another_registry_is_refused(
    registry: Registry, store: Store, tmp_path: Path
) -> None:
    other = Database(f"sqlite:///{tmp_path}/other.db")
    migrate.upgrade(other)
    with pytest.raises(ForeignStore, match="belongs to registry"):
        binding.bind(other, store)
    other.close()


def _mark_packs_damaged(registry: Registry, *names: str) -> None:
    packs = schema.packs
    damaged = update(packs).where(packs.c.name.in_(names)).values(state=FileState.DAMAGED)
    registry.database.write(lambda tx: tx.execute(damaged))


def _packs(registry: Registry, data: bytes) -> list[str]:
    block = block_id(data)
    return [placement.pack.hex for placement in registry.placements([block])[block]]


def test_a_version_is_not_published_on_a_pack_found_damaged_since_it_was_claimed(
    registry: Registry, store: Store
) -> None:
    push(registry, store, NOISE)
    upload = registry.open_upload(BERT, Publication())
    manifest = write(upload, store, NOISE)
    _mark_packs_damaged(registry, *_packs(registry, NOISE))
    with pytest.raises(BlockMissing):
        publish(store, upload, manifest, Publication(), "k")
    assert [version.number for version in registry.versions(BERT)] == [1]
    write(upload, store, NOISE)  # not found there any more, so it is written anew
    assert publish(store, upload, manifest, Publication(), "k").number == 2


def test_a_delta_whose_base_was_found_damaged_is_not_published(
    registry: Registry, store: Store
) -> None:
    near = bytes(100) + NOISE[100:]
    push(registry, store, NOISE)
    push_delta(registry, store, near, NOISE)
    upload = registry.open_upload(BERT, Publication())
    manifest = write(upload, store, near)
    _mark_packs_damaged(registry, *_packs(registry, NOISE))
    with pytest.raises(BlockMissing):
        publish(store, upload, manifest, Publication(), "k")


def test_what_a_project_claimed_is_published_although_its_only_version_was_removed(
    registry: Registry, store: Store
) -> None:
    push(registry, store, NOISE)
    opened = registry.open_upload(BERT, Publication(), who="eve")
    upload = registry.resume_upload(opened.id, Publication(), reading=Reading(("team",), "eve"))
    manifest = write(upload, store, NOISE)
    registry.remove(Ref.parse("team/bert@v1"))
    again = publish(store, upload, manifest, Publication(), "k")
    assert again.number == 2
    assert read_back(registry, store, again) == [NOISE]


def test_a_push_that_does_not_fit_the_quota_is_refused_before_all_of_it_is_sent(
    registry: Registry, store: Store
) -> None:
    contents = [random.Random(seed).randbytes(128 * 1024) for seed in range(12)]
    small = WriteOptions(pack_bytes=160 * 1024, threads=1, lanes=1)
    registry.set_quota("team", stored_bytes=2 * 128 * 1024, versions=None)
    with pytest.raises(QuotaExceeded, match="then push again"):
        push(registry, store, *contents, options=small)
    sent = len(list(store.list(layout.PACKS)))
    assert 3 <= sent < 8
    assert push(registry, store, *contents[:2], options=small).number == 1, "what fits is taken"


def test_a_project_is_counted_once_for_an_upload_and_once_for_its_commit(
    registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(registry, store, NOISE)
    registry.set_quota("team", stored_bytes=100 * MIB, versions=None)
    counted: list[str] = []

    def count(tx: Connection, project: str) -> int:
        counted.append(project)
        return stored_bytes_of_project(tx, project)

    monkeypatch.setattr(versions, "stored_bytes_of_project", count)
    opened = registry.open_upload(BERT, Publication())
    for _ in range(5):  # as a service has it: one handle a request
        registry.resume_upload(opened.id, Publication()).begin_pack(PackId.new())
    manifest = write(opened, store, *(random.Random(n).randbytes(64 * 1024) for n in range(6)))
    publish(store, opened, manifest, Publication(), "k")
    assert counted == ["team"] * 2


def test_room_that_was_made_since_an_upload_began_is_used(registry: Registry, store: Store) -> None:
    push(registry, store, random.Random(99).randbytes(256 * 1024))
    registry.set_quota("team", stored_bytes=400 * 1024, versions=None)
    upload = registry.open_upload(BERT, Publication())
    registry.remove(Ref.parse("team/bert@v1"))
    manifest = write(upload, store, *(random.Random(n).randbytes(64 * 1024) for n in range(4)))
    upload.begin_pack(PackId.new())
    assert publish(store, upload, manifest, Publication(), "k").number == 2


def test_all_versions_models_and_moves_are_listed_however_many_fit_a_page(
    registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogued, "_PAGE", 2)
    for number in range(5):
        push(registry, store, b"%d" % number, alias="prod")
        push(registry, store, b"one", model=ModelName("team", f"m{number}"))
    yard = Yard(store, registry, block_bytes=MIB)
    assert [version.number for version in yard.versions("team/bert")] == [5, 4, 3, 2, 1]
    names = [model.name for model in yard.models()]
    assert names == sorted(["team/bert", *(f"team/m{number}" for number in range(5))])
    moves = yard.alias_log("team/bert", "prod")
    assert [(move.number, move.after) for move in moves] == [(n, n) for n in (5, 4, 3, 2, 1)]
    assert registry.move_alias(BERT, AliasName("prod"), 1).number == 6
