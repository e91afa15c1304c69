"""Events: what happened, in the order in which it became visible."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, func, or_, select

from weightyard.records import Event
from weightyard.registry import schema
from weightyard.registry.rows import moment

_e = schema.events


def newest(tx: Connection) -> int:
    """The id of the last event; 0 if there is none yet."""
    return int(tx.scalar(select(func.max(_e.c.id))) or 0)


def after(
    tx: Connection, last: int, *, projects: Sequence[str] | None = None, limit: int = 1000
) -> list[Event]:
    """Events after the one with id `last`, the oldest first; with `projects`, of these only."""
    wanted = select(_e).where(_e.c.id > last).order_by(_e.c.id).limit(limit)
    if projects is not None:
        wanted = wanted.where(or_(*(_is_of(f"{name}/") for name in projects)))
    return [
        Event(
            id=row.id,
            at=moment(row.at_ms),
            kind=row.kind,
            subject=row.subject,
            detail=row.detail,
        )
        for row in tx.execute(wanted)
    ]


def _is_of(prefix: str) -> ColumnElement[bool]:
    """Whether a subject has this prefix. Not by LIKE, which on SQLite takes `Team/` for `team/`."""
    return func.substr(_e.c.subject, 1, len(prefix)) == prefix
