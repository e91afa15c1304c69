"""Freshness: is this database the newest one that wrote to its store?

A database brought back from a backup knows nothing of what was done since. It would take packs for
garbage, give out numbers twice, and write other entries under names that exist already. The records
and the journal in the store show whether it is such a one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from sqlalchemy import select

from weightyard.errors import FileMissing, ForeignStore, Retryable, StoreUnavailable
from weightyard.logs import Log
from weightyard.names import ModelName
from weightyard.registry import binding, history, outbox, schema
from weightyard.registry.database import Database
from weightyard.storage import layout
from weightyard.storage.opening import folder_of
from weightyard.storage.store import Store, StorePath
from weightyard.storage.watched import Watched

_log = Log(__name__)

_LOOK_S = 3.0
"""How long a change waits for the store's answer. A client waits half a minute for a change, and
a store may try for as long to reach its cluster."""
_SILENT_S = 10.0
"""How long a store that did not answer is not asked again."""


def require_newest(database: Database, store: Store) -> None:
    """Look for the journal entry after the newest one this database knows: one look is enough.

    The journal has no gaps, and whatever is published or changed is in it. Done before every
    change; gc uses `require_newest_of_all`. Raises ForeignStore if the database is older than its
    store.
    """
    _require_newest(database, store, lambda path: _is_there(store, path))


class BriefLooks:
    """As `require_newest`, for changes that need no store: one that does not answer stops nothing.

    So an alias can be moved meanwhile. Nor does every change wait for such a store: only one in
    `_SILENT_S` asks it whether it answers again. Thread-safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watched = Watched(most=8)
        self._lock = threading.Lock()
        self._is_silent = False
        self._tried_s = 0.0

    def require_newest(self, database: Database) -> None:
        """Raises ForeignStore if the database is known to be older than its store."""
        try:
            _require_newest(database, self._store, self._is_there)
        except Retryable as why:
            _log.warning("registry.freshness_unknown", reason=why)

    def close(self) -> None:
        self._watched.close()

    def _is_there(self, path: StorePath) -> bool:
        # A folder does not hang, so it needs no thread; and a process with threads should not fork.
        if folder_of(self._store) is not None:
            return _is_there(self._store, path)
        if not self._may_ask():
            raise StoreUnavailable(f"{self._store.url} did not answer lately, so it is not asked")
        doing = f"looking for {path}"
        try:
            found = self._watched.call(doing, _LOOK_S, lambda: _is_there(self._store, path))
        except Retryable:
            self._note(is_silent=True)
            raise
        self._note(is_silent=False)
        return found

    def _may_ask(self) -> bool:
        with self._lock:
            if not self._is_silent:
                return True
            now_s = time.monotonic()
            is_due = now_s - self._tried_s >= _SILENT_S
            if is_due:
                self._tried_s = now_s
            return is_due

    def _note(self, *, is_silent: bool) -> None:
        with self._lock:
            self._is_silent = is_silent
            self._tried_s = time.monotonic()


def _require_newest(
    database: Database, store: Store, is_there: Callable[[StorePath], bool]
) -> None:
    known = database.read(outbox.last_sequence)
    while is_there(layout.journal(known + 1)):
        again = database.read(outbox.last_sequence)
        if again <= known:  # otherwise another process made that entry just now
            raise _older(store, layout.journal(known + 1))
        known = again


def require_newest_of_all(database: Database, store: Store) -> None:
    """Look at every record and journal entry, before anything is taken away.

    Raises ForeignStore if the store belongs to another registry, or to a newer copy of this one.
    """
    if binding.read_yard_file(store) is None:
        raise ForeignStore(f"{store.url} has no yard.json: is it the right store?")
    binding.bind(database, store)
    unknown = next(unknown_to(database, store), None)
    if unknown is not None:
        raise _older(store, unknown)


def unknown_to(database: Database, store: Store) -> Iterator[StorePath]:
    """Records and journal entries that a database cannot have caused.

    There are none, unless the database is older than the store, or not the store's: then what it
    takes for unused may be in use.
    """
    numbers: dict[ModelName, int] = {}
    for file in store.list(layout.MODELS):
        version = history.record_of(file.path)
        if version is None:
            continue
        model, number = version
        # Asked again if the number known seems too low: versions are published meanwhile.
        if number > numbers.get(model, 0):
            numbers[model] = _last_number(database, model)
        if number > numbers[model]:
            yield file.path
    known = -1
    for file in store.list(layout.JOURNAL):
        sequence = history.sequence_of(file.path)
        if sequence is not None and sequence > known:
            known = database.read(outbox.last_sequence)
            if sequence > known:
                yield file.path


def _older(store: Store, unknown: StorePath) -> ForeignStore:
    return ForeignStore(
        f"{store.url} has {unknown}, which this database does not know: the database is older than "
        "its store, so nothing is changed. Restore the newest backup, or run `weightyard rebuild` "
        "into an empty database"
    )


def _is_there(store: Store, path: StorePath) -> bool:
    try:
        store.stat(path)
    except FileMissing:
        return False
    return True


def _last_number(database: Database, model: ModelName) -> int:
    m = schema.models
    wanted = select(m.c.last_number).where(m.c.project == model.project, m.c.name == model.name)
    return database.read(lambda tx: tx.scalar(wanted)) or 0
