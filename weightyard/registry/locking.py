"""Locking: changing many rows a range at a time, each looked at again under its lock.

In PostgreSQL a statement sees what was committed when it began, yet it may get its locks later. So
only another statement, begun under the locks, sees a pin that was made in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, and_, select, update

from weightyard.registry.database import Database, is_one_of, now_ms
from weightyard.registry.rows import batches
from weightyard.registry.schema import FileState

_RANGE = 5000
"""How many rows one query looks at."""

_BATCH = 500
"""How many rows one transaction changes."""


def is_older(table: Table, grace_ms: int) -> ColumnElement[bool]:
    """Whether a row has been in its state for the grace time."""
    return table.c.state_ms <= now_ms() - grace_ms


def found(
    database: Database,
    table: Table,
    where: ColumnElement[bool],
    *,
    among: ColumnElement[bool] | None = None,
    size: int = _BATCH,
    passed: Callable[[int], None] = lambda id: None,
) -> Iterator[ColumnElement[bool]]:
    """Rows that fit, some at a time: each time the condition by which to find them again.

    The table, or the part of it that `among` selects, is gone through by ranges of ids. So each
    query looks at a limited number of rows, whatever plan the database chooses. `passed` is told
    the id up to which all were seen.
    """
    after: int | None = 0
    while after is not None:
        after, ids = database.read(partial(_look, table=table, where=where, among=among, id=after))
        for batch in batches(ids, size):
            yield and_(table.c.id.in_(batch), where)
        if after is not None:
            passed(after)


def _look(
    tx: Connection,
    table: Table,
    where: ColumnElement[bool],
    among: ColumnElement[bool] | None,
    id: int,
) -> tuple[int | None, Sequence[int]]:
    """What fits in the range that begins after an id, and where the range ends."""
    ahead = select(table.c.id).where(table.c.id > id).order_by(table.c.id)
    if among is not None:
        ahead = ahead.where(among)
    last = tx.scalar(ahead.offset(_RANGE - 1).limit(1))
    ahead = ahead.where(where)
    return last, tx.scalars(ahead if last is None else ahead.where(table.c.id <= last)).all()


def lock(tx: Connection, table: Table, where: ColumnElement[bool]) -> list[int]:
    """Lock rows, without those that others hold. Returns the ids of those that fit even then."""
    rows = select(table.c.id).where(where).order_by(table.c.id)
    locked = tx.scalars(rows.with_for_update(skip_locked=True, of=table)).all()
    return list(tx.scalars(rows.where(is_one_of(tx, table.c.id, locked)))) if locked else []


def move(tx: Connection, table: Table, where: ColumnElement[bool], to: FileState) -> list[Row[Any]]:
    """Bring rows that fit into another state, from now on. Returns their id, name and bytes."""
    return change(tx, table, lock(tx, table, where), state=to, state_ms=now_ms())


def change(tx: Connection, table: Table, ids: list[int], **values: Any) -> list[Row[Any]]:
    """Set values in rows the caller has locked. Returns their id, name and bytes."""
    if not ids:
        return []
    changed = update(table).where(is_one_of(tx, table.c.id, ids)).values(values)
    return list(tx.execute(changed.returning(table.c.id, table.c.name, table.c.bytes)).all())
