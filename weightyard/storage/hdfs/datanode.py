"""Direct reads: HDFS blocks from a chosen DataNode, received in the caller's own memory.

Why this is written by hand: docs/design/0003-direct-reads.md.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightyard.errors import (
    DataNodeFailed,
    StaleLocation,
    TooLarge,
    Unsupported,
)
from weightyard.storage.cancel import ended_by
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs import sockets, wire
from weightyard.storage.hdfs.lookup import Lookup
from weightyard.storage.hdfs.protobuf import Malformed, parse_varint
from weightyard.storage.hdfs.wire import BlockAccess, Status
from weightyard.storage.store import Read, Replica, Span

STALL_S = 1.5
"""A DataNode that sends nothing for this long has failed, whatever the deadline. The time for
looking up its name and connecting counts too."""

GAP_BYTES = 64 * 1024
"""Reads this near to each other become one request: skipping is cheaper than asking again."""

_IDLE_S = 3.0  # A DataNode closes a connection after 4 s without a request.
_MOST_IDLE = 64
_STALE_SIGNS = ("ReplicaNotFoundException", "gen stamp <")


class HungUp(DataNodeFailed):
    """It ended a new connection instead of answering, as it does if it wants SASL."""


@dataclass(frozen=True, slots=True)
class Run:
    """One request: neighbouring reads of one block, and where their bytes go."""

    offset: int
    """In the block."""
    length: int
    targets: tuple[memoryview, ...]
    """Together as long as the run; bytes between reads go into a buffer for rubbish."""


class DataNodeReader:
    """Reads from DataNodes and keeps their connections for the next read. Thread-safe.

    Each call uses its caller's thread; only names are looked up in others. `connects` counts the
    connections opened.
    """

    def __init__(self, client: str, *, stall_s: float = STALL_S) -> None:
        self.connects = 0
        self._client = client
        self._stall_s = stall_s
        self._idle: deque[_Connection] = deque()  # the longest idle first
        self._is_closed = False
        self._lock = threading.Lock()
        self._rubbish = memoryview(bytearray(GAP_BYTES))
        self._lookup = Lookup()

    def read(self, replica: Replica, span: Span, reads: Sequence[Read], deadline: Deadline) -> None:
        """Fill every buffer from one replica of one span.

        Raises DataNodeFailed, StaleLocation, DeadlineExceeded, TooLarge, Unsupported (the location
        does not say which HDFS block it is).
        """
        if not isinstance(span.access, BlockAccess):
            raise Unsupported("a direct read needs a location with block ids")
        for run in plan_runs(span, reads, self._rubbish):
            self._read_run(replica.datanode, span.access, run, deadline)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True  # so reads under way close their connections at the end
            ended, self._idle = self._idle, deque()
        for connection in ended:
            connection.close()
        self._lookup.close()

    def _read_run(self, datanode: str, block: BlockAccess, run: Run, deadline: Deadline) -> None:
        connection = self._reuse(datanode)
        if connection is not None:
            try:
                return self._read_on(connection, block, run, deadline)
            except _ClosedBeforeAnswer:
                pass  # The DataNode tired of waiting for a request just as we sent one.
        connection = self._connect(datanode, deadline)
        try:
            self._read_on(connection, block, run, deadline)
        except _ClosedBeforeAnswer:
            raise HungUp(
                datanode, "closed the connection without an answer; it may want SASL or encryption"
            ) from None

    def _read_on(
        self, connection: _Connection, block: BlockAccess, run: Run, deadline: Deadline
    ) -> None:
        cancel, doing = deadline.cancel, f"reading from DataNode {connection.datanode}"
        try:
            with ended_by(cancel, connection.shut_down, doing):
                connection.read(block, self._client, run, self._rubbish, deadline)
        except BaseException:
            connection.close()
            if cancel is not None:
                cancel.check(doing)
            raise
        if cancel is not None and cancel.is_cancelled:
            connection.close()  # It may have been shut down after the last byte came.
        else:
            self._keep(connection)

    def _connect(self, datanode: str, deadline: Deadline) -> _Connection:
        doing, began_at = f"connecting to DataNode {datanode}", time.monotonic()
        addresses = self._lookup.addresses(datanode, deadline.left_at_most(self._stall_s, doing))
        until = min(began_at + self._stall_s, deadline.at)
        with self._lock:
            self.connects += 1
        try:
            opened = sockets.connected(datanode, addresses, until, deadline.cancel)
        except OSError as why:
            raise DataNodeFailed(datanode, f"cannot connect: {why}") from why
        return _Connection(datanode, opened, self._stall_s, began_at)

    def _reuse(self, datanode: str) -> _Connection | None:
        with self._lock:
            ended = self._take_ended()
            found = next((one for one in reversed(self._idle) if one.datanode == datanode), None)
            if found is not None:
                self._idle.remove(found)
                found.progress_at = time.monotonic()
        for connection in ended:
            connection.close()
        return found

    def _keep(self, connection: _Connection) -> None:
        connection.idle_since = time.monotonic()
        with self._lock:
            self._idle.append(connection)
            ended = self._take_ended()
        for connection in ended:
            connection.close()

    def _take_ended(self) -> list[_Connection]:
        """Take out connections that DataNodes have closed by now, and the oldest of too many."""
        ended = []
        newest_to_end = time.monotonic() - _IDLE_S
        most_idle = 0 if self._is_closed else _MOST_IDLE
        while self._idle and (
            len(self._idle) > most_idle or self._idle[0].idle_since < newest_to_end
        ):
            ended.append(self._idle.popleft())
        return ended


def plan_runs(span: Span, reads: Sequence[Read], rubbish: memoryview) -> Iterator[Run]:
    """Put reads of one span together into as few requests as make sense."""
    start = end = -1
    targets: list[memoryview] = []
    for read in sorted(reads, key=lambda read: read.offset):
        offset, length = read.offset - span.offset, len(read.into)
        if not 0 <= offset <= offset + length <= span.length:
            raise TooLarge(f"a read of {length} bytes at {read.offset} is not inside its span")
        if not length:
            continue
        gap = offset - end
        if targets and 0 <= gap <= len(rubbish):
            if gap:
                targets.append(rubbish[:gap])
        else:
            if targets:
                yield Run(start, end - start, tuple(targets))
            start, targets = offset, []
        targets.append(read.into)
        end = offset + length
    if targets:
        yield Run(start, end - start, tuple(targets))


class _ClosedBeforeAnswer(Exception):
    """The DataNode hung up before the first byte of its answer."""


class _Connection:
    """A socket to one DataNode, on which reads follow each other.

    The socket stays in blocking mode with the kernel's own receive time-out: a socket with a
    Python time-out is non-blocking inside, and MSG_WAITALL does not wait on those.
    """

    def __init__(
        self, datanode: str, opened: socket.socket, stall_s: float, progress_at: float
    ) -> None:
        self.datanode = datanode
        self.idle_since = 0.0
        self.progress_at = progress_at
        """When bytes came last, or when waiting for them began."""
        self._doing = f"reading from DataNode {datanode}"
        self._stall_s = stall_s
        self._socket = opened

    def close(self) -> None:
        self._socket.close()

    def shut_down(self) -> None:
        """End the read that is under way in another thread: its receive returns at once."""
        sockets.shut_down(self._socket)

    def read(
        self, block: BlockAccess, client: str, run: Run, rubbish: memoryview, deadline: Deadline
    ) -> None:
        """Fill a run. After an error the connection is of no more use."""
        try:
            first_offset = self._ask(block, client, run, deadline)
            skipped = run.offset - first_offset
            if not 0 <= skipped < wire.CHUNK_BYTES:
                raise Malformed(f"data from offset {first_offset} for a read at {run.offset}")
            rest = wire.CHUNK_BYTES - 1
            targets = deque((rubbish[:skipped], *run.targets, rubbish[:rest]))
            end = self._receive_packets(first_offset, targets, deadline)
            if end < run.offset + run.length:
                raise Malformed(f"data ended at {end}")
            self._socket.sendall(wire.read_done())
        except Malformed as why:
            raise DataNodeFailed(self.datanode, f"{block}: {why}") from why
        except OSError as why:
            raise DataNodeFailed(self.datanode, f"{block}: {why}") from why

    def _ask(self, block: BlockAccess, client: str, run: Run, deadline: Deadline) -> int:
        """Send the request; return the offset at which the data will begin."""
        try:
            self._socket.sendall(wire.read_request(block, client, run.offset, run.length))
            length = self._receive_varint(deadline)
        except (ConnectionError, _Ended):
            raise _ClosedBeforeAnswer from None
        if length > wire.MAX_RESPONSE_BYTES:
            raise Malformed(f"an answer of {length} bytes")
        message = bytearray(length)
        self._fill([memoryview(message)], deadline)
        response = wire.parse_response(bytes(message))
        if response.status != Status.SUCCESS:
            raise self._refusal(block, response)
        if response.checksum_type != 0:
            raise Malformed("checksums, which were not asked for")
        return response.first_offset

    def _receive_varint(self, deadline: Deadline) -> int:
        prefix = bytearray()
        byte = bytearray(1)
        while not prefix or (prefix[-1] & 0x80 and len(prefix) < 10):
            self._fill([memoryview(byte)], deadline)
            prefix += byte
        return parse_varint(bytes(prefix), 0)[0]

    def _refusal(self, block: BlockAccess, response: wire.Response) -> Exception:
        said = f"status {response.status} {response.message[:300]}".rstrip()
        if response.status == Status.ERROR_ACCESS_TOKEN:
            return StaleLocation(f"DataNode {self.datanode} refused the token of {block}: {said}")
        if any(sign in response.message for sign in _STALE_SIGNS):
            return StaleLocation(f"DataNode {self.datanode} no longer has {block}: {said}")
        return DataNodeFailed(self.datanode, f"{block}: {said}")

    def _receive_packets(self, offset: int, targets: deque[memoryview], deadline: Deadline) -> int:
        """Receive packets into the targets, one after the other; return where the data ended."""
        header = bytearray(wire.PACKET_HEADER_BYTES)
        header_view = memoryview(header)
        self._fill([header_view], deadline)
        sequence = 0
        while True:
            if more := wire.parse_packet_lengths(header):
                self._fill([memoryview(bytearray(more))], deadline)
            packet = wire.parse_packet(header)
            if packet.offset != offset or packet.sequence != sequence:
                raise Malformed(f"packet {packet.sequence} for offset {packet.offset}")
            if packet.is_last:
                return offset
            views = _take(targets, packet.data_bytes)
            # Every packet is followed by another one, so its header comes with the same call.
            views.append(header_view)
            self._fill(views, deadline)
            offset += packet.data_bytes
            sequence += 1

    def _fill(self, views: list[memoryview], deadline: Deadline) -> None:
        """Receive until every view is full."""
        wanted = sum(map(len, views))
        while wanted:
            got = self._receive_some(views[: sockets.MOST_VIEWS], deadline)
            wanted -= got
            if wanted:
                sockets.drop(views, got)

    def _receive_some(self, views: list[memoryview], deadline: Deadline) -> int:
        """Receive into the views, all of them unless the DataNode is slow."""
        while True:
            deadline.left(self._doing)
            try:
                got = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                silent_s = time.monotonic() - self.progress_at
                if silent_s >= self._stall_s:
                    raise DataNodeFailed(
                        self.datanode, f"sent nothing for {silent_s:.1f} s"
                    ) from None
                continue
            if not got:
                raise _Ended
            self.progress_at = time.monotonic()
            return got


class _Ended(OSError):
    """The DataNode closed the connection in the middle."""

    def __str__(self) -> str:
        return "closed the connection in the middle"


def _take(targets: deque[memoryview], wanted: int) -> list[memoryview]:
    """The next bytes of the targets, as views."""
    views = []
    while wanted:
        if not targets:
            raise Malformed("more data than was asked for")
        view = targets.popleft()
        if len(view) > wanted:
            targets.appendleft(view[wanted:])
            view = view[:wanted]
        views.append(view)
        wanted -= len(view)
    return views
