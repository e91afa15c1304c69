"""Planes merged and differences added where they lie: with integer operations of any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weightyard.format.block import CHUNK_BYTES, MIB, Codec

if TYPE_CHECKING:
    import torch

AT_ONCE_BYTES = 4 * MIB
"""What one operation works on: it bounds what is allocated on the device meanwhile."""

_MANTISSA_BITS = {Codec.PLANES_BF16: 7, Codec.PLANES_FP32: 7, Codec.PLANES_FP64: 4}
"""For codecs that rotate an element's top 16 bits: how many are mantissa (docs/format.md §3)."""


def put(
    codec: Codec | None, source: torch.Tensor, into: torch.Tensor, *, adds: bool = False
) -> None:
    """Put bytes where they belong; with `adds`, XORed with what is there.

    Both are flat tensors of bytes, of one length, on one device. `codec`: whose planes `source`
    holds, chunk by chunk as `codec.decode_planes` leaves them; None: the bytes as they are.
    """
    for begin in range(0, source.numel(), AT_ONCE_BYTES):
        piece = slice(begin, begin + AT_ONCE_BYTES)
        if codec is None:
            _put(into[piece], source[piece], adds=adds)
        else:
            _merge(codec, source[piece], into[piece], adds=adds)


def _merge(codec: Codec, source: torch.Tensor, into: torch.Tensor, *, adds: bool) -> None:
    """One byte of an element after the other, for all elements of all chunks at once."""
    whole = source.numel() // CHUNK_BYTES * CHUNK_BYTES
    for begin, end, chunks in ((0, whole, whole // CHUNK_BYTES), (whole, source.numel(), 1)):
        if begin == end:
            continue
        planes = source[begin:end].view(chunks, codec.planes, -1)
        elements = into[begin:end].view(chunks, -1, codec.planes)
        for number, values in enumerate(_bytes(codec, planes), 1):
            _put(elements[..., codec.planes - number], values, adds=adds)  # little-endian


def _bytes(codec: Codec, planes: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of elements, most significant first; the sign is back at the top of the first."""
    first = 0
    if (bits := _MANTISSA_BITS.get(codec)) is not None:
        mantissa = (1 << bits) - 1
        high, low = planes[:, 0], planes[:, 1]
        yield (low << 7 - bits) & 0x80 | high >> 1
        yield (high << 7) & 0x80 | (low >> 1) & (0x7F & ~mantissa) | low & mantissa
        first = 2
    for plane in range(first, codec.planes):
        yield planes[:, plane]


def _put(into: torch.Tensor, values: torch.Tensor, *, adds: bool) -> None:
    if adds:
        into.bitwise_xor_(values)
    else:
        into.copy_(values)
