"""A NameNode's part in a write: files, their blocks, and on which DataNodes each is to lie."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weightyard.storage.hdfs.protobuf import Malformed, bytes_field, fields, varint_field
from weightyard.storage.hdfs.remote import NotYet
from weightyard.storage.hdfs.rpc import NameNodeCalls
from weightyard.storage.hdfs.wire import BlockAccess, BlockToken, extended_block

_CREATE = 1
_MOST_DATANODES = 512
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.002, 0.2


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a NameNode uses where a client does not say."""

    block_bytes: int
    replication: int
    encrypts_transfers: bool


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file being written, which nobody else may write."""

    path: str
    number: int
    is_plain: bool
    """Whether its blocks are copies of its bytes: not encrypted, not erasure-coded."""


@dataclass(frozen=True, slots=True)
class Target:
    """A DataNode that is to have a copy of a block."""

    datanode: str
    """`host:port`."""
    names: tuple[str, ...]
    """All the names by which other DataNodes may refer to it."""
    described: bytes = field(repr=False)
    """As the NameNode describes it, and wants it described."""
    storage_type: int
    storage: str


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block with nothing in it yet, and its DataNodes, in the order they are to be written."""

    access: BlockAccess
    targets: tuple[Target, ...]


class NewFiles:
    """The calls to a NameNode that writing needs, for one writer. Thread-safe.

    Call order: create → add_block … → complete; abandon takes a block back that was not written.
    They raise what a NameNode refuses, and StoreUnavailable.
    """

    def __init__(self, calls: NameNodeCalls, client: str, *, by_hostname: bool) -> None:
        self._calls = calls
        self._client = bytes_field(2, client.encode())
        self._holder = bytes_field(3, client.encode())
        self._by_hostname = by_hostname

    def defaults(self) -> Defaults:
        answer = self._calls.call("asking for HDFS's defaults", "getServerDefaults", b"")
        said = dict(fields(_message(dict(fields(answer)), 1)))
        return Defaults(_number(said, 1), _number(said, 4), bool(said.get(6, 0)))

    def create(self, path: str, mode: int, replication: int, block_bytes: int) -> NewFile:
        message = (
            bytes_field(1, path.encode())
            + bytes_field(2, varint_field(1, mode))
            + self._holder
            + varint_field(4, _CREATE)
            + varint_field(5, False)  # folders above are made with their own mode
            + varint_field(6, replication)
            + varint_field(7, block_bytes)
        )
        answer = dict(fields(self._calls.call(f"creating {path}", "create", message)))
        status = dict(fields(_message(answer, 1)))
        return NewFile(path, _number(status, 13), is_plain=15 not in status and 17 not in status)

    def add_block(
        self, file: NewFile, previous: BlockAccess | None, excluded: Sequence[Target], until: float
    ) -> NewBlock:
        """The file's next block. `until`: how long to wait for DataNodes to report the last one."""
        message = bytes_field(1, file.path.encode()) + self._client
        if previous is not None:
            message += bytes_field(3, extended_block(previous))
        message += b"".join(bytes_field(4, one.described) for one in excluded)
        message += varint_field(5, file.number)
        doing = f"adding a block to {file.path}"
        for wait_s in _waits():
            try:
                answer = self._calls.call(doing, "addBlock", message)
                return self._parse_block(_message(dict(fields(answer)), 1))
            except NotYet:
                if time.monotonic() + wait_s >= until:
                    raise
                time.sleep(wait_s)
        raise AssertionError("unreachable")

    def abandon(self, file: NewFile, block: BlockAccess) -> None:
        message = (
            bytes_field(1, extended_block(block))
            + bytes_field(2, file.path.encode())
            + self._holder
            + varint_field(4, file.number)
        )
        self._calls.call(f"giving back a block of {file.path}", "abandonBlock", message)

    def delete(self, file: NewFile) -> None:
        message = bytes_field(1, file.path.encode()) + varint_field(2, False)
        self._calls.call(f"deleting {file.path}", "delete", message)

    def complete(self, file: NewFile, last: BlockAccess | None, until: float) -> None:
        """Close the file: from then on it has the length of its blocks and never changes."""
        message = bytes_field(1, file.path.encode()) + self._client
        if last is not None:
            message += bytes_field(3, extended_block(last))
        message += varint_field(4, file.number)
        doing = f"closing {file.path}"
        for wait_s in _waits():
            answer = dict(fields(self._calls.call(doing, "complete", message)))
            if _number(answer, 1):
                return
            if time.monotonic() + wait_s >= until:
                raise NotYet(f"{doing}: too few DataNodes have told of its last block")
            time.sleep(wait_s)

    def _parse_block(self, message: bytes) -> NewBlock:
        described: list[bytes] = []
        types: list[int] = []
        storages: list[str] = []
        block, token = b"", b""
        for number, value in fields(message):
            match number, value:
                case 1, bytes():
                    block = value
                case 3, bytes():
                    described.append(value)
                case 5, bytes():
                    token = value
                case 7, int():
                    types.append(value)
                case 7, bytes():  # several in one field
                    types.extend(value)
                case 8, bytes():
                    storages.append(_text(value))
        if not 0 < len(described) == len(types) == len(storages) <= _MOST_DATANODES:
            raise Malformed(f"a block for {len(described)} DataNodes, {len(storages)} storages")
        targets = tuple(
            self._parse_target(*one) for one in zip(described, types, storages, strict=True)
        )
        return NewBlock(_parse_access(block, token), targets)

    def _parse_target(self, described: bytes, storage_type: int, storage: str) -> Target:
        ids = dict(fields(_message(dict(fields(described)), 1)))
        port = _number(ids, 4)
        by_address, by_name = (f"{_text(_message(ids, number))}:{port}" for number in (1, 2))
        datanode = by_name if self._by_hostname else by_address
        return Target(datanode, (by_address, by_name), described, storage_type, storage)


def _waits() -> Iterator[float]:
    """Short ones first: DataNodes normally report a block within milliseconds."""
    wait_s = _SHORTEST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _parse_access(block: bytes, token: bytes) -> BlockAccess:
    said, right = dict(fields(block)), dict(fields(token))
    kind, service = (_text(_message(right, number)) for number in (3, 4))
    return BlockAccess(
        _text(_message(said, 1)),
        _number(said, 2),
        _number(said, 3),
        0,
        BlockToken(_message(right, 1), _message(right, 2), kind, service),
    )


def _message(said: dict[int, int | bytes], number: int) -> bytes:
    value = said.get(number)
    if not isinstance(value, bytes):
        raise Malformed(f"an answer without its field {number}")
    return value


def _number(said: dict[int, int | bytes], number: int) -> int:
    value = said.get(number)
    if not isinstance(value, int):
        raise Malformed(f"an answer without its field {number}")
    return value


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Malformed("a name that is not text") from None
