"""By which way bytes come: directly if that works, else by the first other way that does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from copy import copy
from dataclasses import dataclass

from weightyard.errors import (
    Cancelled,
    DataNodeFailed,
    DeadlineExceeded,
    NotAllowed,
    ReplicasDamaged,
    StaleLocation,
    StoreUnavailable,
    Unsupported,
    YardError,
)
from weightyard.logs import Log
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.datanode import DataNodeReader, HungUp
from weightyard.storage.hdfs.fallbacks import Fallback, NoneServed
from weightyard.storage.hdfs.pieces import Piece, one_of, split
from weightyard.storage.hdfs.short_circuit import ShortCircuit
from weightyard.storage.store import Location, Read, ReadPath, Replica, Served

_log = Log(__name__)

_RECHECK_S = 60.0

FindDamage = Callable[[Location, Sequence[Read], Deadline], str | None]
"""What is wrong with the replicas that were to be read, if that is the cause: see `Diagnosis`."""


class Reading:
    """Reads by the ways given. Thread-safe.

    Replicas on this host are read from their files, if its DataNodes hand them out. Whether other
    direct reads work is found out by trying: they do once any DataNode has answered. From then on a
    failure is that of one DataNode, and other ways are used only if all that have a block fail. If
    no DataNode has answered yet and all that have a block fail, direct reads count as not working:
    other ways are used, and direct reads tried again after a minute.

    Kept errors are copies, and what is raised is a copy of those: an error that was raised keeps
    its frames, and they keep the caller's buffers.
    """

    def __init__(
        self,
        direct: DataNodeReader | None,
        fallbacks: Sequence[Fallback],
        why_not_direct: YardError | None = None,
        find_damage: FindDamage = lambda *_: None,
        short_circuit: ShortCircuit | None = None,
    ) -> None:
        self._short_circuit = short_circuit
        self._direct = direct
        self._directness = Directness()
        self._fallbacks = list(fallbacks)
        self._why_not_direct = why_not_direct
        self._find_damage = find_damage

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        replica: Replica | None,
        deadline: Deadline,
    ) -> Served:
        pieces = list(split(location, reads))
        if self._short_circuit is not None:
            served = self._short_circuit.read(pieces, replica, deadline)
            if served is not None:
                return served
        can_be_direct = all(piece.span.access is not None for piece in pieces)
        if self._direct is None or not can_be_direct or not self._directness.may_be_tried():
            return self._read_otherwise(location, reads, deadline)
        asking = _Asking(self._direct, self._directness, deadline)
        try:
            return asking.read(location, pieces, replica)
        except DataNodeFailed as why:
            is_proven = self._directness.is_proven
            is_others_turn = replica is None or asking.is_refuted_by(why, pieces)
            if not is_others_turn or not self._fallbacks:
                raise
            if not is_proven:
                _log.info("read.not_direct", datanode=why.datanode, reason=why.reason)
                self._directness.refuted()
            try:
                return self._read_otherwise(location, reads, deadline)
            except (Cancelled, ReplicasDamaged):
                raise
            except YardError:
                if is_proven:
                    raise why from None
                raise

    def close(self) -> None:
        if self._short_circuit is not None:
            self._short_circuit.close()
        if self._direct is not None:
            self._direct.close()
        for way in self._fallbacks:
            way.close()

    def _read_otherwise(
        self, location: Location, reads: Sequence[Read], deadline: Deadline
    ) -> Served:
        served, failures = self._try_each_way(location, reads, deadline)
        if served is None and _is_of_replicas(failures):
            served = self._serve_or_find_damage(location, reads, deadline, failures)
        if served is not None:
            return served
        self._directness.forget()
        failures = failures or [
            self._why_not_direct or StoreUnavailable(f"{location.path}: no way to read it")
        ]
        raise copy(_most_telling(failures))

    def _serve_or_find_damage(
        self,
        location: Location,
        reads: Sequence[Read],
        deadline: Deadline,
        failures: list[YardError],
    ) -> Served | None:
        """Raises ReplicasDamaged if DataNodes answer but do not serve; None: they may be away."""
        found = self._find_damage(location, reads, deadline)
        if found is None:
            return None
        # Try once more: a failure that has passed by now looks the same, while damage stays. A
        # failure because time is up proves nothing.
        try:
            served, again = self._try_each_way(location, reads, deadline)
            if served is None:
                deadline.left(f"reading {location.path} again")
        except DeadlineExceeded:
            return None
        if served is None and _is_of_replicas(again):
            raise ReplicasDamaged(f"{found} ({_most_telling(failures)})")
        return served

    def _try_each_way(
        self, location: Location, reads: Sequence[Read], deadline: Deadline
    ) -> tuple[Served | None, list[YardError]]:
        """Read by the first way that serves. Also returns the errors of those before it."""
        failures: list[YardError] = []
        for way in self._fallbacks:
            try:
                way.read(location, reads, deadline)
            except Unsupported as why:
                _log.debug("read.way_closed", way=way.path, reason=why)
                failures.append(copy(why))
            except (StoreUnavailable, StaleLocation, NotAllowed) as why:
                _log.warning("read.way_failed", way=way.path, reason=why)
                failures.append(copy(why))
            except DeadlineExceeded as why:
                if not failures:
                    raise
                # What used the time up tells more than what was begun last.
                raise DeadlineExceeded(f"{why}; before: {_most_telling(failures)}") from None
            else:
                return Served(way.path), failures
        return None, failures


def _is_of_replicas(failures: Sequence[YardError]) -> bool:
    """Whether every way that works here got as far as the replicas, but none served."""
    tried = [why for why in failures if not isinstance(why, Unsupported)]
    return bool(tried) and all(isinstance(why, NoneServed | StaleLocation) for why in tried)


def _most_telling(failures: Sequence[YardError]) -> YardError:
    """What to raise: that a file is shorter than it was, else the error of the last way that works.

    Not every way notices a shorter file, and a caller that is told so locates it again.
    """

    def weight(why: YardError) -> int:
        return 2 if isinstance(why, StaleLocation) else not isinstance(why, Unsupported)

    return max(reversed(failures), key=weight)


class Directness:
    """What is known of whether direct reads work here. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: bool | None = None
        self._tried_at = 0.0
        self._failed: set[str] = set()

    @property
    def is_proven(self) -> bool:
        return self._works is True

    def may_be_tried(self) -> bool:
        """True unless they are known not to work; then once a minute."""
        with self._lock:
            if self._works is not False:
                return True
            now = time.monotonic()
            is_due = now > self._tried_at + _RECHECK_S
            if is_due:
                self._tried_at = now  # others do not wait for the outcome
            return is_due

    def answered(self) -> None:
        """A DataNode answered, whatever it said: so direct reads work."""
        if not self.is_proven:
            with self._lock:
                self._works = True
                self._failed.clear()

    def failed(self, datanode: str) -> None:
        if not self.is_proven:
            with self._lock:
                self._failed.add(datanode)

    def is_refuted_by(self, holders: Set[str]) -> bool:
        """Whether all these DataNodes failed, and none ever answered."""
        with self._lock:
            return self._works is not True and holders <= self._failed

    def refuted(self) -> None:
        """All DataNodes that one read asked failed; but another read may have had an answer."""
        with self._lock:
            if self._works is not True:
                self._works, self._tried_at = False, time.monotonic()

    def forget(self) -> None:
        with self._lock:
            self._works = None


