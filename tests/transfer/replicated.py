"""A store whose files lie on several DataNodes, as far as anyone sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightyard.storage.cancel import Cancel
from weightyard.storage.store import Location, Read, Replica, Served, Store, StorePath
from weightyard.testing.faults import FaultyStore


class Replicated(FaultyStore):
    """Every file on the same ones. What each does at a read is said by `before_read`."""

    def __init__(self, store: Store, *replicas: Replica) -> None:
        super().__init__(store)
        self._replicas = replicas

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        found = super().locate(path, timeout_s=timeout_s)
        spans = tuple(replace(span, replicas=self._replicas) for span in found.spans)
        return replace(found, spans=spans)

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        self.before_read(location, reads, replica, cancel)
        served = self._store.read(location, reads, timeout_s=timeout_s, cancel=cancel)
        return replace(served, replica=replica)
