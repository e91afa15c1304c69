from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from collecting import (
    DAY_S,
    files,
    gc,
    gc_twice,
    noise,
    pass_time,
    require_no_orphan,
    rows,
    states,
)
from pushing import BERT, push, read_back
from sqlalchemy import Connection, and_, event, func, update

from weightyard.errors import (
    BadSetting,
    Conflict,
    ForeignStore,
    NoSuchThing,
    StoreUnavailable,
    UploadExpired,
    YardError,
)
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType
from weightyard.format.manifest import Manifest
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import AliasName, ModelName, PackId, Ref, UploadId
from weightyard.records import Publication, Retention, Version
from weightyard.registry import binding, migrate, schema
from weightyard.registry.alone import only_one
from weightyard.registry.collect import GcOptions, idle_packs
from weightyard.registry.database import Database
from weightyard.registry.locking import lock
from weightyard.registry.needs import Needs
from weightyard.registry.progress import Step
from weightyard.registry.registry import Registry, RegistryUpload
from weightyard.registry.schema import FileState
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import StagedFile, StorePath
from weightyard.testing.faults import Fault, FaultyStore
from weightyard.transfer.publish import publish
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, Writer


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def registry(database: Database, store: LocalStore) -> Registry:
    registry = Registry(database, who="alice")
    binding.bind(database, store)
    return registry


def begin(registry: Registry, store: LocalStore, data: bytes) -> RegistryUpload:
    """An upload whose blocks are written, and whose version is not."""
    upload = registry.open_upload(BERT, Publication())
    write(upload, store, data)
    return upload


def write(upload: RegistryUpload, store: LocalStore, data: bytes) -> Manifest:
    split = split_state([StateTensor("t0", DType.U8, (len(data),))], MIB)
    ids = Writer(store, upload).write([Content(split, [MemorySource(data)])])
    return manifest_of([split], ids)


