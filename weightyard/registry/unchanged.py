"""Unchanged: answers of the database, good for as long as nobody changes anything in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from weightyard.registry.database import Database

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

_MOST = 1000


class Unchanged(Generic[_K, _V]):
    """What was asked before, by key. Thread-safe.

    Every time the database says whether anything was committed since, by whatever process: that
    takes it a small part of the time of an answer. One that cannot say it is always asked.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] | None = None
        self._known: dict[_K, _V] = {}

    def get(self, key: _K, ask: Callable[[], _V]) -> _V:
        """What `ask` gives, or gave. Raises what it raises."""
        stamp = self._database.stamp()  # first: a change after it is a change after the answer
        with self._lock:
            if stamp != self._stamp or len(self._known) >= _MOST:
                self._known.clear()
                self._stamp = stamp
            found = self._known.get(key)
        if found is not None:
            return found
        found = ask()
        with self._lock:
            if stamp is not None and stamp == self._stamp:
                self._known[key] = found
        return found

    def keys(self, gave: Callable[[_V], bool]) -> list[_K]:
        """Those whose answer is such a one."""
        with self._lock:
            return [key for key, known in self._known.items() if gave(known)]
