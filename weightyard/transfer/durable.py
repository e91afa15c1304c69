"""Durable: when a file may be relied on."""

from __future__ import annotations

import time

from weightyard.errors import UnderReplicated
from weightyard.storage.deadline import Deadline
from weightyard.storage.store import FileOptions, Store, StorePath

REPLICAS_TIMEOUT_S = 30.0


def require_replicas(store: Store, path: StorePath, wanted: int, timeout_s: float) -> None:
    """Wait until a file lies on enough DataNodes: HDFS closes one that is on a single one.

    Raises UnderReplicated.
    """
    deadline = Deadline.after(timeout_s)
    while True:
        spans = store.locate(path).spans
        found = min((len(span.replicas) for span in spans), default=wanted)
        if found >= wanted:
            return
        if time.monotonic() + 0.1 > deadline.at:
            raise UnderReplicated(f"{path} is on {found} DataNodes, {wanted} are required")
        time.sleep(0.1)


def make_durable(store: Store, path: StorePath, wanted: int) -> None:
    """The same for a file that may be another's, who asked for fewer copies: then ask for more."""
    if wanted > 1 and store.stat(path).replication < wanted:
        store.adjust(path, FileOptions(replication=wanted))
    require_replicas(store, path, wanted, REPLICAS_TIMEOUT_S)
