"""Locations kept between loads, so that the NameNode is asked once for each pack."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from weightyard.storage.store import Location, Store, StorePath

LIFE_S = 300.0
"""A block token lives ten hours by Hadoop's default; but where DataNodes come and go, an answer is
out of date sooner."""

MOST_LOCATIONS = 8192


class Locations:
    """Where files of one store lie, as asked a short while ago. Thread-safe, bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[StorePath, tuple[float, Location]] = {}

    def get(self, path: StorePath) -> Location | None:
        """What is known and not too old."""
        with self._lock:
            found = self._known.get(path)
            if found is None or found[0] + LIFE_S < self._clock():
                return None
            return found[1]

    def ask(self, store: Store, path: StorePath, timeout_s: float | None = None) -> Location:
        """Ask the store, and remember. Raises as `Store.locate`."""
        self.drop(path)
        location = store.locate(path, timeout_s=timeout_s)
        self.keep(path, location)
        return location

    def keep(self, path: StorePath, location: Location) -> None:
        """Remember an answer that this process or another rank just got."""
        with self._lock:
            self._known.pop(path, None)
            while len(self._known) >= MOST_LOCATIONS:
                del self._known[next(iter(self._known))]  # the one asked for longest ago
            self._known[path] = (self._clock(), location)

    def drop(self, path: StorePath) -> None:
        with self._lock:
            self._known.pop(path, None)

    def distrust(self, path: StorePath, datanode: str) -> None:
        """Remember that the bytes of one replica are wrong: it is asked last from now on."""
        with self._lock:
            found = self._known.get(path)
            if found is None:
                return
            at, location = found
            spans = tuple(
                dataclasses.replace(
                    span,
                    replicas=tuple(
                        dataclasses.replace(replica, state="corrupt")
                        if replica.datanode == datanode
                        else replica
                        for replica in span.replicas
                    ),
                )
                for span in location.spans
            )
            self._known[path] = (at, dataclasses.replace(location, spans=spans))
