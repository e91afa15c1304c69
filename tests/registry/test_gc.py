from __future__ import annotations

from pathlib import Path

import pytest
from collecting import (
    DAY_S,
    begin,
    files,
    gc,
    gc_twice,
    noise,
    pass_time,
    require_no_orphan,
    rows,
    states,
)
from crash_world import AT_ONCE
from pushing import BERT, push, read_back, write
from sqlalchemy import event, select, update

from weightyard.errors import (
    BadSetting,
    Conflict,
    ForeignStore,
    NoSuchThing,
    UploadExpired,
)
from weightyard.names import AliasName, PackId, Ref, UploadId
from weightyard.records import Publication, Retention
from weightyard.registry import binding, migrate, schema
from weightyard.registry.alone import only_one
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.progress import Step
from weightyard.registry.registry import Registry
from weightyard.registry.schema import FileState
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.transfer.publish import publish


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


def test_content_that_is_pushed_again_brings_no_removed_version_back_to_the_books(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    """Else a commit would write a line for each list of each version there ever was of it."""
    for number in (1, 2, 3):
        push(registry, store, noise(1), noise(2))
        edges = rows(database)["version_lists"]
        assert edges == 2
        registry.remove(Ref.parse(f"team/bert@v{number}"))
        assert gc(registry, store).versions_purged == 1


def test_a_lease_that_ended_holds_nothing(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, noise(1))
    registry.take_lease(Ref.parse("team/bert"), "gone", 60)
    registry.remove(Ref.parse("team/bert@v1"))
    pass_time(database, 61)
    assert gc(registry, store).packs_deleted == 1


def test_a_reader_whose_lease_ended_does_not_renew_or_end_that_of_another(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    """It was asleep, and has the id of its lease still: no other lease gets that."""
    push(registry, store, noise(1))
    version = push(registry, store, noise(2))
    asleep = registry.take_lease(Ref.parse("team/bert@v1"), "asleep", 60)
    pass_time(database, 61)
    gc(registry, store)
    registry.take_lease(Ref.parse("team/bert@v2"), "reading", 3600)
    with pytest.raises(NoSuchThing, match="ended"):
        registry.renew_lease(asleep.id, 60)
    registry.release_lease(asleep.id)
    registry.remove(Ref.parse("team/bert@v2"))
    gc(registry, store)
    assert read_back(registry, store, version) == [noise(2)]


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


def test_a_zombie_is_caught_for_a_day_though_gc_waits_for_nothing(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    upload = registry.open_upload(BERT, Publication())
    pack = PackId.new()
    upload.begin_pack(pack)
    pass_time(database, DAY_S / 24)
    assert registry.gc(store, AT_ONCE).unfinished_removed == 1
    with store.stage(layout.staging(upload.id, pack.hex)) as stage:
        stage.write(b"late")
        store.publish(stage.close(), layout.pack(pack))
    store.stage(layout.staging(upload.id, pack.hex, attempt=1)).close()
    pass_time(database, DAY_S / 2)
    registry.gc(store, AT_ONCE)
    assert files(store) == set()


@pytest.mark.parametrize("there", [b"{half", None], ids=["unreadable", "of another database"])
def test_nothing_is_taken_away_while_the_store_was_not_told_of_all(
    registry: Registry, store: LocalStore, database: Database, there: bytes | None
) -> None:
    push(registry, store, noise(1), alias="prod")
    registry.flush_outbox(store)
    registry.remove(Ref.parse(push(registry, store, noise(2)).ref))
    waiting = database.read(lambda tx: tx.scalars(select(schema.outbox.c.path)).all())
    removal = max(path for path in waiting if path.startswith("journal/"))
    if there is None:
        there = next(iter((store.folder / "journal").iterdir())).read_bytes()
    (store.folder / removal).write_bytes(there)
    before = {file for file in files(store) if file.startswith("packs/")}
    for _ in range(2):
        with pytest.raises(Conflict, match=removal):
            gc_twice(registry, store, database)
    assert before <= files(store)
    (store.folder / removal).unlink()
    registry.heal(store, registry.check(store))
    gc_twice(registry, store, database)
    assert not before <= files(store)


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
