"""Which way bytes come: directly where that works, else by the first other way that does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

from weightyard.errors import (
    DataNodeFailed,
    NotAllowed,
    StaleLocation,
    StoreUnavailable,
    TooLarge,
    Unsupported,
    YardError,
)
from weightyard.logs import Log
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.storage.hdfs.fallbacks import Fallback
from weightyard.storage.store import Location, Read, ReadPath, Replica, Served, Span

_log = Log(__name__)

_RECHECK_S = 60.0


@dataclass(frozen=True, slots=True)
class Piece:
    """The reads that lie in one span."""

    span: Span
    reads: tuple[Read, ...]


class Reading:
    """Reads by the ways given. Thread-safe.

    Whether direct reads work is found out at the first one: a byte is asked of the replicas until
    one serves it. From then on a DataNode that fails is a DataNode that failed, until all that have
    a block did. If none serves, and another way does, that one is used, and direct reads are tried
    again: after a minute if there was none yet.

    An error that is kept is a copy, and what is raised is a copy of that: one that was raised has
    the frames it passed, and they have the caller's buffers.
    """

    def __init__(
        self,
        direct: DataNodeReader | None,
        fallbacks: Sequence[Fallback],
        why_not_direct: YardError | None = None,
    ) -> None:
        self._direct = direct
        self._fallbacks = list(fallbacks)
        self._works: bool | None = None if direct is not None else False
        self._checked_at = 0.0
        self._why_not_direct = why_not_direct
        self._lock = threading.Lock()

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        replica: Replica | None,
        deadline: Deadline,
    ) -> Served:
        pieces = list(split(location, reads))
        if self._direct is not None and self._can_be_direct(pieces, replica, deadline):
            try:
                return _read_directly(self._direct, location, pieces, replica, deadline)
            except DataNodeFailed as why:
                if replica is not None or not self._fallbacks:
                    raise
                try:
                    return self._read_otherwise(location, reads, deadline)
                except YardError:
                    raise why from None
        return self._read_otherwise(location, reads, deadline)

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        for way in self._fallbacks:
            way.close()

    def _can_be_direct(
        self, pieces: Sequence[Piece], replica: Replica | None, deadline: Deadline
    ) -> bool:
        if any(piece.span.access is None for piece in pieces):
            return False
        with self._lock:
            is_old = time.monotonic() > self._checked_at + _RECHECK_S
            if pieces and (self._works is None or (self._works is False and is_old)):
                self._works = self._try_directly(pieces[0].span, replica, deadline)
                self._checked_at = time.monotonic()
            return self._works is not False

    def _try_directly(self, span: Span, first: Replica | None, deadline: Deadline) -> bool | None:
        if self._direct is None or not span.replicas:
            return None
        for replica in sorted(span.replicas, key=lambda one: one != first):
            try:
                one_byte = Read(span.offset, memoryview(bytearray(1)))
                self._direct.read(replica, span, [one_byte], deadline)
            except StaleLocation:
                return True  # it answered, and the read to come will say the same
            except DataNodeFailed as why:
                _log.info("read.not_direct", datanode=replica.datanode, reason=why.reason)
                self._why_not_direct = copy(why)
            else:
                return True
        return False

    def _read_otherwise(
        self, location: Location, reads: Sequence[Read], deadline: Deadline
    ) -> Served:
        failed = self._why_not_direct or StoreUnavailable(f"{location.path}: no way to read it")
        for way in list(self._fallbacks):
            try:
                way.read(location, reads, deadline)
            except Unsupported as why:
                _log.debug("read.way_closed", way=way.path, reason=why)
                failed = copy(why)
            except (StoreUnavailable, NotAllowed) as why:
                _log.warning("read.way_failed", way=way.path, reason=why)
                failed = copy(why)
            else:
                return Served(way.path)
        with self._lock:
            self._works = None if self._direct is not None else False
        raise copy(failed)


def split(location: Location, reads: Sequence[Read]) -> Iterator[Piece]:
    """Sort reads by the spans they lie in, cutting those that lie in several."""
    by_span: dict[int, list[Read]] = {}
    for read in reads:
        length = len(read.into)
        if read.offset < 0 or read.offset + length > location.length:
            raise TooLarge(
                f"{location.path}: a read of {length} bytes at {read.offset} is past its "
                f"{location.length} bytes"
            )
        for index, span in enumerate(location.spans):
            start = max(read.offset, span.offset)
            end = min(read.offset + length, span.offset + span.length)
            if start < end:
                part = Read(start, read.into[start - read.offset : end - read.offset])
                by_span.setdefault(index, []).append(part)
    for index, parts in sorted(by_span.items()):
        yield Piece(location.spans[index], tuple(parts))


def _read_directly(
    direct: DataNodeReader,
    location: Location,
    pieces: Sequence[Piece],
    replica: Replica | None,
    deadline: Deadline,
) -> Served:
    served: list[Replica] = []
    failed: set[str] = set()
    for piece in pieces:
        if replica is None:
            served.append(_read_from_any(direct, location, piece, failed, deadline))
            continue
        if all(one.datanode != replica.datanode for one in piece.span.replicas):
            raise DataNodeFailed(replica.datanode, f"holds no replica of {location.path}")
        direct.read(replica, piece.span, piece.reads, deadline)
        served.append(replica)
    is_one = all(one == served[0] for one in served)
    return Served(ReadPath.DIRECT, served[0] if served and is_one else replica)


def _read_from_any(
    direct: DataNodeReader,
    location: Location,
    piece: Piece,
    failed: set[str],
    deadline: Deadline,
) -> Replica:
    """Ask the replicas in their order, those that failed or are not well at last."""

    def is_doubtful(replica: Replica) -> bool:
        return replica.datanode in failed or replica.state != "normal"

    why: YardError = StoreUnavailable(f"{location.path}: no DataNode has it")
    for replica in sorted(piece.span.replicas, key=is_doubtful):
        try:
            direct.read(replica, piece.span, piece.reads, deadline)
        except (DataNodeFailed, StaleLocation) as this:
            _log.warning("read.replica_failed", datanode=replica.datanode, reason=this)
            failed.add(replica.datanode)
            why = copy(this)
        else:
            return replica
    raise copy(why)
