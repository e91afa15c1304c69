"""gc: takes away what nobody needs, in two steps (docs/design/0005-collecting.md).

Each step is a series of short transactions, each over a range of ids (`locking`). It is safe beside
writers and readers, and after a crash at any point: the next run goes on from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    delete,
    exists,
    func,
    select,
)

from weightyard.errors import BadSetting
from weightyard.format.pack import PACK_LIMIT_BYTES
from weightyard.names import Digest, PackId
from weightyard.records import GcItem, GcReport
from weightyard.registry import (
    freshness,
    leases,
    outbox,
    replication,
    retention,
    rewrite,
    schema,
    sweep,
    uploads,
)
from weightyard.registry.alone import only_one
from weightyard.registry.database import Database, is_one_of, now_ms
from weightyard.registry.locking import change, found, is_older, lock, move
from weightyard.registry.needs import Needs, is_claimed_from
from weightyard.registry.progress import Progress, Step, silent
from weightyard.registry.rows import record_event
from weightyard.registry.schema import FileState, UploadState
from weightyard.storage import layout
from weightyard.storage.store import Store

GRACE_S = 7 * 24 * 3600.0
SAFE_GRACE_S = 24 * 3600.0

SHOWN_ITEMS = 1000
"""How many things a report names; the rest is counted."""

_DOOMED = (FileState.CONDEMNED, FileState.DAMAGED)
"""What may lose its placements. A damaged pack is never condemned: a claim would revive it."""

_packs, _manifests, _lists, _blocks = schema.packs, schema.manifests, schema.lists, schema.blocks
_v, _edges = schema.versions, schema.version_lists


@dataclass(frozen=True, slots=True)
class GcOptions:
    """How to collect."""

    grace_s: float = GRACE_S
    """How long what nobody needs is kept, by the database's clock, before its file goes."""
    unsafe_grace: bool = False
    """Allow less than a day although others may be reading."""
    embedded: bool = False
    """The yard is this process's own: nobody else reads, any grace will do."""
    rewrites: bool = True
    pack_bytes: int = PACK_LIMIT_BYTES
    min_replicas: int = 2
    """A pack made by rewriting is not durable before it lies on this many DataNodes."""

    @property
    def grace_ms(self) -> int:
        return int(self.grace_s * 1000)

    def require_safe(self) -> None:
        """Raises BadSetting for a grace that is too short."""
        if self.grace_s < 0:
            raise BadSetting(f"a grace of {self.grace_s} s")
        if self.grace_s < SAFE_GRACE_S and not (self.unsafe_grace or self.embedded):
            raise BadSetting(
                f"a grace of {self.grace_s:.0f} s is under a day: a file may go while it is still "
                "being read. `--unsafe-grace` allows it"
            )


@dataclass(slots=True)
class Tally:
    """What a run has done so far."""

    counts: dict[str, int] = field(default_factory=dict)
    items: list[GcItem] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def count(self, **more: int) -> None:
        for name, amount in more.items():
            self.counts[name] = self.counts.get(name, 0) + amount

    def note(self, kind: str, name: str, size: int, why: str) -> None:
        self.count(items_in_all=1)
        if len(self.items) < SHOWN_ITEMS:
            self.items.append(GcItem(kind=kind, name=name, bytes=size, why=why))

    def report(self, options: GcOptions, *, dry_run: bool) -> GcReport:
        return GcReport(
            dry_run=dry_run,
            grace_s=options.grace_s,
            items=tuple(self.items),
            failed=tuple(self.failed[:SHOWN_ITEMS]),
            **self.counts,
        )


def collect(
    database: Database, store: Store, options: GcOptions, who: str, progress: Progress = silent
) -> GcReport:
    """Take away what nobody needs. Raises BadSetting, ForeignStore, Conflict if gc runs already,
    and what the store raises: then what was done stays done, and the next run does the rest.
    """
    options.require_safe()
    with only_one(database, "gc"):
        freshness.require_newest_of_all(database, store)
        return _Run(database, store, options, who, progress).run()


