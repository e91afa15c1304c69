"""A block: a slice of raw bytes with one name, and how it is encoded (docs/format.md §2)."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import xxhash
from blake3 import blake3
from typing_extensions import Buffer

from weightyard.errors import BlockCorrupt
from weightyard.names import BlockId

KIB = 1024
MIB = 1024 * KIB

DEFAULT_BLOCK_BYTES = 16 * MIB
"""The block size of a yard that was not told otherwise."""

MAX_BLOCK_BYTES = 64 * MIB
"""No block is larger; a reader may allocate this much for one without asking further."""

CHUNK_BYTES = MIB
"""Raw bytes of a chunk; the last of a block may be shorter."""

ALIGNMENT = 16
"""Every segment of every block begins at a multiple of this in its pack."""

_U64 = (1 << 64) - 1
_POSITION_STEP = 0x9E3779B97F4A7C15


class Codec(enum.IntEnum):
    """How the chunks of a block become segments. The numbers are in files: never change one."""

    RAW = 0
    ZSTD = 1
    PLANES_BF16 = 2
    PLANES_FP16 = 3
    PLANES_FP32 = 4
    PLANES_FP64 = 5

    @property
    def planes(self) -> int:
        """Segments per chunk, and what the block's length must divide by: the element width."""
        return _PLANES[self]


_PLANES = {
    Codec.RAW: 1,
    Codec.ZSTD: 1,
    Codec.PLANES_BF16: 2,
    Codec.PLANES_FP16: 2,
    Codec.PLANES_FP32: 4,
    Codec.PLANES_FP64: 8,
}


class SegmentKind(enum.IntEnum):
    """How one segment is stored. The numbers are in files: never change one."""

    RAW = 0
    """The bytes as they are."""
    ZSTD = 1
    """One standard zstd frame that states its content size."""
    CONSTANT = 2
    """One byte: every byte of the segment has this value."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One plane of one chunk as stored: the smallest thing that can be read and checked alone."""

    kind: SegmentKind
    stored_bytes: int
    checksum: int
    """Seeded xxh3-64 of the stored bytes; see `segment_checksum`."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Two wrapping 64-bit sums over a block's words, cheap to compute again on a device.

    The raw bytes, padded with zeros to whole 8-byte little-endian words w[0], w[1], …:
    `total` is the sum of w[i], `weighted` the sum of (i + 1) · w[i], both modulo 2^64.
    """

    total: int
    weighted: int


@dataclass(frozen=True)
class Encoding:
    """All that is needed, besides the stored bytes and the base, to get a block back.

    Segments lie chunk by chunk: segment `chunk * codec.planes + plane`.
    """

    block: BlockId
    raw_bytes: int
    codec: Codec
    base: BlockId | None
    """With a base, what is encoded is the block XOR the base; both have the same length."""
    fold: Fold
    segments: tuple[Segment, ...]

    @property
    def chunks(self) -> int:
        return chunk_count(self.raw_bytes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each segment begins, from the block's offset in its pack; last: where it ends."""
        offsets = [0]
        for segment in self.segments:
            offsets.append(offsets[-1] + aligned(segment.stored_bytes))
        return tuple(offsets)

    @property
    def stored_bytes(self) -> int:
        """What the block takes in its pack, padding included."""
        return self.offsets[-1]

    @cached_property
    def flaw(self) -> str | None:
        """What contradicts itself here, or None: sizes, kinds and counts, not the bytes."""
        if not 0 <= self.raw_bytes <= MAX_BLOCK_BYTES:
            return f"a raw length of {self.raw_bytes}, not 0 … {MAX_BLOCK_BYTES}"
        planes = self.codec.planes
        if self.raw_bytes % planes:
            return f"{self.raw_bytes} bytes are not whole elements of {planes}"
        if len(self.segments) != self.chunks * planes:
            return f"{len(self.segments)} segments, not {self.chunks} × {planes}"
        if self.base == self.block:
            return "its own base"
        if not (0 <= self.fold.total <= _U64 and 0 <= self.fold.weighted <= _U64):
            return "a fold over 64 bits"
        # Nothing is worked out twice: a claim or a load brings thousands of segments by here.
        is_raw, whole = self.codec is Codec.RAW, CHUNK_BYTES // planes
        last_chunk = (self.chunks - 1) * planes
        for index, segment in enumerate(self.segments):
            if index == last_chunk:  # which may be shorter
                whole = self.segment_raw_bytes(index)
            match segment.kind:
                case SegmentKind.RAW:
                    fits = segment.stored_bytes == whole
                case SegmentKind.ZSTD:
                    fits = not is_raw and 0 < segment.stored_bytes < whole
                case SegmentKind.CONSTANT:
                    fits = not is_raw and segment.stored_bytes == 1
            if not (fits and 0 <= segment.checksum <= _U64):
                return f"segment {index} of {whole} bytes stored as {segment}"
        return None

    def segment_raw_bytes(self, index: int) -> int:
        """How long a segment is when decoded."""
        return chunk_bytes(self.raw_bytes, index // self.codec.planes) // self.codec.planes

    def chunk_span(self, first: int, last: int) -> tuple[int, int]:
        """Stored (offset, length) of the chunks first … last - 1: one contiguous read."""
        start = self.offsets[first * self.codec.planes]
        return start, self.offsets[last * self.codec.planes] - start

    def raw_span(self, first: int, last: int) -> tuple[int, int]:
        """Raw (offset, length) of the chunks first … last - 1 within the block."""
        start, end = (min(chunk * CHUNK_BYTES, self.raw_bytes) for chunk in (first, last))
        return start, end - start


def check_encoding(encoding: Encoding) -> None:
    """Refuse an encoding that contradicts itself; call before its sizes are believed.

    Afterwards the block is at most MAX_BLOCK_BYTES long and no segment is stored in more bytes
    than it has. Raises BlockCorrupt.
    """
    if encoding.flaw is not None:
        raise BlockCorrupt(f"block {encoding.block}: its encoding has {encoding.flaw}")


def aligned(length: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def chunk_count(raw_bytes: int) -> int:
    return -(-raw_bytes // CHUNK_BYTES)


def chunk_bytes(raw_bytes: int, chunk: int) -> int:
    """Raw length of one chunk of a block."""
    return min(CHUNK_BYTES, raw_bytes - chunk * CHUNK_BYTES)


def block_id(data: Buffer) -> BlockId:
    """The name of the block with these raw bytes."""
    return block_id_of([data])


def block_id_of(parts: Iterable[Buffer]) -> BlockId:
    """The same, of raw bytes that come one part after the other."""
    hashed = blake3()
    for part in parts:
        hashed.update(part)
    return BlockId(hashed.hexdigest())


def segment_checksum(stored: Buffer, block: BlockId, index: int) -> int:
    """xxh3-64 of a segment's stored bytes, seeded so that only its own place accepts them.

    The seed is the first eight bytes of the block id (little-endian) plus the segment's index
    times an odd constant, modulo 2^64: a segment of another block or of another position in the
    same block fails the check even when its own bytes are intact.
    """
    start = int.from_bytes(bytes.fromhex(block.hex[:16]), "little")
    return xxhash.xxh3_64_intdigest(stored, seed=(start + index * _POSITION_STEP) & _U64)
