"""Durable: when a file may be relied on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from weightyard.errors import UnderReplicated, Unsupported
from weightyard.storage.deadline import Deadline
from weightyard.storage.store import FileOptions, StagedFile, Store, StorePath

REPLICAS_TIMEOUT_S = 30.0


def least_replicas(store: Store, asked: int | None) -> int:
    """On how many DataNodes a file must be before it is relied on, if `asked` copies are wanted."""
    return min(2, asked or 2) if store.replicates else 1


def require_kept(store: Store, copies: int | None, policy: str | None) -> None:
    """See that a store can keep files so, before anything is done, and even if all of them are
    there already: that is known only much later. Raises Unsupported.
    """
    if not store.replicates and ((copies or 1) != 1 or policy is not None):
        raise Unsupported(
            f"{store.url} keeps one copy, and has no storage policies: use an hdfs:// store"
        )


def was_counted(staged: StagedFile, wanted: int) -> bool:
    """Whether a file lay on enough DataNodes when it was closed: publishing only renames it."""
    return staged.replicas is not None and staged.replicas >= wanted


def too_few(what: str, found: int, wanted: int) -> UnderReplicated:
    """The error for a file on too few DataNodes, which says what to do."""
    return UnderReplicated(
        f"{what} is on {found} DataNodes, {wanted} are required: "
        "start another DataNode, or push with --replication 1"
    )


def require_replicas(store: Store, path: StorePath, wanted: int, timeout_s: float) -> None:
    """Wait until a file lies on enough DataNodes: HDFS closes a file once it is on a single one.

    Raises UnderReplicated.
    """
    deadline = Deadline.after(timeout_s)
    while True:
        spans = store.locate(path).spans
        found = min((len(span.replicas) for span in spans), default=wanted)
        if found >= wanted:
            return
        if time.monotonic() + 0.1 > deadline.at:
            raise too_few(str(path), found, wanted)
        time.sleep(0.1)


def make_durable(store: Store, paths: Sequence[StorePath], wanted: int) -> None:
    """The same for files that others may have written with fewer copies: then ask for more.

    Asks for all of them before it waits, so that HDFS copies them side by side.
    """
    for path in paths:
        if wanted > 1 and store.stat(path).replication < wanted:
            store.adjust(path, FileOptions(replication=wanted))
    for path in paths:
        require_replicas(store, path, wanted, REPLICAS_TIMEOUT_S)