@dataclass(frozen=True, slots=True)
class _Asking:
    """One direct read: asks DataNodes, and notes whether they answer."""

    direct: DataNodeReader
    directness: Directness
    deadline: Deadline

    def read(self, location: Location, pieces: Sequence[Piece], replica: Replica | None) -> Served:
        served: list[Replica] = []
        failed: set[str] = set()
        for piece in pieces:
            if replica is None:
                served.append(self._read_from_any(location, piece, failed))
                continue
            if all(one.datanode != replica.datanode for one in piece.span.replicas):
                raise DataNodeFailed(replica.datanode, f"holds no replica of {location.path}")
            self._ask(replica, piece)
            served.append(replica)
        return Served(ReadPath.DIRECT, one_of(served) or replica)

    def is_refuted_by(self, why: DataNodeFailed, pieces: Sequence[Piece]) -> bool:
        """Whether a replica's failure shows that direct reads do not work here.

        They do not if all DataNodes that have these pieces failed. The others are asked only if
        this one hung up, as those do that want SASL: that took no time. If it was silent, a caller
        that named it must hear of that soon.
        """
        if self.directness.is_proven:
            return False
        spans = {one.datanode: (one, piece.span) for piece in pieces for one in piece.span.replicas}
        others = [it for datanode, it in spans.items() if datanode != why.datanode]
        for other, span in others if isinstance(why, HungUp) else ():
            one_byte = Read(span.offset, memoryview(bytearray(1)))
            with suppress(DataNodeFailed, StaleLocation):
                self._ask(other, Piece(span, (one_byte,)))
            if self.directness.is_proven:
                return False
        return self.directness.is_refuted_by(spans.keys())

    def _read_from_any(self, location: Location, piece: Piece, failed: set[str]) -> Replica:
        """Ask the replicas in their order, but last those that failed or are not in order."""

        def is_doubtful(replica: Replica) -> bool:
            return replica.datanode in failed or replica.state != "normal"

        # If no DataNode had the block when it was located, one may have it by now.
        why: YardError = StaleLocation(f"{location.path}: no DataNode had it when it was located")
        for replica in sorted(piece.span.replicas, key=is_doubtful):
            try:
                self._ask(replica, piece)
            except (DataNodeFailed, StaleLocation) as this:
                # Where direct reads cannot work, this is how that is found out.
                log = _log.warning if self.directness.is_proven else _log.info
                log("read.replica_failed", datanode=replica.datanode, reason=this)
                failed.add(replica.datanode)
                why = copy(this)
            else:
                return replica
        raise copy(why)

    def _ask(self, replica: Replica, piece: Piece) -> None:
        try:
            self.direct.read(replica, piece.span, piece.reads, self.deadline)
        except DataNodeFailed:
            self.directness.failed(replica.datanode)
            raise
        except StaleLocation:
            self.directness.answered()
            raise
        self.directness.answered()
