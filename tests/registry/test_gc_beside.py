"""gc beside writers and others who change things."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from collecting import DAY_S, gc, noise, pass_time, require_no_orphan
from crash_world import AT_ONCE
from pushing import BERT, push, read_back, write
from sqlalchemy import and_, func, select, text, update

from weightyard.errors import FileMissing, UploadExpired, YardError
from weightyard.format.block import block_id
from weightyard.names import ModelName, Ref
from weightyard.records import Publication, Retention, Version
from weightyard.registry import binding, schema
from weightyard.registry.collect import idle_packs
from weightyard.registry.database import Database
from weightyard.registry.locking import lock
from weightyard.registry.needs import Needs
from weightyard.registry.registry import Registry, RegistryUpload
from weightyard.registry.schema import FileState
from weightyard.registry.uploads import Reading
from weightyard.storage.local import LocalStore
from weightyard.storage.store import StagedFile, StorePath
from weightyard.transfer.publish import publish

LIMIT_S = 60.0
GATE = 1
"""A lock of PostgreSQL that means nothing but in one test."""


def test_what_a_token_claimed_it_may_commit_though_gc_let_go_of_the_version_it_is_from(
    database: Database, store: LocalStore
) -> None:
    """It may commit what versions of its projects have. So these are not let go of meanwhile."""
    binding.bind(database, store)
    registry = Registry(database)
    for seed in (1, 2):
        push(registry, store, noise(seed))
    reading = Reading(("team",), "eve")
    opened = registry.open_upload(BERT, Publication(), who="eve")
    upload = registry.resume_upload(opened.id, Publication(), reading=reading)
    manifest = write(upload, store, noise(1), noise(3))
    for number in (1, 2):
        registry.remove(Ref.parse(f"team/bert@v{number}"))
    for report in (registry.gc(store, AT_ONCE, dry_run=True), gc(registry, store)):
        assert (report.packs_condemned, report.manifests_condemned) == (1, 1)
    version = publish(store, upload, manifest, Publication(), "key")
    assert read_back(registry, store, version) == [noise(1), noise(3)]
    assert gc(registry, store).versions_purged == 1, "once nothing is claimed from it any more"
    assert read_back(registry, store, version) == [noise(1), noise(3)]


def test_uploads_that_begin_after_a_version_was_removed_do_not_keep_it(
    database: Database, store: LocalStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database)
    for seed in (1, 2):
        push(registry, store, noise(seed))
    registry.remove(Ref.parse("team/bert@v1"))
    time.sleep(0.002)  # the database's clock counts milliseconds
    opened = registry.open_upload(BERT, Publication(), who="eve")
    write(opened, store, noise(1), noise(3))
    assert gc(registry, store).versions_purged == 1
    opened.abandon()


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
    # The statement has its view of the pins, waits, and gets the lock after the claim's commit.
    slowly = and_(idle_packs(Needs()), func.pg_advisory_xact_lock(GATE).is_not(None))
    with ThreadPoolExecutor(1) as pool:
        with database.engine.begin() as gate:
            gate.execute(select(func.pg_advisory_xact_lock(GATE)))
            looking = pool.submit(database.write, lambda tx: lock(tx, schema.packs, slowly))
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            until = time.monotonic() + LIMIT_S
            while not gate.scalar(text(waiting)):
                assert time.monotonic() < until
                time.sleep(0.01)
            upload.claim([block_id(noise(1))])
        assert looking.result(LIMIT_S) == []
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
    begun: list[None] = []
    collected: list[int] = []
    removed: list[str] = []

    def is_going() -> bool:
        """A busy machine gets more time to do what counts."""
        now, has_done_enough = time.monotonic(), len(removed) > 5 and sum(collected) > 0
        return not wrong and now < (end if has_done_enough else end + 60)

    def read(version: Version) -> list[bytes]:
        """Without grace a pack may go between a reader's question and its read: it asks once more.

        Only gc that came twice meanwhile may be too quick for it; then it reads again.
        """
        while True:
            done_before = len(collected)
            try:
                return read_back(registry, store, version)
            except FileMissing:
                if len(begun) - done_before < 2:
                    raise

    def write_and_remove(worker: int) -> None:
        turn = 0
        while is_going():
            turn += 1
            contents = [noise(turn % 3), noise(100 + turn % 5), noise(worker * 1000 + turn % 2)]
            version = push(registry, store, *contents, model=ModelName("team", f"m{worker}"))
            assert read(version) == contents
            time.sleep(0.01 * (turn % 3))
            assert read(version) == contents
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
            begun.append(None)
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
