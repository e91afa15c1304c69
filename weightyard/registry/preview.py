"""Preview: what gc would do now. Reads one consistent view, holds nothing, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, and_, func, or_, select

from weightyard.records import GcReport
from weightyard.registry import retention, rewrite, schema, sweep
from weightyard.registry.collect import (
    GcOptions,
    Tally,
    due_manifests,
    due_packs,
    idle_manifests,
    idle_packs,
)
from weightyard.registry.database import now_ms
from weightyard.registry.locking import is_older
from weightyard.registry.needs import Leaving, Needs
from weightyard.registry.progress import Progress, Step, silent
from weightyard.registry.schema import FileState, UploadState

_packs, _manifests, _uploads, _v = (
    schema.packs,
    schema.manifests,
    schema.uploads,
    schema.versions,
)

_RANGE = 5000
"""How many rows one query looks at."""


def preview(tx: Connection, options: GcOptions, progress: Progress = silent) -> GcReport:
    """The report a run would give now, as far as it can be known: others may write until then."""
    tally = Tally()
    plan = _Plan(tx, tally, progress)
    progress(Step("looking at versions"))
    over = and_(_uploads.c.state == UploadState.OPEN, _uploads.c.lease_ms <= now_ms())
    tally.count(uploads_expired=_count(tx, _uploads, over))
    removed: list[int] = []
    for due in retention.plan(tx):
        removed.append(due.version_row)
        tally.count(versions_removed=1)
        tally.note("version", due.ref, due.logical_bytes, due.why)
    tally.failed += retention.not_understood(tx)
    needs = Needs.of_yard(tx, Leaving.of(tx, removed))
    idle, due_now = idle_packs(needs), due_packs(needs, options.grace_ms)
    at_once = options.grace_ms == 0
    deleting = and_(_packs.c.state == FileState.DELETING, is_older(_packs, options.grace_ms))
    condemned = ["condemned", "deleted"] if at_once else ["condemned"]
    plan.add("pack", idle, "would be condemned: no version needs it", *condemned)
    goes = or_(due_now, deleting)
    plan.add("pack", goes, "would be deleted: nobody needs it, its grace is over", "deleted")
    waiting = and_(
        _packs.c.state.in_((FileState.CONDEMNED, FileState.DELETING)),
        ~is_older(_packs, options.grace_ms),
    )
    plan.add("pack", waiting, "waits for its grace to be over", "waiting")
    idle = idle_manifests(needs)
    plan.add("manifest", idle, "would be condemned: no version has it", *condemned)
    due_now = due_manifests(needs, options.grace_ms)
    plan.add("manifest", due_now, "would be deleted: its grace is over", "deleted")
    ended = or_(sweep.ended_for(options.grace_ms), and_(over, _ended_long_ago(options.grace_ms)))
    tally.count(unfinished_removed=_count(tx, _packs, sweep.unfinished_packs(ended)))
    if options.rewrites:
        passed = plan.passing("looking for packs to rewrite", _packs)
        for group in rewrite.plan(tx, needs, options.pack_bytes, passed):
            kept_bytes = sum(pack.kept_bytes for pack in group)
            tally.count(packs_rewritten=len(group), rewritten_bytes=kept_bytes)
            tally.count(packs_made=1 if kept_bytes else 0)
            for pack in group:
                why = "would be rewritten: few of its bytes are needed, or it is small"
                tally.note("pack", pack.name, pack.bytes, why)
    return tally.report(options, dry_run=True)


def _ended_long_ago(grace_ms: int) -> ColumnElement[bool]:
    return _uploads.c.lease_ms <= now_ms() - grace_ms


def _count(tx: Connection, table: Table, where: ColumnElement[bool]) -> int:
    return int(tx.scalar(select(func.count()).select_from(table).where(where)) or 0)


class _Plan:
    """Finds what would go, a range of rows at a time, so that no answer is too long."""

    def __init__(self, tx: Connection, tally: Tally, progress: Progress) -> None:
        self._tx = tx
        self._tally = tally
        self._tell = progress

    def add(self, kind: str, where: ColumnElement[bool], why: str, *what: str) -> None:
        """Count the files of a kind that fit under what would happen to them, and name some."""
        table = _packs if kind == "pack" else _manifests
        passed = self.passing(f"looking at {kind}s", table)
        after: int | None = 0
        while after is not None:
            after, rows = self._range(table, where, after)
            for row in rows:
                self._tally.note(kind, row.name, row.bytes, why)
            for one in what:
                self._tally.count(**{f"{kind}s_{one}": len(rows)})
                if kind == "pack" or one == "deleted":
                    self._tally.count(**{f"{one}_bytes": sum(row.bytes for row in rows)})
            if after is not None:
                passed(after)

    def passing(self, doing: str, table: Table) -> Callable[[int], None]:
        last = self._tx.scalar(select(func.max(table.c.id))) or 0
        self._tell(Step(doing, 0, last))
        return lambda id: self._tell(Step(doing, id, last))

    def _range(
        self, table: Table, where: ColumnElement[bool], after: int
    ) -> tuple[int | None, Sequence[Row[Any]]]:
        ahead = select(table.c.id).where(table.c.id > after).order_by(table.c.id)
        last = self._tx.scalar(ahead.offset(_RANGE - 1).limit(1))
        fits: Select[Any] = select(table.c.name, table.c.bytes).where(where, table.c.id > after)
        if last is not None:
            fits = fits.where(table.c.id <= last)
        return last, self._tx.execute(fits.order_by(table.c.id)).all()
