"""The few messages of HDFS's data transfer protocol that reads and writes need, as bytes.

Hadoop's `datatransfer.proto`, `hdfs.proto` and `Security.proto` define them. Pure: no sockets here.
Whatever does not parse is Malformed.
"""

from __future__ import annotations

import base64
import binascii
import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weightyard.storage.hdfs.protobuf import (
    FIXED32,
    FIXED64,
    VARINT,
    Malformed,
    bytes_field,
    delimited,
    fields,
    varint_field,
)

TRANSFER_VERSION = 28
WRITE_BLOCK = 80
READ_BLOCK = 81
REQUEST_DESCRIPTORS = 87
_DESCRIPTORS_VERSION = 1
_NEW_BLOCK = 6
_CRC32C = 2

MAX_RESPONSE_BYTES = 64 * 1024
"""An answer carries a status and a line of text; more is not an answer."""

MAX_PACKET_BYTES = 16 * 1024 * 1024
"""Hadoop's own limit for a packet."""

MAX_TOKEN_BYTES = 16 * 1024

CHUNK_BYTES = 512
"""Without checksums the DataNode begins and ends what it sends at multiples of this."""

PACKET_HEADER_BYTES = 4 + 2 + 25
"""Two lengths, then the header's four required fields, all of fixed width."""

_MAX_HEADER_PROTO_BYTES = 64
_LENGTHS = struct.Struct(">IH")
_HEADER = struct.Struct("<BqBqBBBi")
_HEADER_TAGS = (1 << 3 | FIXED64, 2 << 3 | FIXED64, 3 << 3 | VARINT, 4 << 3 | FIXED32)


class Status(enum.IntEnum):
    """How a DataNode answers; numbers of Hadoop's `Status`."""

    SUCCESS = 0
    ERROR = 1
    ERROR_CHECKSUM = 2
    ERROR_INVALID = 3
    ERROR_EXISTS = 4
    ERROR_ACCESS_TOKEN = 5
    CHECKSUM_OK = 6
    ERROR_UNSUPPORTED = 7


@dataclass(frozen=True, slots=True)
class BlockToken:
    """By which a NameNode tells a DataNode that a block may be read. A secret; empty if unused."""

    identifier: bytes = field(default=b"", repr=False)
    password: bytes = field(default=b"", repr=False)
    kind: str = ""
    service: str = field(default="", repr=False)

    @classmethod
    def from_url_string(cls, text: str) -> BlockToken:
        """Decode what WebHDFS calls `urlString`: base64 of Hadoop's Token writable."""
        if len(text) > 2 * MAX_TOKEN_BYTES:
            raise Malformed("block token: too long")
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise Malformed("block token: not base64") from None
        parts, position = [], 0
        for _ in range(4):
            length, position = _read_hadoop_vint(raw, position)
            if not 0 <= length <= len(raw) - position:
                raise Malformed("block token: a field is longer than the token")
            parts.append(raw[position : position + length])
            position += length
        if position != len(raw):
            raise Malformed("block token: bytes after its end")
        identifier, password, kind, service = parts
        try:
            return cls(identifier, password, kind.decode(), service.decode())
        except UnicodeDecodeError:
            raise Malformed("block token: its kind or service is not text") from None

    @property
    def expires_s(self) -> float | None:
        """When it ends, in seconds since the epoch; None where it does not say."""
        # Hadoop tells its two encodings apart in the same way: the old one begins with the date in
        # Hadoop's own encoding, whose first byte is negative, the new one with a protobuf tag.
        raw = self.identifier
        if not raw or raw[0] == 0:
            return None
        if raw[0] <= 127:
            try:
                expires = next((value for number, value in fields(raw) if number == 1), None)
            except Malformed:
                return None
            return expires / 1000 if isinstance(expires, int) else None
        length = 256 - 112 - raw[0]
        if not 1 <= length <= 8 or length >= len(raw):
            return None
        return int.from_bytes(raw[1 : 1 + length], "big") / 1000

    def to_url_string(self) -> str:
        parts = (self.identifier, self.password, self.kind.encode(), self.service.encode())
        raw = b"".join(_hadoop_vint(len(part)) + part for part in parts)
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@dataclass(frozen=True, slots=True)
class BlockAccess:
    """Which HDFS block a span is, and the right to read it."""

    pool: str
    block: int
    generation: int
    length: int
    token: BlockToken = field(default=BlockToken(), repr=False)

    def __str__(self) -> str:
        return f"{self.pool}:blk_{self.block}_{self.generation}"


