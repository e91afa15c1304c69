"""Preview: what gc would do now. Reads one consistent view, holds nothing, changes nothing."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Table, and_, func, or_, select

from weightyard.records import GcReport
from weightyard.registry import retention, rewrite, schema, sweep
from weightyard.registry.collect import (
    SHOWN_ITEMS,
    GcOptions,
    Tally,
    due_manifests,
    due_packs,
    idle_manifests,
    idle_packs,
)
from weightyard.registry.database import now_ms
from weightyard.registry.locking import is_older
from weightyard.registry.needs import Needs, leaving
from weightyard.registry.schema import FileState, UploadState

_packs, _manifests, _uploads, _v = (
    schema.packs,
    schema.manifests,
    schema.uploads,
    schema.versions,
)


def preview(tx: Connection, options: GcOptions) -> GcReport:
    """The report a run would give, as far as it can be known: others go on writing meanwhile."""
    tally = Tally()
    over = and_(_uploads.c.state == UploadState.OPEN, _uploads.c.lease_ms <= now_ms())
    tally.count(uploads_expired=_count(tx, _uploads, over))
    removed: list[int] = []
    for due in retention.plan(tx):
        removed.append(due.version_row)
        tally.count(versions_removed=1)
        tally.note("version", due.ref, due.logical_bytes, due.why)
    needs = Needs(leaving(tx, removed))
    idle, due_now = idle_packs(needs), due_packs(needs, options.grace_ms)
    at_once = options.grace_ms == 0
    deleting = and_(_packs.c.state == FileState.DELETING, is_older(_packs, options.grace_ms))
    _add(tx, tally, "pack", idle, "would be condemned: no version needs it", "condemned")
    goes = or_(due_now, deleting, idle) if at_once else or_(due_now, deleting)
    _add(tx, tally, "pack", goes, "would be deleted: nobody needs it, its grace is over", "deleted")
    waiting = and_(
        _packs.c.state.in_((FileState.CONDEMNED, FileState.DELETING)),
        ~is_older(_packs, options.grace_ms),
    )
    _add(tx, tally, "pack", waiting, "waits for its grace to be over", "waiting")
    idle = idle_manifests(needs)
    _add(tx, tally, "manifest", idle, "would be condemned: no version has it", "condemned")
    due_now = due_manifests(needs, options.grace_ms)
    goes = or_(due_now, idle) if at_once else due_now
    _add(tx, tally, "manifest", goes, "would be deleted: its grace is over", "deleted")
    ended = or_(sweep.ended_for(options.grace_ms), and_(over, _ended_long_ago(options.grace_ms)))
    tally.count(unfinished_removed=_count(tx, _packs, sweep.unfinished_packs(ended)))
    if options.rewrites:
        for group in rewrite.plan(tx, needs, options.pack_bytes):
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


def _add(
    tx: Connection, tally: Tally, kind: str, where: ColumnElement[bool], why: str, what: str
) -> None:
    """Count files of a kind, and name the first of them."""
    table = _packs if kind == "pack" else _manifests
    count, size = tx.execute(
        select(func.count(), func.coalesce(func.sum(table.c.bytes), 0)).where(where)
    ).one()
    tally.count(**{f"{kind}s_{what}": count})
    if kind == "pack" or what == "deleted":
        tally.count(**{f"{what}_bytes": int(size)})
    shown = select(table.c.name, table.c.bytes).where(where).order_by(table.c.id)
    rows = tx.execute(shown.limit(SHOWN_ITEMS)).all()
    for row in rows:
        tally.note(kind, row.name, row.bytes, why)
    tally.count(items_in_all=count - len(rows))
