"""Recent: keeps the values used last, up to a total weight."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Recent(Generic[_K, _V]):
    """Values by their keys; those used longest ago go first. Thread-safe."""

    def __init__(self, most: int) -> None:
        """`most`: what all of them together may weigh."""
        self._most = self._left = most
        self._lock = threading.Lock()
        self._kept: dict[_K, tuple[_V, int]] = {}

    def get(self, key: _K) -> _V | None:
        with self._lock:
            if (found := self._kept.pop(key, None)) is None:
                return None
            self._kept[key] = found
            return found[0]

    def keep(self, key: _K, value: _V, weight: int) -> _V:
        """Keep a value if it is not too heavy; returns it."""
        with self._lock:
            if (before := self._kept.pop(key, None)) is not None:
                self._left += before[1]
            if weight <= self._most:  # else it would drive out all others, and then itself
                self._kept[key] = value, weight
                self._left -= weight
            while self._left < 0:
                self._left += self._kept.pop(next(iter(self._kept)))[1]
        return value
