"""The outbox: records and journal entries that belong into the store, written after the commit.

They are put here by the transaction they tell of, so that none is forgotten and none tells of what
did not happen. Any process may write them out; each has a name of its own and is written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, func, insert, select

from weightyard.errors import Damaged, Refused
from weightyard.logs import Log
from weightyard.names import ModelName
from weightyard.records import Version
from weightyard.registry import history, schema
from weightyard.registry.chores import small_files
from weightyard.registry.database import Database
from weightyard.registry.history import RECORD_FORMAT, RecordFile
from weightyard.registry.rows import batches, clock, one_at_a_time
from weightyard.storage import layout
from weightyard.storage.store import Store, StorePath
from weightyard.transfer.once import is_there, write_each_once

_log = Log(__name__)

_REMOVED_AT_ONCE = 100

_LATE_S = 600
"""Whoever changed something writes its entries at once; a service does so every few seconds."""


@dataclass(frozen=True, slots=True)
class Late:
    """What should be in the store by now, and is not."""

    oldest: StorePath
    entries: int
    waits_s: int

    def __str__(self) -> str:
        return (
            f"records and journal entries that are not in the store yet: {self.entries}, the "
            f"oldest for {self.waits_s // 60} minutes; `rebuild` would know nothing of them"
        )


def put_record(tx: Connection, version: Version) -> None:
    """The commit record: from it and the manifest `rebuild` makes the version again.

    That of a new version comes after an entry of the journal: then no record is in a store whose
    journal does not tell that there is something new (`freshness`).
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
    """An entry of the journal: what changed that no record tells."""
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
    # Without gaps, which a sequence of PostgreSQL has: whether a store has a newer entry than this
    # database is then told by looking for the next one (`freshness`).
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
    """How many entries are not in the store yet."""
    count = database.read(lambda tx: tx.scalar(select(func.count()).select_from(schema.outbox)))
    return int(count or 0)


def late(tx: Connection) -> Late | None:
    """Since when the oldest entry waits, if that is too long for what is written after a commit."""
    row = tx.execute(select(schema.outbox).order_by(schema.outbox.c.id).limit(1)).one_or_none()
    waits_s = 0 if row is None else (clock(tx) - row.created_ms) // 1000
    if row is None or waits_s <= _LATE_S:
        return None
    entries = tx.scalar(select(func.count()).select_from(schema.outbox)) or 0
    return Late(StorePath(row.path), entries, waits_s)


def newest(database: Database) -> int:
    """The id of the entry put here last, of those that wait; 0: none does."""
    return database.read(lambda tx: tx.scalar(select(func.max(schema.outbox.c.id)))) or 0


def flush(database: Database, store: Store, limit: int = 1000, up_to: int | None = None) -> int:
    """Write what is waiting into the store, oldest first; returns how many entries.

    `up_to`: the id of the last one meant. Entries are removed here once they are there; two
    processes doing this at once write the same files, and the second finds them there. Raises
    Conflict if something else has the name of an entry, and what the store raises.
    """
    meant = select(schema.outbox).order_by(schema.outbox.c.id).limit(limit)
    if up_to is not None:
        meant = meant.where(schema.outbox.c.id <= up_to)
    rows = database.read(lambda tx: tx.execute(meant).all())
    if not rows:
        return 0
    with small_files(database, store, "outbox") as upload:
        for some in batches(rows, _REMOVED_AT_ONCE):
            files = {StorePath(row.path): row.content for row in some}
            write_each_once(store, upload, files, is_same=_is_told)
            done = delete(schema.outbox).where(schema.outbox.c.id.in_([row.id for row in some]))
            database.write(partial(Connection.execute, statement=done))
    return len(rows)


def _is_told(store: Store, path: StorePath, content: bytes) -> bool:
    """Whether an entry is in the store, or another record of its version is.

    One that was lost is put here again as the version is by then, and two may do so at once. Any
    will do: the journal tells what changed of a version since it was published.
    """
    if is_there(store, path, content):
        return True
    if history.record_of(path) is None:
        return False
    try:
        there = history.read_record(store, path).version
    except (Damaged, Refused):  # nobody can read it, so it tells nothing
        return False
    meant = msgspec.json.decode(content, type=RecordFile).version
    is_one = all(there.get(name) == meant[name] for name in ("model", "number", "digest"))
    if is_one:
        _log.warning("outbox.record_there", path=path)
    return is_one
