"""Short-circuit reads: a DataNode of this host hands out the file of a replica, which is read here.

The DataNode listens on a UNIX socket. It looks at a caller's block token, and passes the open file
on; no byte of data goes through the DataNode, nor through any network. On a UNIX socket it wants
neither SASL nor encryption, so this works even where network reads in the clear do not.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from weightyard.errors import DataNodeFailed, YardError
from weightyard.logs import Log
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs import wire
from weightyard.storage.hdfs.lookup import Lookup
from weightyard.storage.hdfs.pieces import Piece, one_of
from weightyard.storage.hdfs.protobuf import Malformed, parse_varint
from weightyard.storage.hdfs.wire import BlockAccess, Status
from weightyard.storage.store import ReadPath, Replica, Served

_log = Log(__name__)

_ANSWER_S = 0.4
"""The DataNode runs on this host: if it is silent for longer, the network will not help either."""

_AGAIN_S = 60.0
"""For how long a DataNode that hands out nothing is not asked again."""

_MOST_FILES = 8
"""How many replicas are kept open for the next read. If one is deleted meanwhile, its disk space
becomes free only when it is closed here: so they are few."""

_STEP_BYTES = 4 * 1024 * 1024
"""How much is read at once: the deadline is looked at between two steps."""


_PASSED = 2
"""Files that come with an answer: the data, and HDFS's checksums of it."""


class ShortCircuit:
    """Reads replicas of DataNodes of this host from their files. Thread-safe.

    It never stands in the way of other reads: if it does not serve, it returns None.
    """

    def __init__(self, socket_path: str) -> None:
        """`socket_path` as in dfs.domain.socket.path: `_PORT` stands for a DataNode's port."""
        self._socket_path = socket_path
        self._lookup = Lookup()
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[str, str, int, int], _ReplicaFile] = OrderedDict()
        self._not_before: dict[str, float] = {}
        self._is_closed = False

    def read(
        self, pieces: Sequence[Piece], replica: Replica | None, deadline: Deadline
    ) -> Served | None:
        """Fill every buffer, from this replica or any on this host; None: that is not possible.

        The buffers' content is then undefined. Raises DeadlineExceeded, Cancelled.
        """
        served: list[Replica] = []
        for piece in pieces:
            one = self._here(piece, replica, deadline)
            if one is None or not self._read(one, piece, deadline):
                return None
            served.append(one)
        return Served(ReadPath.SHORT_CIRCUIT, one_of(served)) if served else None

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._files.clear()
        self._lookup.close()

    def _here(self, piece: Piece, replica: Replica | None, deadline: Deadline) -> Replica | None:
        """The replica that can be read here."""
        held = piece.span.replicas
        for one in held if replica is None else (replica,):
            if not self._may_be_asked(one.datanode) or one not in held:
                continue
            limit_s = deadline.left_at_most(_ANSWER_S, f"looking up {one.datanode}")
            try:
                if self._lookup.is_here(one.datanode, limit_s):
                    return one
            except DataNodeFailed:
                continue  # reading it over the network will say so
        return None

    def _read(self, replica: Replica, piece: Piece, deadline: Deadline) -> bool:
        datanode, block = replica.datanode, piece.span.access
        if not isinstance(block, BlockAccess):
            return False
        try:
            file = self._file(datanode, block, deadline)
            for read in piece.reads:
                file.fill(read.offset - piece.span.offset, read.into, deadline)
        except (_NotHandedOut, OSError, Malformed) as why:
            _log.info("read.not_short_circuit", datanode=datanode, block=block, reason=why)
            # If only this block's token has expired, the DataNode still hands out others.
            self._forget(datanode, block, is_for_all=not isinstance(why, _NotThisOne))
            return False
        return True

    def _may_be_asked(self, datanode: str) -> bool:
        with self._lock:
            return time.monotonic() >= self._not_before.get(datanode, 0.0)

    def _forget(self, datanode: str, block: BlockAccess, *, is_for_all: bool) -> None:
        with self._lock:
            self._files.pop(_key(datanode, block), None)
            if is_for_all:
                self._not_before[datanode] = time.monotonic() + _AGAIN_S

    def _file(self, datanode: str, block: BlockAccess, deadline: Deadline) -> _ReplicaFile:
        key = _key(datanode, block)
        with self._lock:
            if (known := self._files.get(key)) is not None:
                self._files.move_to_end(key)
                return known
        file = self._ask(datanode, block, deadline)
        with self._lock:
            file = self._files.setdefault(key, file)  # another thread may have asked too
            while len(self._files) > (0 if self._is_closed else _MOST_FILES):
                self._files.popitem(last=False)
        return file

    def _ask(self, datanode: str, block: BlockAccess, deadline: Deadline) -> _ReplicaFile:
        """Raises _NotHandedOut, OSError, Malformed."""
        where = self._socket_path.replace("_PORT", datanode.rpartition(":")[2])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(deadline.left_at_most(_ANSWER_S, f"asking {where}"))
            asked.connect(where)
            asked.sendall(wire.descriptors_request(block))
            response = wire.parse_response(_receive_message(asked))
            if response.status != Status.SUCCESS:
                is_for_all = response.status == Status.ERROR_UNSUPPORTED
                kind = _NotHandedOut if is_for_all else _NotThisOne
                raise kind(f"status {response.status} {response.message[:300]}".rstrip())
            _, descriptors, _, _ = socket.recv_fds(asked, 1, _PASSED, socket.MSG_CMSG_CLOEXEC)
        for other in descriptors[1:]:
            os.close(other)  # HDFS's own checksums: packs have theirs
        if not descriptors:
            raise _NotHandedOut("no file came with the answer")
        return _ReplicaFile(descriptors[0])


class _NotHandedOut(YardError):
    """A DataNode did not pass the file of a replica."""


class _NotThisOne(_NotHandedOut):
    """It may still pass other files: only this token has expired, or this replica is gone."""


@dataclass(slots=True)
class _ReplicaFile:
    """An open file, closed when its last reader lets go."""

    descriptor: int

    def fill(self, offset: int, into: memoryview, deadline: Deadline) -> None:
        """Raises OSError, _NotThisOne where the file ends too soon; DeadlineExceeded, Cancelled."""
        while into:
            deadline.left("reading a replica's file")
            got = os.preadv(self.descriptor, [into[:_STEP_BYTES]], offset)
            if not got:
                raise _NotThisOne(f"the replica ends at {offset}")
            offset += got
            into = into[got:]

    def __del__(self) -> None:
        os.close(self.descriptor)


def _key(datanode: str, block: BlockAccess) -> tuple[str, str, int, int]:
    return datanode, block.pool, block.block, block.generation


def _receive_message(asked: socket.socket) -> bytes:
    """One message with its length before it, and not a byte more: files come with the next one."""
    prefix = b""
    while not prefix or (prefix[-1] & 0x80 and len(prefix) < 10):
        prefix += _receive(asked, 1)
    length, _ = parse_varint(prefix, 0)
    if length > wire.MAX_RESPONSE_BYTES:
        raise Malformed(f"an answer of {length} bytes")
    return _receive(asked, length)


def _receive(asked: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        some = asked.recv(length - len(received))
        if not some:
            raise _NotHandedOut("it hung up")
        received += some
    return received