class _Run:
    """One run. Each step may make work for those after it: hence their order."""

    def __init__(
        self, database: Database, store: Store, options: GcOptions, who: str, progress: Progress
    ) -> None:
        self._database = database
        self._store = store
        self._options = options
        self._who = who
        self._tell = progress
        self._needs = database.read(Needs.of_yard)
        self._tally = Tally()
        self._is_announced = False

    def run(self) -> GcReport:
        self._expire_uploads()
        self._apply_retention()
        self._purge_versions()
        self._drop_lists()
        self._condemn_packs()
        self._condemn_manifests()
        self._tell_the_store()
        if self._options.rewrites:
            self._rewrite_packs()
        self._doom_packs()
        self._delete_packs()
        self._delete_manifests()
        self._tell(Step("sweeping up after uploads"))
        sweep.sweep(self._database, self._store, self._options.grace_ms, self._tally)
        self._drop_blocks()
        self._tell(Step("adjusting replication"))
        replication.settle(self._database, self._store)
        return self._tally.report(self._options, dry_run=False)

    def _expire_uploads(self) -> None:
        u = schema.uploads
        over = and_(u.c.state == UploadState.OPEN, u.c.lease_ms <= now_ms())

        def expire(tx: Connection, which: ColumnElement[bool]) -> int:
            ended = lock(tx, u, which)
            for upload_row in ended:
                uploads.close(tx, upload_row, UploadState.EXPIRED)
            return len(ended)

        is_open = u.c.state == UploadState.OPEN
        for some in self._found("expiring uploads", u, over, among=is_open):
            self._tally.count(uploads_expired=self._database.write(partial(expire, which=some)))
        self._database.write(leases.drop_expired)

    def _apply_retention(self) -> None:
        for done, due in enumerate(retention.apply(self._database, self._who)):
            self._tell(Step("removing versions by retention", done))
            self._tally.count(versions_removed=1)
            self._tally.note("version", due.ref, due.logical_bytes, due.why)
        self._tally.failed += self._database.read(retention.not_understood)

    def _purge_versions(self) -> None:
        """Let go of what removed versions referred to, unless a reader or an upload holds it."""
        has_edges = exists().where(_edges.c.version_id == _v.c.id)
        held = exists().where(schema.read_leases.c.version_id == _v.c.id)
        over = and_(_v.c.removed_ms.is_not(None), has_edges, ~held, ~is_claimed_from())

        def purge(tx: Connection, which: ColumnElement[bool]) -> int:
            gone = lock(tx, _v, which)
            for version_row in gone:
                replication.review_files_of(tx, version_row)
            tx.execute(delete(_edges).where(is_one_of(tx, _edges.c.version_id, gone)))
            return len(gone)

        for some in self._found("letting go of removed versions", _v, over, size=20):
            self._tally.count(versions_purged=self._database.write(partial(purge, which=some)))

    def _drop_lists(self) -> None:
        idle = ~exists().where(_edges.c.list_id == _lists.c.id)

        def drop(tx: Connection, which: ColumnElement[bool]) -> int:
            gone = lock(tx, _lists, which)
            list_blocks = schema.list_blocks
            tx.execute(delete(list_blocks).where(is_one_of(tx, list_blocks.c.list_id, gone)))
            tx.execute(delete(_lists).where(is_one_of(tx, _lists.c.id, gone)))
            return len(gone)

        for some in self._found("letting go of lists", _lists, idle):
            self._tally.count(lists_removed=self._database.write(partial(drop, which=some)))

    def _condemn_packs(self) -> None:
        is_live = _packs.c.state == FileState.LIVE
        idle = idle_packs(self._needs)
        for some in self._found("condemning packs", _packs, idle, among=is_live):
            for row in self._move(_packs, some, FileState.CONDEMNED):
                self._tally.count(packs_condemned=1, condemned_bytes=row.bytes)
                self._tally.note("pack", row.name, row.bytes, "condemned: no version needs it")

    def _condemn_manifests(self) -> None:
        idle = idle_manifests(self._needs)
        for some in self._found("condemning manifests", _manifests, idle):
            for row in self._move(_manifests, some, FileState.CONDEMNED):
                self._tally.count(manifests_condemned=1)
                self._tally.note("manifest", row.name, row.bytes, "condemned: no version has it")

    def _tell_the_store(self) -> None:
        """Write removals into the journal before anything they set free is touched.

        Otherwise a registry rebuilt from the store would bring back versions without their bytes.
        Raises Conflict if an entry cannot be written.
        """
        last = outbox.newest(self._database)  # later entries are written by those who make them
        while outbox.flush(self._database, self._store, up_to=last):
            pass
        outbox.require_all_told(self._database)

    def _rewrite_packs(self) -> None:
        options = self._options
        passed = self._passing("looking for packs to rewrite", _packs)
        groups = self._database.read(
            lambda tx: rewrite.plan(tx, self._needs, options.pack_bytes, passed)
        )
        if not groups:
            return
        self._announce()
        rewriting = rewrite.Rewriting(
            self._database,
            self._store,
            self._needs,
            options.pack_bytes,
            min(options.min_replicas, self._store.stat(layout.YARD).replication),
        )
        self._tell(Step("rewriting packs", 0, len(groups)))
        for number, done in enumerate(rewriting.run(groups), 1):
            self._tell(Step("rewriting packs", number, len(groups)))
            self._tally.count(packs_rewritten=len(done.packs), rewritten_bytes=done.new_bytes)
            self._tally.count(packs_made=1 if done.new_bytes else 0)
            for pack in done.packs:
                self._tally.note("pack", pack.name, pack.bytes, done.why)
        self._tally.failed += rewriting.failed

    def _doom_packs(self) -> None:
        """Second step: what has been idle for the grace time loses its placements."""
        is_condemned = _packs.c.state == FileState.CONDEMNED
        needed = and_(is_condemned, self._needs.of_pack())
        for some in self._found("reviving packs", _packs, needed, among=is_condemned):
            self._tally.count(packs_revived=len(self._move(_packs, some, FileState.LIVE)))
        due = due_packs(self._needs, self._options.grace_ms)
        candidates = _packs.c.state.in_(_DOOMED)
        for some in self._found("dooming packs", _packs, due, among=candidates):
            self._database.write(partial(_doom, which=some))

    def _delete_packs(self) -> None:
        """Files of packs without placements, once nobody can hold an old placement any more."""
        gone = and_(_packs.c.state == FileState.DELETING, is_older(_packs, self._options.grace_ms))
        deleting = _packs.c.state == FileState.DELETING
        for some in self._found("deleting packs", _packs, gone, among=deleting):
            for row in self._rows(select(_packs).where(some).order_by(_packs.c.id)):
                self._announce()
                self._store.delete(layout.pack(PackId(row.name)))
                only = and_(_packs.c.id == row.id, _packs.c.state == FileState.DELETING)
                if self._move(_packs, only, FileState.GONE):
                    self._tally.count(packs_deleted=1, deleted_bytes=row.bytes)
                    self._tally.note("pack", row.name, row.bytes, "deleted: its grace is over")

    def _delete_manifests(self) -> None:
        """A manifest's name is its digest, so a writer may want the same one at this very moment.

        So its file goes while the row is locked; such a writer waits, then writes it anew.
        """
        due = due_manifests(self._needs, self._options.grace_ms)

        def remove(tx: Connection, which: ColumnElement[bool]) -> list[Row[Any]]:
            rows = move(tx, _manifests, which, FileState.GONE)
            for row in rows:
                self._store.delete(layout.manifest(Digest(row.name)))
            return rows

        candidates = _manifests.c.state.in_(_DOOMED)
        for one in self._found("deleting manifests", _manifests, due, among=candidates, size=1):
            self._announce()
            for row in self._database.write(partial(remove, which=one)):
                self._tally.count(manifests_deleted=1, deleted_bytes=row.bytes)
                self._tally.note("manifest", row.name, row.bytes, "deleted: its grace is over")

    def _drop_blocks(self) -> None:
        p, list_blocks = schema.placements, schema.list_blocks
        unused = and_(
            ~exists().where(p.c.block_id == _blocks.c.id),
            ~exists().where(p.c.base_id == _blocks.c.id),
            ~exists().where(list_blocks.c.block_id == _blocks.c.id),
        )

        def drop(tx: Connection, which: ColumnElement[bool]) -> int:
            gone = lock(tx, _blocks, which)
            tx.execute(delete(_blocks).where(is_one_of(tx, _blocks.c.id, gone)))
            return len(gone)

        for some in self._found("forgetting blocks", _blocks, unused):
            self._tally.count(blocks_removed=self._database.write(partial(drop, which=some)))

    def _found(
        self, doing: str, table: Table, where: ColumnElement[bool], **how: Any
    ) -> Iterator[ColumnElement[bool]]:
        """As `locking.found`, and tells the progress."""
        return found(self._database, table, where, passed=self._passing(doing, table), **how)

    def _passing(self, doing: str, table: Table) -> Callable[[int], None]:
        last = self._database.read(lambda tx: tx.scalar(select(func.max(table.c.id)))) or 0
        self._tell(Step(doing, 0, last))
        return lambda id: self._tell(Step(doing, id, last))

    def _move(self, table: Table, where: ColumnElement[bool], to: FileState) -> list[Row[Any]]:
        return self._database.write(lambda tx: move(tx, table, where, to))

    def _rows(self, statement: Select[Any]) -> Sequence[Row[Any]]:
        return self._database.read(lambda tx: tx.execute(statement).all())

    def _announce(self) -> None:
        """Say in the journal that files go from here on.

        A database restored from a backup would look for blocks where they no longer are. It does
        not know this entry, so it is refused (`freshness`).
        """
        if self._is_announced:
            return
        counts = dict(self._tally.counts)

        def say(tx: Connection) -> None:
            record_event(tx, self._who, "gc.collecting", "gc", counts)
            outbox.put_journal(tx, "collecting", "gc", self._who, counts)

        self._database.write(say)
        self._tell_the_store()
        self._is_announced = True