def test_what_a_version_needs_stays_and_the_rest_goes_after_the_grace(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    kept = push(registry, store, noise(1))
    push(registry, store, noise(2))
    before = files(store)
    registry.remove(Ref.parse("team/bert@v2"))

    report = registry.gc(store)
    assert (report.packs_condemned, report.manifests_condemned, report.packs_deleted) == (1, 1, 0)
    assert files(store) == before, "condemned is not deleted"
    pass_time(database, 6.9 * DAY_S)
    assert registry.gc(store).packs_deleted == 0
    pass_time(database, 0.2 * DAY_S)
    report = registry.gc(store)
    assert (report.packs_deleted, report.manifests_deleted) == (1, 1)
    assert report.deleted_bytes > 66 * 1024
    assert {item.kind for item in report.items} == {"pack", "manifest"}
    assert len(before - files(store)) == 2
    assert read_back(registry, store, kept) == [noise(1)]
    require_no_orphan(database, store)
    assert push(registry, store, noise(2)).number == 3, "its content can come back"
    assert read_back(registry, store, registry.resolve(Ref.parse("team/bert"))) == [noise(2)]


def test_a_claim_revives_what_is_condemned(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, noise(1))
    registry.remove(Ref.parse("team/bert@v1"))
    registry.gc(store)
    assert states(database) == [FileState.CONDEMNED]
    again = push(registry, store, noise(1))
    assert states(database) == [FileState.LIVE], "not written again"
    pass_time(database, 30 * DAY_S)
    registry.gc(store)
    assert read_back(registry, store, again) == [noise(1)]


def test_what_an_upload_wrote_or_claimed_is_left_alone(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, noise(1))
    upload = registry.open_upload(BERT, Publication())
    write(upload, store, noise(1))
    manifest = write(upload, store, noise(2))
    registry.remove(Ref.parse("team/bert@v1"))
    for _ in range(2):
        report = gc(registry, store)
        assert report.packs_condemned == 0
    version = publish(store, upload, manifest, Publication(), "key")
    assert read_back(registry, store, version) == [noise(2)]
    assert gc(registry, store).packs_deleted == 1


def test_a_reader_with_a_lease_keeps_a_removed_version(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    version = push(registry, store, noise(1))
    lease = registry.take_lease(Ref.parse("team/bert"), "serving-7", 3600)
    assert (lease.ref, lease.holder) == ("team/bert@v1", "serving-7")
    registry.remove(Ref.parse("team/bert@v1"))
    gc(registry, store)
    assert read_back(registry, store, version) == [noise(1)]
    registry.renew_lease(lease.id, 7200)
    pass_time(database, 5400)
    gc(registry, store)
    assert read_back(registry, store, version) == [noise(1)]
    registry.release_lease(lease.id)
    assert gc(registry, store).packs_deleted == 1
    with pytest.raises(NoSuchThing, match="ended"):
        registry.renew_lease(lease.id, 60)
    with pytest.raises(NoSuchThing):
        registry.take_lease(Ref.parse("team/bert@v1"), "late", 60)


def test_a_lease_that_ended_holds_nothing(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, noise(1))
    registry.take_lease(Ref.parse("team/bert"), "gone", 60)
    registry.remove(Ref.parse("team/bert@v1"))
    pass_time(database, 61)
    assert gc(registry, store).packs_deleted == 1


def test_a_killed_writer_leaves_nothing_once_its_grace_is_over(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    upload = begin(registry, store, noise(1))
    begun = PackId.new()
    upload.begin_pack(begun)
    stage = store.stage(layout.staging(upload.id, begun.hex))
    stage.write(b"half a pack")
    stage.close()
    renamed = PackId.new()
    upload.begin_pack(renamed)
    with store.stage(layout.staging(upload.id, renamed.hex)) as stage:
        stage.write(b"a whole pack whose row never became live")
        store.publish(stage.close(), layout.pack(renamed))
    before = files(store)
    pass_time(database, 3600)
    assert registry.gc(store).uploads_expired == 1
    assert files(store) == before, "its grace is not over"
    with pytest.raises(UploadExpired):
        upload.heartbeat()
    gc_twice(registry, store, database)
    require_no_orphan(database, store)
    assert files(store) == set()
    assert rows(database)["packs"] == rows(database)["blocks"] == 0


def test_a_zombie_that_renames_after_its_upload_was_swept_is_caught(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    upload = registry.open_upload(BERT, Publication())
    pack = PackId.new()
    upload.begin_pack(pack)
    pass_time(database, 7.1 * DAY_S)
    assert registry.gc(store).unfinished_removed == 1
    with store.stage(layout.staging(upload.id, pack.hex)) as stage:
        stage.write(b"late")
        store.publish(stage.close(), layout.pack(pack))
    left = store.stage(layout.staging(upload.id, pack.hex, attempt=1))
    left.close()
    pass_time(database, DAY_S)
    registry.gc(store)
    assert files(store) == set()


def test_files_without_a_row_are_never_touched(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    for path in (layout.pack(PackId.new()), layout.staging(UploadId.new(), "who")):
        with store.stage(layout.staging(UploadId.new(), "strange")) as stage:
            stage.write(b"?")
            store.publish(stage.close(), path)
    before = files(store)
    gc_twice(registry, store, database)
    assert files(store) == before


def test_a_dry_run_tells_and_changes_nothing(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    for seed in range(4):
        push(registry, store, noise(seed))
    registry.set_retention(BERT, Retention(keep_last=2))
    registry.remove(Ref.parse("team/bert@v3"))
    begin(registry, store, noise(9))
    registry.flush_outbox(store)
    before = (files(store), rows(database), states(database))
    options = GcOptions(grace_s=0, embedded=True, rewrites=False)
    told = registry.gc(store, options, dry_run=True)
    assert (files(store), rows(database), states(database)) == before
    done = registry.gc(store, options)
    names = ("versions_removed", "packs_condemned", "packs_deleted", "deleted_bytes")
    names += ("condemned_bytes", "manifests_deleted", "uploads_expired", "unfinished_removed")
    assert [getattr(told, name) for name in names] == [getattr(done, name) for name in names]
    assert told.dry_run
    assert (told.versions_removed, told.packs_deleted) == (1, 2)
    assert [item.why for item in told.items if item.kind == "version"] == [
        "retention: not among the 2 newest"
    ]


def test_a_short_grace_must_be_asked_for(registry: Registry, store: LocalStore) -> None:
    with pytest.raises(BadSetting, match="unsafe-grace"):
        registry.gc(store, GcOptions(grace_s=3600))
    with pytest.raises(BadSetting):
        registry.gc(store, GcOptions(grace_s=3600), dry_run=True)
    registry.gc(store, GcOptions(grace_s=3600, unsafe_grace=True))
    registry.gc(store, GcOptions(grace_s=0, embedded=True))


def test_a_second_gc_says_that_one_is_running(registry: Registry, store: LocalStore) -> None:
    with only_one(registry.database, "gc"), pytest.raises(Conflict, match="running already"):
        registry.gc(store)
    registry.gc(store)


def test_an_empty_database_collects_nothing(
    registry: Registry, store: LocalStore, tmp_path: Path
) -> None:
    push(registry, store, noise(1))
    before = files(store)
    empty = Database(f"sqlite:///{tmp_path}/empty.db")
    migrate.upgrade(empty)
    with pytest.raises(ForeignStore, match="belongs to registry"):
        gc(Registry(empty), store)
    empty.close()
    assert files(store) == before


@pytest.mark.parametrize("newer", ["version", "alias", "gc"])
def test_a_database_of_yesterday_collects_nothing(tmp_path: Path, newer: str) -> None:
    store = LocalStore(tmp_path / "store")
    today, yesterday = tmp_path / "today.db", tmp_path / "yesterday.db"
    database = Database(f"sqlite:///{today}")
    migrate.upgrade(database)
    binding.bind(database, store)
    registry = Registry(database)
    push(registry, store, noise(1))
    push(registry, store, noise(3))
    registry.remove(Ref.parse("team/bert@v2"))
    upload = begin(registry, store, noise(2))
    registry.flush_outbox(store)
    with database.engine.connect() as connection:
        connection.connection.driver_connection.execute(f"VACUUM INTO '{yesterday}'")  # type: ignore[union-attr]
    if newer == "version":
        publish(store, upload, write(upload, store, noise(2)), Publication(), "key")
        registry.flush_outbox(store)
    elif newer == "alias":
        registry.move_alias(BERT, AliasName("prod"), 1)
        registry.flush_outbox(store)
    else:
        assert gc(registry, store).packs_deleted == 1
    database.close()
    before = files(store)
    old = Database(f"sqlite:///{yesterday}")
    pass_time(old, 30 * DAY_S)
    with pytest.raises(ForeignStore, match="older than its store"):
        gc(Registry(old), store)
    old.close()
    assert files(store) == before


def test_a_condemned_pack_whose_block_was_published_from_elsewhere_is_kept_or_replaced(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, noise(1))
    registry.remove(Ref.parse("team/bert@v1"))
    # Condemned between a writer's look and its claim: it writes the block once more.
    upload = registry.open_upload(BERT, Publication())
    upload.claim = lambda blocks: {}  # type: ignore[method-assign]
    manifest = write(upload, store, noise(1))
    registry.gc(store)
    assert states(database) == [FileState.CONDEMNED, FileState.LIVE]
    version = publish(store, upload, manifest, Publication(), "key")
    gc_twice(registry, store, database)
    assert read_back(registry, store, version) == [noise(1)]
    assert len([*store.list(layout.PACKS)]) == 1, "one copy is enough"


def test_a_damaged_pack_goes_once_its_blocks_lie_elsewhere(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, noise(1))
    damaged = update(schema.packs).values(state=FileState.DAMAGED)
    database.write(lambda tx: tx.execute(damaged))
    gc_twice(registry, store, database)
    assert states(database) == [FileState.DAMAGED], "perhaps it can be healed"
    push(registry, store, noise(1))
    gc_twice(registry, store, database)
    assert states(database) == [FileState.LIVE]
    assert read_back(registry, store, registry.resolve(Ref.parse("team/bert"))) == [noise(1)]


def removed_and_abandoned(registry: Registry, store: LocalStore, database: Database) -> Version:
    """A yard with work of every kind for gc; returns the version that must survive."""
    push(registry, store, noise(1), noise(2), noise(3))
    kept = push(registry, store, noise(1), alias="prod")
    push(registry, store, noise(4))
    for number in (1, 3):
        registry.remove(Ref.parse(f"team/bert@v{number}"))
    upload = begin(registry, store, noise(5))
    pack = PackId.new()
    upload.begin_pack(pack)
    with store.stage(layout.staging(upload.id, pack.hex)) as stage:
        stage.write(b"late")
        store.publish(stage.close(), layout.pack(pack))
    store.stage(layout.staging(upload.id, "left")).close()
    pass_time(database, 3600)
    return kept


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the database and the store of such a yard."""
    folder = tmp_path_factory.mktemp("prepared")
    database = Database(f"sqlite:///{folder}/registry.db")
    migrate.upgrade(database)
    store = LocalStore(folder / "store")
    binding.bind(database, store)
    removed_and_abandoned(Registry(database), store, database)
    database.close()
    return folder


def test_gc_that_fails_at_some_call_is_finished_by_the_next(prepared: Path, tmp_path: Path) -> None:
    for index in range(2, _calls(prepared, tmp_path), 5):
        _fail_gc_at(prepared, tmp_path, index, Fault.AFTER if index % 2 else Fault.BEFORE)


@pytest.mark.long
@pytest.mark.parametrize("fault", list(Fault))
def test_gc_that_fails_at_any_call_is_finished_by_the_next(
    prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    for index in range(_calls(prepared, tmp_path)):
        _fail_gc_at(prepared, tmp_path, index, fault)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("call", [17, 40])
def test_gc_that_fails_on_postgresql_is_finished_by_the_next(
    postgres: Callable[[], str], tmp_path: Path, fault: Fault, call: int
) -> None:
    database = Database(postgres())
    store = LocalStore(tmp_path / "store")
    binding.bind(database, store)
    removed_and_abandoned(Registry(database), store, database)
    _fail_and_go_on(database, store, call, fault)
    database.close()


def _calls(prepared: Path, folder: Path) -> int:
    """How many calls a run makes that does not fail."""
    yard = folder / "clean"
    shutil.copytree(prepared, yard)
    database = Database(f"sqlite:///{yard}/registry.db")
    store = FaultyStore(LocalStore(yard / "store"))
    gc(Registry(database), store)
    database.close()
    assert len(store.calls) > 40
    assert {"publish", "locate", "read", "delete", "list"} <= set(store.calls)
    return len(store.calls)


def _fail_gc_at(prepared: Path, folder: Path, index: int, fault: Fault) -> None:
    yard = folder / str(index)
    shutil.copytree(prepared, yard)
    database = Database(f"sqlite:///{yard}/registry.db")
    _fail_and_go_on(database, LocalStore(yard / "store"), index, fault)
    database.close()
    shutil.rmtree(yard)


def _fail_and_go_on(database: Database, store: LocalStore, index: int, fault: Fault) -> None:
    """Whatever the failed call was, afterwards all is as it should be."""
    registry = Registry(database)
    kept = registry.resolve(Ref.parse("team/bert@prod"))
    with suppress(StoreUnavailable):
        gc(registry, FaultyStore(store, {index: fault}))
    assert read_back(registry, store, kept) == [noise(1)]
    pass_time(database, 3600)
    gc(registry, store)
    assert read_back(registry, store, kept) == [noise(1)]
    require_no_orphan(database, store)


def test_a_pin_that_comes_while_gc_waits_for_the_lock_is_seen(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    database, store = Database(postgres()), LocalStore(tmp_path / "store")
    binding.bind(database, store)
    registry = Registry(database)
    push(registry, store, noise(1))
    registry.remove(Ref.parse("team/bert@v1"))
    gc(registry, store, grace_s=DAY_S)
    registry.open_upload(BERT, Publication()).claim([block_id(noise(1))])  # revives, expires
    pass_time(database, 3600)
    gc(registry, store, grace_s=DAY_S)
    database.write(lambda tx: tx.execute(update(schema.packs).values(state=FileState.LIVE)))
    upload = registry.open_upload(BERT, Publication())
    begun = threading.Event()

    def claim() -> None:
        begun.wait(10)
        time.sleep(0.3)
        upload.claim([block_id(noise(1))])

    # The statement has its view of the pins, sleeps, and gets the lock after the claim's commit.
    slowly = and_(idle_packs(Needs()), func.pg_sleep(0.8).is_not(None))

    def look(tx: Connection) -> list[int]:
        begun.set()
        return lock(tx, schema.packs, slowly)

    claiming = threading.Thread(target=claim)
    claiming.start()
    assert database.write(look) == []
    claiming.join(10)
    database.close()


def test_pushes_beside_gc_lose_nothing(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    run_beside_gc(registry, store, database, seconds=3.0)


@pytest.mark.long
def test_pushes_beside_gc_lose_nothing_for_long(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    run_beside_gc(registry, store, database, seconds=60.0)


def test_gc_ends_although_others_never_stop_changing_things(
    registry: Registry, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = push(registry, store, noise(1))
    registry.remove(Ref.parse(version.ref))
    changes = 0
    publish_file = LocalStore.publish

    def publish_and_change(self: LocalStore, staged: StagedFile, path: StorePath) -> None:
        nonlocal changes
        publish_file(self, staged, path)
        if changes < 50:
            changes += 1
            registry.set_retention(BERT, Retention(keep_last=changes))

    monkeypatch.setattr(LocalStore, "publish", publish_and_change)
    gc(registry, store)
    assert 0 < changes < 20


class _Remembering(Registry):
    """Knows the upload it opened last."""

    last: RegistryUpload

    def open_upload(self, *arguments: Any, **options: Any) -> RegistryUpload:
        self.last = super().open_upload(*arguments, **options)
        return self.last


def run_beside_gc(
    registry: Registry, store: LocalStore, database: Database, seconds: float
) -> None:
    """Writers that share blocks, beside gc without grace; two of them remove what they pushed."""
    end = time.monotonic() + seconds
    wrong: list[BaseException] = []
    acknowledged: dict[str, list[bytes]] = {}
    collected: list[int] = []
    removed: list[str] = []

    def is_going() -> bool:
        """A busy machine gets more time to do what counts."""
        now, has_done_enough = time.monotonic(), len(removed) > 5 and sum(collected) > 0
        return not wrong and now < (end if has_done_enough else end + 60)

    def write_and_remove(worker: int) -> None:
        turn = 0
        while is_going():
            turn += 1
            contents = [noise(turn % 3), noise(100 + turn % 5), noise(worker * 1000 + turn % 2)]
            version = push(registry, store, *contents, model=ModelName("team", f"m{worker}"))
            assert read_back(registry, store, version) == contents
            time.sleep(0.01 * (turn % 3))
            assert read_back(registry, store, version) == contents
            registry.remove(Ref.parse(version.ref))
            removed.append(version.ref)

    def write_with_a_short_lease() -> None:
        """Its lease may end at any point: then, and only then, it may fail."""
        hasty = _Remembering(database, lease_s=0.1)
        turn = 0
        while is_going():
            turn += 1
            contents = [noise(turn % 3), noise(50 + turn % 4)]
            try:
                version = push(hasty, store, *contents)
            except YardError:
                with pytest.raises(UploadExpired):
                    hasty.last.heartbeat()
            else:
                acknowledged[version.ref] = contents

    def collect() -> None:
        while is_going():
            collected.append(gc(registry, store).packs_deleted)

    def told(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as why:  # noqa: BLE001 - told to the test
            wrong.append(why)

    works = [partial(write_and_remove, 0), partial(write_and_remove, 1)]
    works += [write_with_a_short_lease, collect]
    threads = [threading.Thread(target=told, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if wrong:
        raise wrong[0]
    assert len(removed) > 5
    assert sum(collected) > 0
    pass_time(database, 3600)
    gc(registry, store)
    for ref, contents in acknowledged.items():
        assert read_back(registry, store, registry.resolve(Ref.parse(ref))) == contents
    gc(registry, store)
    require_no_orphan(database, store)


@pytest.mark.parametrize("dry_run", [False, True])
def test_gc_says_what_it_does_and_how_far_it_is(
    registry: Registry, store: LocalStore, dry_run: bool
) -> None:
    push(registry, store, noise(1))
    seen: list[Step] = []
    registry.gc(store, dry_run=dry_run, progress=seen.append)
    doing = list(dict.fromkeys(step.doing for step in seen))
    assert "looking for packs to rewrite" in doing
    assert len(doing) > 3
    assert all(step.total is None or 0 <= step.done <= step.total for step in seen)


def test_a_plan_looks_at_each_block_once_however_many_versions_share_it(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    for number in range(12):
        push(registry, store, noise(1), noise(100 + number))
    registry.set_retention(BERT, Retention(keep_last=2))
    asked: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *call: asked.append(call[2]))
    told = registry.gc(store, GcOptions(grace_s=0, embedded=True), dry_run=True)
    few = len(asked)
    assert (told.versions_removed, told.packs_deleted) == (10, 9), "the first pack has a shared one"
    for number in range(12):
        push(registry, store, noise(1), noise(200 + number))
    asked.clear()
    registry.gc(store, GcOptions(grace_s=0, embedded=True), dry_run=True)
    assert len(asked) == few, "questions do not grow with what they are about"
