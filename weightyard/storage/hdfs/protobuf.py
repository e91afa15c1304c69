"""Protobuf's encoding, as far as Hadoop's messages need it: fields in, fields out.

Pure: no sockets here. Whatever does not parse is Malformed.
"""

from __future__ import annotations

from collections.abc import Iterator

from weightyard.errors import StoreUnavailable

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_U64 = (1 << 64) - 1


class Malformed(StoreUnavailable):
    """The other side sent bytes that are not the protocol."""


def varint(value: int) -> bytes:
    """Protobuf's base-128 encoding of a number that is not negative."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def parse_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and where the next thing begins."""
    value = 0
    for index in range(10):
        if position + index >= len(data):
            raise Malformed("a number is cut off")
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & _U64, position + index + 1
    raise Malformed("a number of more than ten bytes")


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, in order; fixed-width ones as bytes."""
    position = 0
    while position < len(message):
        tag, position = parse_varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, position = parse_varint(message, position)
            yield number, value
            continue
        if kind == BYTES:
            length, position = parse_varint(message, position)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise Malformed(f"field of unknown kind {kind}")
        if length > len(message) - position:
            raise Malformed("a field is longer than its message")
        yield number, message[position : position + length]
        position += length


def varint_field(number: int, value: int) -> bytes:
    # Block ids may be negative; on the wire they are the same 64 bits without a sign.
    return varint(number << 3 | VARINT) + varint(value & _U64)


def bytes_field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def delimited(message: bytes) -> bytes:
    """A message with its length before it."""
    return varint(len(message)) + message


def signed_field(number: int, value: int) -> bytes:
    """A field of protobuf's kind for numbers that may be negative and are small."""
    return varint_field(number, value << 1 if value >= 0 else ~(value << 1))
