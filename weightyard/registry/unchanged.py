"""Unchanged: answers of the database, kept for as long as nothing in it changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from weightyard.registry.database import Database

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

_MOST = 1000


class Unchanged(Generic[_K, _V]):
    """Remembers answers, by key. Thread-safe.

    Before each answer the database is asked whether any process has committed anything since, which
    takes it much less time than an answer. If it cannot tell, nothing is remembered.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] | None = None
        self._known: dict[_K, _V] = {}

    def get(self, key: _K, ask: Callable[[], _V]) -> _V:
        """What `ask` returns, or has returned before. Raises what it raises."""
        # Before `ask`: what changes during it makes the answer one of the past, to be asked again.
        stamp = self._database.stamp()
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
        """Keys of remembered answers for which `gave` is true."""
        with self._lock:
            return [key for key, known in self._known.items() if gave(known)]
