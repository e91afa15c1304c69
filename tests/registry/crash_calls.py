"""The calls of an operation on store and database: counted, failed, or told of."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg

from weightyard.registry.database import Database
from weightyard.storage.store import Store
from weightyard.testing.faults import Fault, FaultyStore

WRITES = ("INSERT", "UPDATE", "DELETE")
CHANGES = ("stage", "close", "publish", "delete", "adjust")
"""Calls on the store: files are made, get or lose their names."""

Call: TypeAlias = tuple[str, int, str]
"""`store` or `sql`, the number among those, and what is called."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call of an operation, and what happens there."""

    operation: str
    kind: str
    """`store` or `sql`."""
    index: int
    """Among the calls of its kind."""
    call: str
    mode: str
    """`before`, `after`, `kill`; or `stop`, for gc to run meanwhile."""
    expired: bool = False
    """With `stop`: the writer is away so long that its lease ends."""
    change: int | None = None
    """With `stop`: at which of its changes gc is killed; None: it comes to its end."""


class Calls:
    """Counts the calls on store and database, and lets one of them fail."""

    def __init__(
        self, point: Point | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """`meanwhile`: what happens while an operation stands still at a point to `stop` at."""
        self.seen: list[Call] = []
        self.is_reached = False
        self.went_on: list[Call] = []
        """What another thread of the operation called meanwhile: it did not stand still."""
        self._is_standing = False
        self._point = point
        self._meanwhile = meanwhile
        self._counts = {"store": 0, "sql": 0}
        self._lock = threading.Lock()  # files of the outbox are staged side by side

    def store(self, store: Store) -> Store:
        faults = {}
        if self._point is not None and self._point.kind == "store":
            mode = {"before": Fault.BEFORE, "after": Fault.AFTER}.get(self._point.mode)
            faults = {self._point.index: mode} if mode is not None else {}
        return FaultyStore(store, faults, on_call=lambda index, name: self._note("store", name))

    @contextmanager
    def database(self, database: Database) -> Iterator[Database]:
        """Counts what the dialect is told to do; a transaction's begin and commit, too."""
        dialect: Any = database.engine.dialect
        error = sqlite3.OperationalError if database.is_sqlite else psycopg.OperationalError
        names = ["do_execute", "do_executemany", "do_commit"]
        if not database.is_sqlite:  # SQLite's is a statement
            names.append("do_begin")
        for name in names:
            setattr(dialect, name, self._counted(name, getattr(dialect, name), error))
        try:
            yield database
        finally:
            for name in names:
                delattr(dialect, name)

    def _counted(
        self, name: str, call: Callable[..., None], error: type[Exception]
    ) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            what = " ".join(str(arguments[1]).split()[:3]) if "exec" in name else name[3:].upper()
            mode = self._note("sql", what)
            if mode == "before":
                raise error(f"injected before {what}")
            call(*arguments, **options)
            if mode == "after":
                raise error(f"injected after {what}")

        return run

    def _note(self, kind: str, name: str) -> str | None:
        """What is to happen at this call."""
        with self._lock:
            index = self._counts[kind]
            self._counts[kind] += 1
            self.seen.append((kind, index, name))
            if self._is_standing:
                self.went_on.append((kind, index, name))
        point = self._point
        if point is None or (point.kind, point.index) != (kind, index):
            return None
        self.is_reached = True
        if point.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if point.mode == "stop" and self._meanwhile is not None:
            self._is_standing = True
            try:
                self._meanwhile()
            finally:
                self._is_standing = False
        return point.mode


class StateChanges(Calls):
    """Tells before files are made, get or lose their names, and before writes are committed."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__init__()
        self._on_change = on_change
        self._has_written = False

    def _note(self, kind: str, name: str) -> str | None:
        super()._note(kind, name)
        with self._lock:
            is_change = name in CHANGES or (name == "COMMIT" and self._has_written)
            if kind == "sql":
                self._has_written = name != "COMMIT" and (
                    self._has_written or name.startswith(WRITES)
                )
            if is_change:
                self._on_change()
        return None