@dataclass(frozen=True, slots=True)
class Response:
    """A DataNode's answer to a request, before the first packet."""

    status: int
    message: str
    bad_datanode: str
    """Which DataNode behind this one does not take part; empty: all do."""
    first_offset: int
    """Where in the block the first packet begins: at a checksum boundary."""
    checksum_type: int
    """0: packets carry no checksums."""


class Packet(NamedTuple):
    """What a packet's header says. A tuple, since there are sixteen thousand to a gigabyte."""

    offset: int
    sequence: int
    is_last: bool
    data_bytes: int


class Storage(Protocol):
    """Where on a DataNode a copy is to lie, in the NameNode's words."""

    @property
    def described(self) -> bytes: ...
    @property
    def storage_type(self) -> int: ...
    @property
    def storage(self) -> str: ...


def read_request(block: BlockAccess, client: str, offset: int, length: int) -> bytes:
    """Ask for bytes of a block without their CRCs: a block's own checksums cover them."""
    header = bytes_field(1, _base(block)) + bytes_field(2, client.encode())
    message = (
        bytes_field(1, header)
        + varint_field(2, offset)
        + varint_field(3, length)
        + varint_field(4, False)
    )
    return _request(READ_BLOCK, message)


def descriptors_request(block: BlockAccess) -> bytes:
    """Ask, on a UNIX socket, for the open file of a block's replica."""
    message = bytes_field(1, _base(block)) + varint_field(2, _DESCRIPTORS_VERSION)
    return _request(REQUEST_DESCRIPTORS, message)


def write_request(
    block: BlockAccess, client: str, targets: Sequence[Storage], checksum_bytes: int
) -> bytes:
    """Begin a block on the first of its DataNodes, which begins it on the others."""
    header = bytes_field(1, _base(block)) + bytes_field(2, client.encode())
    first, *others = targets
    message = (
        bytes_field(1, header)
        + b"".join(bytes_field(2, one.described) for one in others)
        + varint_field(4, _NEW_BLOCK)
        + varint_field(5, len(targets))
        + varint_field(6, 0)
        + varint_field(7, 0)
        + varint_field(8, block.generation)
        + bytes_field(9, varint_field(1, _CRC32C) + varint_field(2, checksum_bytes))
        + varint_field(11, first.storage_type)
        + b"".join(varint_field(12, one.storage_type) for one in others)
        + bytes_field(16, first.storage.encode())
        + b"".join(bytes_field(17, one.storage.encode()) for one in others)
    )
    return _request(WRITE_BLOCK, message)


def parse_ack(message: bytes) -> tuple[int, tuple[int, ...]]:
    """Decode a PipelineAckProto: which packet, and the status of each DataNode, in order."""
    sequence: int | None = None
    said: list[int] = []
    for number, value in fields(message):
        match number, value:
            case 1, int():
                sequence = value >> 1 ^ -(value & 1)
            case 2, int():
                said.append(value)
            case 2, bytes():  # several in one field
                said.extend(value)
    if sequence is None or not said:
        raise Malformed("an acknowledgement of nothing")
    return sequence, tuple(said)


def read_done() -> bytes:
    """The client's last word on a read, after which the connection serves the next one."""
    message = varint_field(1, Status.SUCCESS)
    return delimited(message)


def parse_response(message: bytes) -> Response:
    """Decode a BlockOpResponseProto."""
    status, text, bad_datanode, first_offset, checksum_type = -1, "", "", 0, 0
    for number, value in fields(message):
        match number, value:
            case 1, int():
                status = value
            case 2, bytes():
                bad_datanode = value.decode("utf-8", "replace")
            case 4, bytes():
                first_offset, checksum_type = _parse_checksum_info(value)
            case 5, bytes():
                text = value.decode("utf-8", "replace")
            case ((1 | 2 | 4 | 5), _):
                raise Malformed("response: a field of another type")
    if status < 0:
        raise Malformed("response without a status")
    return Response(status, text, bad_datanode, first_offset, checksum_type)


