"""Writing one HDFS block: packets go to the first of its DataNodes, acknowledgements come from all.

Why this is written by hand: docs/design/0010-direct-writes.md.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from crc32c import crc32c

from weightyard.errors import DataNodeFailed
from weightyard.storage.hdfs import sockets, wire
from weightyard.storage.hdfs.lookup import Lookup
from weightyard.storage.hdfs.new_files import NewBlock, Target
from weightyard.storage.hdfs.protobuf import Malformed, parse_varint
from weightyard.storage.hdfs.wire import BlockAccess, Packet, Status

PACKET_BYTES = 512 * 1024
"""How much is sent, forwarded and acknowledged at once. HDFS's own clients send 64 KiB."""

CHECKSUM_BYTES = 16 * 1024
"""Bytes per checksum. HDFS's own clients take 512: too few for one call from Python each."""

_WINDOW = 8  # Packets on their way: DataNodes pass on, write and check at the same time.
_CONNECT_S = 3.0
_KNOCK_S = 1.0
_BEAT_S = 15.0
_HEARTBEAT = -1
_MAX_MESSAGE_BYTES = 64 * 1024


class BadDataNode(DataNodeFailed):
    """A DataNode did not take its copy of a block. `targets`: those to leave out next time."""

    def __init__(self, targets: tuple[Target, ...], reason: str) -> None:
        super().__init__(", ".join(one.datanode for one in targets), reason)
        self.targets = targets


class WantsNoWriter(BadDataNode):
    """It hung up on a request to write, as it does if it wants SASL."""


