"""Calls to the active NameNode by Hadoop's RPC, on clusters that believe any user name.

Here are the calls that a direct write needs and hdfs-native does not offer; all others go by that,
which knows Kerberos too. Why: docs/design/0010-direct-writes.md.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence

from weightyard.errors import DataNodeFailed, DeadlineExceeded, StoreUnavailable, Unsupported
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs import remote
from weightyard.storage.hdfs.lookup import Lookup
from weightyard.storage.hdfs.protobuf import (
    Malformed,
    bytes_field,
    delimited,
    fields,
    parse_varint,
    signed_field,
    varint_field,
)

_PROTOCOL = b"org.apache.hadoop.hdfs.protocol.ClientProtocol"
_GREETING = b"hrpc" + bytes((9, 0, 0))  # version, class of service, no SASL
_BY_PROTOBUF = 2
_FINAL = 0
_CONNECTING = -3  # the call number of the message that opens a connection
_MAX_ANSWER_BYTES = 1024 * 1024
_MOST_IDLE = 16
_ROUNDS = 2
_LENGTH = struct.Struct(">I")

# Refusals after which a NameNode hangs up for good. It also hangs up when its queue of calls is
# full, with a RetriableException, "Server too busy - disconnecting": then another way is no help.
_NOT_SERVED = frozenset(
    (
        "AccessControlException",
        "AuthorizationException",
        "AuthenticationException",
        "SaslException",
        "InvalidToken",
        "VersionMismatch",
        "RpcNoSuchProtocolException",
        "RpcNoSuchMethodException",
    )
)


class NotServed(Unsupported):
    """The NameNode wants its callers to prove their names, or does not speak this protocol."""


class NameNodeCalls:
    """Calls of ClientProtocol. Thread-safe; each uses its caller's thread and is bounded.

    A call whose answer was lost is repeated with the same number, by which the NameNode, or the one
    that takes over from it, knows that it has made it already.
    """

    def __init__(self, namenodes: Sequence[str], user: str, *, answer_s: float) -> None:
        """`namenodes`: the `host:port` of each."""
        self._namenodes = namenodes
        self._answer_s = answer_s
        self._caller = uuid.uuid4().bytes
        self._greeting = _GREETING + _framed(
            delimited(_header(self._caller, _CONNECTING, -1))
            + delimited(bytes_field(2, bytes_field(1, user.encode())) + bytes_field(3, _PROTOCOL))
        )
        self._numbers = itertools.count()
        self._lookup = Lookup()
        self._lock = threading.Lock()
        self._asked = 0  # which NameNode
        self._idle: deque[_Connection] = deque()
        self._is_closed = False

    def call(self, doing: str, method: str, message: bytes) -> bytes:
        """Make a call. Returns the answer's message.

        Raises what `remote.error` makes of the NameNode's refusal, NotServed, StoreUnavailable.
        """
        deadline, number = Deadline.after(self._answer_s), next(self._numbers)
        what = bytes_field(1, method.encode()) + bytes_field(2, _PROTOCOL) + varint_field(3, 1)
        failed = StoreUnavailable(f"{doing}: no NameNode was asked")
        for attempt in range(_ROUNDS * len(self._namenodes) + 1):
            asked = self._asked
            namenode = self._namenodes[asked]
            header = _header(self._caller, number, attempt)
            request = _framed(delimited(header) + delimited(what) + delimited(message))
            # If this NameNode is silent, those after it in this round keep their share of the time.
            others = len(self._namenodes) - 1 - attempt % len(self._namenodes)
            began, is_over = time.monotonic(), False
            try:
                return self._ask(namenode, number, request, doing, deadline.part(1 / (1 + others)))
            except (DeadlineExceeded, TimeoutError):
                silent_s, is_over = time.monotonic() - began, not others
                failed = StoreUnavailable(
                    f"{doing}: NameNode {namenode}: no answer for {silent_s:.1f} s"
                )
            except remote.NotActive as why:
                failed = why
            except (OSError, Malformed) as why:
                failed = StoreUnavailable(f"{doing}: NameNode {namenode}: {why}")
            self._ask_next(asked)
            if is_over:
                break
        raise failed

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            ended, self._idle = self._idle, deque()
        for connection in ended:
            connection.close()
        self._lookup.close()

    def _ask(
        self, namenode: str, number: int, request: bytes, doing: str, deadline: Deadline
    ) -> bytes:
        connection = self._reuse(namenode) or self._connect(namenode, doing, deadline)
        try:
            refusal, answer = connection.ask(number, request, doing, deadline)
        except BaseException:
            connection.close()
            raise
        self._keep(connection)
        if refusal is not None:
            raise refusal
        return answer

    def _connect(self, namenode: str, doing: str, deadline: Deadline) -> _Connection:
        try:
            addresses = self._lookup.addresses(namenode, deadline.left(doing))
        except DataNodeFailed as why:
            raise OSError(why.reason) from why
        failed: OSError = OSError("it has no address")
        for index, (family, kind, protocol, _, address) in enumerate(addresses):
            opened = socket.socket(family, kind, protocol)
            try:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                opened.settimeout(deadline.left(doing) / (len(addresses) - index))
                opened.connect(address)
                opened.sendall(self._greeting)
            except BaseException as why:
                opened.close()
                if not isinstance(why, OSError):
                    raise
                failed = why
            else:
                return _Connection(namenode, opened)
        raise failed

    def _reuse(self, namenode: str) -> _Connection | None:
        with self._lock:
            found = next((one for one in reversed(self._idle) if one.namenode == namenode), None)
            if found is not None:
                self._idle.remove(found)
        return found

    def _keep(self, connection: _Connection) -> None:
        with self._lock:
            self._idle.append(connection)
            ended = []
            while len(self._idle) > (0 if self._is_closed else _MOST_IDLE):
                ended.append(self._idle.popleft())
        for one in ended:
            one.close()

    def _ask_next(self, asked: int) -> None:
        """Ask another NameNode from now on, and drop idle connections, which may have ended too."""
        with self._lock:
            if self._asked == asked:
                self._asked = (asked + 1) % len(self._namenodes)
            ended, self._idle = self._idle, deque()
        for one in ended:
            one.close()


class _Connection:
    """A socket to a NameNode, on which calls follow each other."""

    def __init__(self, namenode: str, opened: socket.socket) -> None:
        self.namenode = namenode
        self._socket = opened

    def close(self) -> None:
        self._socket.close()

    def ask(
        self, number: int, request: bytes, doing: str, deadline: Deadline
    ) -> tuple[Exception | None, bytes]:
        """The refusal, or None and the answer. After an error the connection is of no more use."""
        self._socket.settimeout(deadline.left(doing))
        self._socket.sendall(request)
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, doing, deadline))
        if length > _MAX_ANSWER_BYTES:
            raise Malformed(f"an answer of {length} bytes")
        return _parse_answer(self._receive(length, doing, deadline), number, doing)

    def _receive(self, wanted: int, doing: str, deadline: Deadline) -> bytes:
        parts = []
        while wanted:
            self._socket.settimeout(deadline.left(doing))
            part = self._socket.recv(wanted)
            if not part:
                raise OSError("closed the connection")
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)


def _parse_answer(frame: bytes, number: int, doing: str) -> tuple[Exception | None, bytes]:
    length, position = parse_varint(frame, 0)
    header = frame[position : position + length]
    answered, status, java_class, message = -1, -1, "", ""
    for field, value in fields(header):
        match field, value:
            case 1, int():
                answered = value
            case 2, int():
                status = value
            case 4, bytes():
                java_class = remote.short_name(value.decode("utf-8", "replace"))
            case 5, bytes():
                message = value.decode("utf-8", "replace")
    if status == 2:  # and it hangs up
        if java_class in _NOT_SERVED:
            raise NotServed(f"{doing}: {remote.first_line(f'{java_class}: {message}')}")
        raise remote.error(doing, java_class, message)
    if answered != number or status not in (0, 1):
        raise Malformed(f"an answer to call {answered} with status {status}")
    if status:
        return remote.error(doing, java_class, message), b""
    length, position = parse_varint(frame, position + len(header))
    return None, frame[position : position + length]


def _header(caller: bytes, number: int, attempt: int) -> bytes:
    return (
        varint_field(1, _BY_PROTOBUF)
        + varint_field(2, _FINAL)
        + signed_field(3, number)
        + bytes_field(4, caller)
        + signed_field(5, attempt)
    )


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body