def parse_packet_lengths(head: bytes | bytearray) -> int:
    """How many bytes of the header follow the first PACKET_HEADER_BYTES: hardly ever any."""
    packet_bytes, proto_bytes = _LENGTHS.unpack_from(head)
    if not 4 <= packet_bytes <= MAX_PACKET_BYTES:
        raise Malformed(f"packet of {packet_bytes} bytes")
    more = int(proto_bytes) + _LENGTHS.size - PACKET_HEADER_BYTES
    if not 0 <= more <= _MAX_HEADER_PROTO_BYTES:
        raise Malformed(f"packet header of {proto_bytes} bytes")
    return more


def parse_packet(head: bytes | bytearray) -> Packet:
    """Decode a whole packet header, and see that no checksums follow it."""
    (packet_bytes,) = struct.unpack_from(">I", head)
    tag1, offset, tag2, sequence, tag3, is_last, tag4, data_bytes = _HEADER.unpack_from(head, 6)
    if (tag1, tag2, tag3, tag4) != _HEADER_TAGS or is_last > 1:
        raise Malformed("packet header with other fields")
    if data_bytes < 0 or packet_bytes != data_bytes + 4:
        raise Malformed(f"packet of {packet_bytes} bytes with {data_bytes} bytes of data")
    if offset < 0 or bool(is_last) != (data_bytes == 0):
        raise Malformed("packet without data in the middle, or with data at the end")
    return Packet(offset, sequence, bool(is_last), data_bytes)


def packet_header(packet: Packet, checksums_bytes: int = 0) -> bytes:
    """Encode the header of a packet whose checksums come before the data."""
    tag1, tag2, tag3, tag4 = _HEADER_TAGS
    length = packet.data_bytes + checksums_bytes + 4
    return _LENGTHS.pack(length, _HEADER.size) + _HEADER.pack(
        tag1, packet.offset, tag2, packet.sequence, tag3, packet.is_last, tag4, packet.data_bytes
    )


def _request(operation: int, message: bytes) -> bytes:
    return struct.pack(">HB", TRANSFER_VERSION, operation) + delimited(message)


def extended_block(block: BlockAccess) -> bytes:
    """Which block it is, as in every request."""
    return (
        bytes_field(1, block.pool.encode())
        + varint_field(2, block.block)
        + varint_field(3, block.generation)
        + varint_field(4, block.length)
    )


def _base(block: BlockAccess) -> bytes:
    """Which block, and the right to it."""
    token = (
        bytes_field(1, block.token.identifier)
        + bytes_field(2, block.token.password)
        + bytes_field(3, block.token.kind.encode())
        + bytes_field(4, block.token.service.encode())
    )
    return bytes_field(1, extended_block(block)) + bytes_field(2, token)


def _parse_checksum_info(message: bytes) -> tuple[int, int]:
    first_offset, checksum_type = -1, -1
    for number, value in fields(message):
        match number, value:
            case 1, bytes():
                for inner, kind in fields(value):
                    if inner == 1 and isinstance(kind, int):
                        checksum_type = kind
            case 2, int():
                first_offset = value
    if first_offset < 0 or checksum_type < 0:
        raise Malformed("checksum information is not complete")
    return first_offset, checksum_type


def _hadoop_vint(value: int) -> bytes:
    """Hadoop's own variable-length number (WritableUtils), which is not protobuf's."""
    if value <= 127:
        return bytes([value])
    raw = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([256 - 112 - len(raw)]) + raw


def _read_hadoop_vint(data: bytes, position: int) -> tuple[int, int]:
    if position >= len(data):
        raise Malformed("block token: cut off")
    first = data[position]
    if first <= 127:
        return first, position + 1
    length = 256 - 112 - first
    # Longer and negative numbers exist, but no field of a token has such a length.
    if not 1 <= length <= 4:
        raise Malformed("block token: not a length")
    end = position + 1 + length
    if end > len(data):
        raise Malformed("block token: cut off")
    return int.from_bytes(data[position + 1 : end], "big"), end