def idle_packs(needs: Needs) -> ColumnElement[bool]:
    """Live packs that nobody holds or needs."""
    return and_(_packs.c.state == FileState.LIVE, ~needs.pinned_pack(), ~needs.of_pack())


def due_packs(needs: Needs, grace_ms: int) -> ColumnElement[bool]:
    """Packs that may lose their placements; damaged ones, once what is needed lies elsewhere."""
    condemned = and_(_packs.c.state == FileState.CONDEMNED, ~needs.of_pack())
    damaged = and_(_packs.c.state == FileState.DAMAGED, ~needs.only_of_pack())
    return and_(condemned | damaged, is_older(_packs, grace_ms), ~needs.pinned_pack())


def idle_manifests(needs: Needs) -> ColumnElement[bool]:
    state = _manifests.c.state.in_((FileState.WRITING, FileState.LIVE))
    return and_(state, ~needs.pinned_manifest(), ~needs.of_manifest())


def due_manifests(needs: Needs, grace_ms: int) -> ColumnElement[bool]:
    return and_(
        _manifests.c.state.in_(_DOOMED),
        is_older(_manifests, grace_ms),
        ~needs.pinned_manifest(),
        ~needs.of_manifest(),
    )


def _doom(tx: Connection, which: ColumnElement[bool]) -> None:
    """Take the placements of these packs away.

    The time of their state stays as it is: they have waited for the grace time, so their files may
    go at once.
    """
    doomed = lock(tx, _packs, which)
    change(tx, _packs, doomed, state=FileState.DELETING)
    placements = schema.placements
    tx.execute(delete(placements).where(is_one_of(tx, placements.c.pack_id, doomed)))
