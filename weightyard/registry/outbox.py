"""The outbox: records and journal entries on their way into the store, written after the commit.

The transaction that they tell of puts them here, so that none is forgotten, and none tells of what
did not happen. Any process may write them out; each has a name of its own and is written once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, update

from weightyard.errors import Conflict, Damaged, FileMissing, Refused, Retryable
from weightyard.logs import Log
from weightyard.names import ModelName
from weightyard.records import Version
from weightyard.registry import history, schema
from weightyard.registry.chores import small_files
from weightyard.registry.database import Database, now_ms
from weightyard.registry.history import RECORD_FORMAT, RecordFile
from weightyard.registry.rows import batches, clock, one_at_a_time
from weightyard.storage import layout
from weightyard.storage.store import Store, StorePath
from weightyard.transfer import once
from weightyard.transfer.once import write_each_once

_log = Log(__name__)

_outbox = schema.outbox
_IS_WAITING = _outbox.c.set_aside_ms.is_(None)
_SET_ASIDE = select(_outbox.c.path, _outbox.c.content).where(~_IS_WAITING).order_by(_outbox.c.id)

_REMOVED_AT_ONCE = 100

_LATE_S = 600
"""When an entry is late. Usually it is written at once, by a service every few seconds."""


@dataclass(frozen=True, slots=True)
class Late:
    """Entries that should be in the store by now, and are not."""

    oldest: StorePath
    entries: int
    waits_s: int

    def __str__(self) -> str:
        return (
            f"records and journal entries that are not in the store yet: {self.entries}, the "
            f"oldest for {self.waits_s // 60} minutes; `rebuild` would know nothing of them"
        )


def put_record(tx: Connection, version: Version) -> None:
    """Put a commit record: from it and the manifest `rebuild` makes the version again.

    For a new version, put an entry of the journal first: `freshness` looks there only, so no record
    may be in the store before an entry.
    """
    path = layout.record(ModelName.parse(version.model), version.number)
    content = version.model_dump(mode="json", exclude={"aliases", "last_used", "damaged"})
    _put(tx, {path: {"format": RECORD_FORMAT, "version": content}})


def put_journal(
    tx: Connection,
    what: str,
    subject: str,
    who: str,
    detail: Mapping[str, Any],
    at_ms: int | None = None,
) -> None:
    """Put an entry of the journal: a change that no record tells."""
    put_journals(tx, what, who, [(subject, detail)], at_ms)


def put_journals(
    tx: Connection,
    what: str,
    who: str,
    changes: Sequence[tuple[str, Mapping[str, Any]]],
    at_ms: int | None = None,
) -> None:
    """The same for several subjects, in their order."""
    if not changes:
        return
    one_at_a_time(tx)
    at_ms = clock(tx) if at_ms is None else at_ms
    # Not numbered by a sequence of PostgreSQL, which leaves gaps. Without gaps, one look for the
    # next entry shows whether the store has newer ones than this database (`freshness`).
    first = last_sequence(tx) + 1
    numbers = range(first, first + len(changes))
    tx.execute(insert(schema.journal), [{"id": number, "at_ms": at_ms} for number in numbers])
    entries = {
        layout.journal(sequence): {
            "format": RECORD_FORMAT,
            "sequence": sequence,
            "at_ms": at_ms,
            "what": what,
            "subject": subject,
            "who": who,
            "detail": dict(detail),
        }
        for sequence, (subject, detail) in zip(numbers, changes, strict=True)
    }
    _put(tx, entries)


def last_sequence(tx: Connection) -> int:
    """The number of the newest entry of the journal; 0: there is none."""
    return tx.scalar(select(func.max(schema.journal.c.id))) or 0


def _put(tx: Connection, files: Mapping[StorePath, Mapping[str, Any]]) -> None:
    at_ms = clock(tx)
    tx.execute(
        insert(schema.outbox),
        [
            {"path": path.text, "content": msgspec.json.encode(content), "created_ms": at_ms}
            for path, content in files.items()
        ],
    )


def waiting(database: Database) -> int:
    """How many entries are still to be written into the store."""
    return database.read(_count_waiting)


def _count_waiting(tx: Connection) -> int:
    return tx.scalar(select(func.count()).select_from(_outbox).where(_IS_WAITING)) or 0


def late(tx: Connection) -> Late | None:
    """Entries that wait longer than they should, or None."""
    oldest = select(_outbox).where(_IS_WAITING).order_by(_outbox.c.id).limit(1)
    row = tx.execute(oldest).one_or_none()
    waits_s = 0 if row is None else (clock(tx) - row.created_ms) // 1000
    if row is None or waits_s <= _LATE_S:
        return None
    return Late(StorePath(row.path), _count_waiting(tx), waits_s)


class Obstacle(enum.Enum):
    """What stands in the way of an entry: the state of the file that has its name."""

    NONE = "is free again"
    UNREADABLE = "cannot be read"
    DIFFERENT = "tells something else"


def set_aside(database: Database, store: Store) -> Iterator[tuple[StorePath, Obstacle]]:
    """Entries that could not be written, as another file had their name; and what it is now.

    Raises what the store raises.
    """
    for row in database.read(lambda tx: tx.execute(_SET_ASIDE).all()):
        yield StorePath(row.path), _obstacle(store, StorePath(row.path), row.content)


def require_all_told(database: Database) -> None:
    """Raises Conflict if an entry was set aside: then nothing may be deleted from the store.

    The file in its place may be another database's, which needs what this one would delete. And a
    registry rebuilt from the store would not know of a removal.
    """
    path = database.read(lambda tx: tx.scalar(_SET_ASIDE.limit(1)))
    if path is not None:
        raise Conflict(
            f"another file has the name of {path}, so the store was not told of all that was done "
            "here, and nothing is deleted: `weightyard check` says what to do"
        )


def try_again(tx: Connection) -> None:
    """Have entries that were set aside tried again, with the others."""
    tx.execute(update(_outbox).where(~_IS_WAITING).values(set_aside_ms=None))


def newest(database: Database) -> int:
    """The id of the entry that was put here last; 0: there is none."""
    return database.read(lambda tx: tx.scalar(select(func.max(schema.outbox.c.id)))) or 0


def flush(database: Database, store: Store, limit: int = 1000, up_to: int | None = None) -> int:
    """Write what is waiting into the store, oldest first; returns how many entries.

    `up_to`: the id of the last entry meant. An entry is removed here once it is in the store; of
    two processes that do this at once, the second finds the same files there. If another file has
    an entry's name, the entry is set aside, and `check` reports it; if that file cannot be read
    now, the entry is left for the next time. Neither holds up the others. Raises what the store
    raises.
    """
    meant = select(_outbox).where(_IS_WAITING).order_by(_outbox.c.id).limit(limit)
    if up_to is not None:
        meant = meant.where(_outbox.c.id <= up_to)
    rows = database.read(lambda tx: tx.execute(meant).all())
    if not rows:
        return 0
    met = _Met()
    with small_files(database, store, "outbox") as upload:
        for some in batches(rows, _REMOVED_AT_ONCE):
            files = {StorePath(row.path): row.content for row in some}
            write_each_once(store, upload, files, is_same=met.look)
            database.write(partial(_settle, rows=some, met=met))
    if met.silent:
        raise next(iter(met.silent.values()))
    return len(rows)


class _Met:
    """What was found under the names of entries."""

    def __init__(self) -> None:
        self.obstacles: dict[str, Obstacle] = {}
        self.silent: dict[str, Retryable] = {}

    def look(self, store: Store, path: StorePath, content: bytes) -> bool:
        """Note whether the file will do. True in any case: the next entry is to be written."""
        try:
            obstacle = _obstacle(store, path, content, is_there=True)
        except Retryable as why:
            _log.warning("outbox.not_known", path=path, reason=why)
            self.silent[path.text] = why
        else:
            if obstacle is not Obstacle.NONE:
                _log.warning("outbox.set_aside", path=path, reason=obstacle.value)
                self.obstacles[path.text] = obstacle
        return True


def _settle(tx: Connection, rows: Sequence[Row[Any]], met: _Met) -> None:
    """Forget what is in the store, and set aside what cannot be."""
    aside = [row for row in rows if row.path in met.obstacles]
    tx.execute(update(_outbox).where(*_are(aside)).values(set_aside_ms=now_ms()))
    left = met.obstacles.keys() | met.silent.keys()
    tx.execute(delete(_outbox).where(*_are([row for row in rows if row.path not in left])))


def _are(rows: Sequence[Row[Any]]) -> tuple[ColumnElement[bool], ...]:
    """These entries, and none put here since under an id of theirs: so by id and path.

    Another process may have written and deleted them meanwhile, and SQLite uses ids again.
    """
    ids, paths = [row.id for row in rows], [row.path for row in rows]
    return _outbox.c.id.in_(ids), _outbox.c.path.in_(paths)


def _obstacle(store: Store, path: StorePath, content: bytes, *, is_there: bool = False) -> Obstacle:
    """What keeps an entry out of the store: not the same entry, nor a record of the same version.

    `heal` puts a lost record here again as the version is by then, and two may do so at once. Any
    of them will do: the journal tells what was changed of a version since it was published.
    """
    try:
        if once.is_there(store, path, content):
            return Obstacle.NONE
        if history.record_of(path) is None:
            history.read_entry(store, path)
            return Obstacle.DIFFERENT
        there = history.read_record(store, path).version
    except FileMissing:
        # It was there a moment ago, when the entry was to be written: `check --heal` tries again.
        return Obstacle.UNREADABLE if is_there else Obstacle.NONE
    except (Damaged, Refused):  # nobody can read it, so it tells nothing
        return Obstacle.UNREADABLE
    meant = msgspec.json.decode(content, type=RecordFile).version
    if any(there.get(name) != meant[name] for name in ("model", "number", "digest")):
        return Obstacle.DIFFERENT
    _log.warning("outbox.record_there", path=path)
    return Obstacle.NONE
