"""Small pieces of SQL that several parts need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    func,
    insert,
    literal_column,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

from weightyard.registry import schema
from weightyard.registry.database import as_array, now_ms

_T = TypeVar("_T")

_EVENTS_LOCK = 0x77792D6576656E74

BATCH = 5000
"""Rows or values in one statement; SQLite takes 32,766 values at most."""


def batches(items: Iterable[_T], size: int = BATCH) -> Iterator[list[_T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def clock(tx: Connection) -> int:
    """Milliseconds since the epoch by the database's clock."""
    return int(tx.scalar(select(now_ms())) or 0)


def moment(millis: int | None) -> datetime | None:
    return None if millis is None else datetime.fromtimestamp(millis / 1000, UTC)


def some(
    *where: ColumnElement[bool], first: ColumnElement[int] | None = None
) -> ColumnElement[bool]:
    """Whether any row fits, looked up in the indexes for each row of the query around it.

    `first` is the order in which to look. EXISTS would let PostgreSQL read whole tables into a
    hash, which it does with tables of millions of rows; a subquery with a limit does not.
    """
    one: ColumnElement[int] = literal_column("1")
    found = select(one).where(*where).limit(one)
    if first is not None:
        found = found.order_by(first)
    return found.scalar_subquery().is_not(None)


def insert_missing(tx: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, all with the same columns, leaving alone those whose key is there already."""
    for batch in batches(rows):
        if tx.dialect.name == "sqlite":
            tx.execute(sqlite.insert(table).on_conflict_do_nothing(), batch)
        else:
            tx.execute(_insert_arrays(table, batch).on_conflict_do_nothing())


def put_row(tx: Connection, table: Table, **row: Any) -> None:
    """Insert a row, or change the one with its key, also if others do so at the same time.

    Of two that delete and then insert, the second would fail: the first one's row would be there.
    """
    keys = [column.name for column in table.primary_key]
    dialect: Any = sqlite if tx.dialect.name == "sqlite" else postgresql
    rest = {name: value for name, value in row.items() if name not in keys}
    put = dialect.insert(table).values(row)
    tx.execute(put.on_conflict_do_update(index_elements=keys, set_=rest))


def insert_new(tx: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, all with the same columns, none of whose keys may be there."""
    for batch in batches(rows):
        if tx.dialect.name == "sqlite":
            tx.execute(insert(table), batch)
        else:
            tx.execute(_insert_arrays(table, batch))


def _insert_arrays(table: Table, rows: Sequence[Mapping[str, Any]]) -> postgresql.Insert:
    """One statement with an array for each column: several times quicker than one for each row."""
    names = list(rows[0])
    arrays = [
        func.unnest(as_array([row[name] for row in rows], table.c[name].type)) for name in names
    ]
    return postgresql.insert(table).from_select(names, select(*arrays))


def one_at_a_time(tx: Connection) -> None:
    """Lock out other transactions that make events or journal entries, until this one ends.

    Their ids are given out before the commit: without the lock an event could become visible after
    one with a higher id, and a listener that resumes by id would never see it.
    """
    if tx.dialect.name == "postgresql":
        tx.execute(select(func.pg_advisory_xact_lock(_EVENTS_LOCK)))


def record_event(
    tx: Connection, who: str, kind: str, subject: str, detail: Mapping[str, Any] | None = None
) -> None:
    """Tell listeners what happened, and the audit log who did it."""
    record_events(tx, who, kind, [(subject, detail or {})])


def record_events(
    tx: Connection, who: str, kind: str, happened: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """The same for several subjects, in their order."""
    if not happened:
        return
    one_at_a_time(tx)
    at_ms = clock(tx)
    rows = [{"at_ms": at_ms, "subject": about, "detail": dict(what)} for about, what in happened]
    tx.execute(insert(schema.events), [{"kind": kind, **row} for row in rows])
    tx.execute(insert(schema.audit), [{"who": who, "action": kind, **row} for row in rows])