class Pipeline:
    """Writes a block's bytes in order, in its caller's thread.

    Call order: write … write → finish, or close at any time; `beat` from another thread. Raises
    BadDataNode, after which the block is of no use.
    """

    def __init__(self, block: NewBlock, client: str, lookup: Lookup, *, stall_s: float) -> None:
        self.taken = 0
        """How many bytes it was given."""
        self._block = block
        self._targets = block.targets
        self._lookup = lookup
        self._stall_s = stall_s
        self._lock = threading.Lock()  # who sends
        self._tail = bytearray()  # less than one checksum covers: waits for more
        self._offset = self._sequence = self._acknowledged = 0
        self._received = bytearray()
        self._progress_at = time.monotonic()
        self._socket = _connected(block.targets[0], lookup, _CONNECT_S)
        try:
            self._begin(client)
        except BaseException:
            self._socket.close()
            raise

    def write(self, data: memoryview) -> None:
        """Send bytes, but for a few that are copied: then the memory is the caller's again."""
        self.taken += len(data)
        head = b""
        if self._tail:
            missing = CHECKSUM_BYTES - len(self._tail)
            self._tail += data[:missing]
            data = data[missing:]
            if len(self._tail) < CHECKSUM_BYTES:
                return
            head = bytes(self._tail)
        whole = len(data) - len(data) % CHECKSUM_BYTES
        position = 0
        with self._sending():
            while head or position < whole:
                end = min(whole, position + PACKET_BYTES - len(head))
                self._send_data(head, data[position:end])
                head, position = b"", end
        self._tail = bytearray(data[whole:])

    def finish(self) -> BlockAccess:
        """Wait until every DataNode has all of the block. Returns it with its length."""
        with self._sending():
            if self._tail:
                self._send_data(bytes(self._tail), memoryview(b""))
            self._send(Packet(self._offset, self._sequence, True, 0))
            self._sequence += 1
            while self._acknowledged < self._sequence:
                self._take_acks()
            self._socket.close()
        return replace(self._block.access, length=self._offset)

    def beat(self) -> None:
        """Say that more will come: DataNodes give up a writer that is silent for a minute.

        Errors are left for the next write to find.
        """
        if self._lock.acquire(blocking=False):  # else it is being written
            try:
                if time.monotonic() - self._progress_at > _BEAT_S:
                    with suppress(BadDataNode, Malformed, OSError):
                        self._send(Packet(0, _HEARTBEAT, False, 0))
            finally:
                self._lock.release()

    def close(self) -> None:
        self._socket.close()

    def _begin(self, client: str) -> None:
        block = self._block.access
        request = wire.write_request(block, client, self._targets, CHECKSUM_BYTES)
        try:
            self._send_all([memoryview(request)])
            while (message := self._next_message()) is None:
                self._receive()
        except _HungUp as why:
            raise WantsNoWriter(self._targets[:1], "hung up instead of answering") from why
        response = wire.parse_response(message)
        if response.status != Status.SUCCESS:
            named = [one for one in self._targets if response.bad_datanode in one.names]
            said = f"status {response.status} {response.message[:300]}".rstrip()
            raise BadDataNode(tuple(named) or self._targets[:1], f"does not take {block}: {said}")

    def _send_data(self, head: bytes, body: memoryview) -> None:
        """Send a packet: bytes for whole checksums, except at the end of the block."""
        cuts = range(0, len(body), CHECKSUM_BYTES)
        sums = [crc32c(head)] if head else []
        sums += [crc32c(body[cut : cut + CHECKSUM_BYTES]) for cut in cuts]
        while self._sequence - self._acknowledged >= _WINDOW:
            self._take_acks()
        packet = Packet(self._offset, self._sequence, False, len(head) + len(body))
        self._send(packet, struct.pack(f">{len(sums)}I", *sums), memoryview(head), body)
        self._offset += packet.data_bytes
        self._sequence += 1

    def _send(self, packet: Packet, sums: bytes = b"", *data: memoryview) -> None:
        header = memoryview(wire.packet_header(packet, len(sums)) + sums)
        try:
            self._send_all([header, *data])
        except _HungUp:
            while True:  # what came before may say which DataNode is to blame
                self._take_acks()

    def _send_all(self, views: list[memoryview]) -> None:
        wanted = sum(map(len, views))
        while wanted:
            try:
                sent = self._socket.sendmsg(views)
            except BlockingIOError:
                self._take_acks(socket.MSG_DONTWAIT)  # it may have said what is wrong
                continue
            except OSError as why:
                raise _HungUp(str(why)) from why
            self._progress_at = time.monotonic()
            wanted -= sent
            if wanted:
                sockets.drop(views, sent)

    def _take_acks(self, flags: int = 0) -> None:
        """Wait for acknowledgements, but no longer than a tick."""
        try:
            self._receive(flags)
        except _HungUp as why:
            raise BadDataNode(self._targets[:1], str(why)) from why
        while (message := self._next_message()) is not None:
            sequence, said = wire.parse_ack(message)
            if any(said):
                failed = [one for one, bad in zip(self._targets, said, strict=False) if bad]
                raise BadDataNode(tuple(failed) or self._targets[:1], f"failed: statuses {said}")
            if sequence == self._acknowledged:
                self._acknowledged += 1
            elif sequence != _HEARTBEAT:
                raise BadDataNode(self._targets[:1], f"acknowledged packet {sequence}")

    def _receive(self, flags: int = 0) -> None:
        """Take what comes. Raises BadDataNode if nothing has come for too long."""
        try:
            part = self._socket.recv(_MAX_MESSAGE_BYTES, flags)
        except BlockingIOError:
            silent_s = time.monotonic() - self._progress_at
            if silent_s >= self._stall_s:
                raise BadDataNode(
                    self._silent(), f"nothing was acknowledged for {silent_s:.1f} s"
                ) from None
            return
        except OSError as why:
            raise _HungUp(str(why)) from why
        if not part:
            raise _HungUp("closed the connection")
        self._progress_at = time.monotonic()
        self._received += part

    def _next_message(self) -> bytes | None:
        """The next message that has come whole; None: there is none."""
        if not any(byte < 0x80 for byte in self._received[:10]):
            if len(self._received) >= 10:
                raise BadDataNode(self._targets[:1], "answered something else")
            return None
        length, start = parse_varint(bytes(self._received[:10]), 0)
        if length > _MAX_MESSAGE_BYTES:
            raise BadDataNode(self._targets[:1], f"an answer of {length} bytes")
        if len(self._received) < start + length:
            return None
        message = bytes(self._received[start : start + length])
        del self._received[: start + length]
        return message

    def _silent(self) -> tuple[Target, ...]:
        """DataNodes that do not hang up when we do: none tells which one behind it is silent."""
        silent = tuple(one for one in self._targets if not _answers(one, self._lookup))
        return silent or self._targets[:1]

    @contextmanager
    def _sending(self) -> Iterator[None]:
        with self._lock:
            self._progress_at = time.monotonic()  # time before this does not count
            try:
                yield
            except Malformed as why:
                raise BadDataNode(self._targets[:1], str(why)) from why


class _HungUp(Exception):
    """The first DataNode ended the connection."""


def _connected(target: Target, lookup: Lookup, limit_s: float) -> socket.socket:
    until = time.monotonic() + limit_s
    try:
        addresses = lookup.addresses(target.datanode, limit_s)
        opened = sockets.connected(target.datanode, addresses, until, None)
    except DataNodeFailed as why:
        raise BadDataNode((target,), why.reason) from why
    except OSError as why:
        raise BadDataNode((target,), f"cannot connect: {why}") from why
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, sockets.TICK)
    return opened


def _answers(target: Target, lookup: Lookup) -> bool:
    """Whether a DataNode ends a connection on which nothing was asked."""
    try:
        with _connected(target, lookup, _KNOCK_S) as opened:
            opened.shutdown(socket.SHUT_WR)
            opened.settimeout(_KNOCK_S)
            return not opened.recv(1)
    except (BadDataNode, OSError):
        return False
