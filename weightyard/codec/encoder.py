"""Encoding a block: the dtype proposes a codec, measuring decides (docs/format.md §3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from typing_extensions import Buffer

from weightyard.codec.arena import Bytes, arena
from weightyard.codec.folding import Folding
from weightyard.codec.frames import compress_noise, compress_runs, compress_text
from weightyard.codec.planes import split
from weightyard.errors import Refused, TooLarge
from weightyard.format.block import (
    ALIGNMENT,
    CHUNK_BYTES,
    KIB,
    MAX_BLOCK_BYTES,
    Codec,
    Encoding,
    Segment,
    SegmentKind,
    aligned,
    block_id,
    chunk_count,
    segment_checksum,
)
from weightyard.names import BlockId

WORTH_ENCODING = 0.95
"""If encoding leaves at least this part of a plane, or of a whole block, it is left raw.

A raw block is received straight into its tensor, while decoding costs time on every load: at 2 GB/s
per core, saving 5 % breaks even only if a core gets 0.1 GB/s from the network.
"""

WORTH_A_DELTA = 0.9
"""A delta is kept if it takes less than this part of the standalone encoding."""

_PROBE_LIMIT = 0.97
"""A plane is tried if a probe shrinks below this part: in a short probe Huffman's table weighs more
than it will in the plane."""

_ONE_BIT = 1 / 8
"""What Huffman coding takes for each byte at least: only a sample of one value seems to take less.

The probe of a sparse delta may be such a sample, if the few places that changed lie elsewhere.
"""

_WORTH_MATCHES = 0.98
"""Matches are used only if they leave less than this part of what Huffman coding alone does, which
in compiled code is several times as fast."""

_PROBE_PIECES = 16
_PROBE_PIECE_BYTES = 4 * KIB
_PROBE_STEP_BYTES = 16 * _PROBE_PIECE_BYTES
"""A probe sees one piece of each step, at most a sixteenth of the block; a shorter block, whole."""

Compress = Callable[[memoryview], bytes | memoryview]


@dataclass(frozen=True)
class Encoded:
    """A block ready to be stored: its encoding, and its bytes as they will lie in a pack.

    The bytes of a raw block are the memory given: keep that unchanged until they are written.
    """

    encoding: Encoding
    stored: memoryview
    """The segments, each followed by its padding; the last one's may be missing."""

    @property
    def segments(self) -> tuple[memoryview, ...]:
        """Each without its padding."""
        return tuple(
            self.stored[start : start + segment.stored_bytes]
            for start, segment in zip(self.encoding.offsets, self.encoding.segments, strict=False)
        )

    @property
    def stored_bytes(self) -> int:
        """What the block will take in its pack, padding included."""
        return self.encoding.stored_bytes


def room_for(raw_bytes: int, hint: Codec) -> int:
    """How much memory encoding a block by this codec needs at most."""
    return raw_bytes + ALIGNMENT * hint.planes * chunk_count(raw_bytes)


def encode(
    data: Buffer,
    *,
    hint: Codec = Codec.ZSTD,
    block: BlockId | None = None,
    into: Buffer | None = None,
) -> Encoded:
    """Encode a block's raw bytes, by the codec its dtype proposes or by none.

    `hint` is the plane codec of a float dtype, ZSTD for other bytes, RAW to only check and sum.
    Planes of elements that do not divide the length are not tried. `block` saves hashing the bytes
    again when their id is already known. The result never takes more room than the raw bytes and
    their padding; it lies in `into`, of `room_for` bytes, unless it is raw. Raises TooLarge.
    """
    raw = _bytes(data)
    return _encode(raw, None, hint, block or block_id(raw.data), None, into)


def encode_delta(
    data: Buffer,
    base: Buffer,
    base_id: BlockId,
    *,
    hint: Codec = Codec.ZSTD,
    block: BlockId | None = None,
    into: Buffer | None = None,
) -> Encoded:
    """Encode a block as its XOR with an equally long base; see `encode` and `worth_a_delta`.

    Raises Refused for a base of another length or a base that is the block itself, and TooLarge.
    """
    raw, base_raw = _bytes(data), _bytes(base)
    block = block or block_id(raw.data)
    if raw.size != base_raw.size:
        raise Refused(
            f"block {block} has {raw.size} bytes and its base {base_id} has {base_raw.size}: "
            "a delta needs a base of the same length; encode it standalone"
        )
    if base_id == block:
        raise Refused(f"block {block} is its own base: refer to it instead of encoding it")
    return _encode(raw, base_raw, hint, block, base_id, into)


def estimate(data: Buffer, *, hint: Codec = Codec.ZSTD, base: Buffer | None = None) -> int:
    """About how many bytes a block will take encoded, or as a delta of a base; probes it."""
    raw = _bytes(data)
    codec = hint if raw.size % hint.planes == 0 else Codec.ZSTD
    if codec is Codec.RAW:
        return raw.size
    arena.clear()
    sample = _sample(raw, None if base is None else _bytes(base))
    kept = sum(_estimated(plane, codec) for plane in _planes(codec, sample))
    share = kept / max(1, sample.size)
    return round(raw.size * (share if share < WORTH_ENCODING else 1.0))


def worth_a_delta(delta_bytes: int, standalone_bytes: int) -> bool:
    """Whether a delta saves enough to make reading the block depend on another one."""
    return delta_bytes < WORTH_A_DELTA * standalone_bytes


def _bytes(data: Buffer) -> Bytes:
    raw = np.frombuffer(memoryview(data), np.uint8)
    if raw.size > MAX_BLOCK_BYTES:
        raise TooLarge(f"a block of {raw.size} bytes; the largest has {MAX_BLOCK_BYTES}: split it")
    return raw


def _encode(
    raw: Bytes,
    base: Bytes | None,
    hint: Codec,
    block: BlockId,
    base_id: BlockId | None,
    into: Buffer | None = None,
) -> Encoded:
    codec = hint if raw.size % hint.planes == 0 else Codec.ZSTD
    sums = Folding()
    laid_out = _try(codec, raw, base, block, into, sums) if codec is not Codec.RAW else None
    if laid_out is None:
        codec, whole = Codec.RAW, raw if base is None else np.bitwise_xor(raw, base)
        laid_out = _as_it_is(whole, block)
    stored, segments = laid_out
    sums.add(raw[sums.folded_bytes :].data)
    encoding = Encoding(block, raw.size, codec, base_id, sums.fold, tuple(segments))
    return Encoded(encoding, stored.data)


_LaidOut = tuple[Bytes, list[Segment]]
"""The stored bytes of a block, and the segments in them."""


def _as_it_is(raw: Bytes, block: BlockId) -> _LaidOut:
    chunks = (raw[start : start + CHUNK_BYTES] for start in range(0, raw.size, CHUNK_BYTES))
    return raw, [
        _segment(SegmentKind.RAW, chunk, block, index) for index, chunk in enumerate(chunks)
    ]


def _segment(kind: SegmentKind, stored: Bytes, block: BlockId, index: int) -> Segment:
    return Segment(kind, stored.size, segment_checksum(stored.data, block, index))


def _try(
    codec: Codec,
    raw: Bytes,
    base: Bytes | None,
    block: BlockId,
    into: Buffer | None,
    sums: Folding,
) -> _LaidOut | None:
    """A block under a codec, or None if it is better left raw. Folds what it reads."""
    arena.clear()
    compressors = [_choose(plane, codec) for plane in _planes(codec, _sample(raw, base))]
    if not any(compressors):
        return None
    # One large piece of memory, which the system gives in huge pages: touching fresh memory segment
    # by segment would take longer than splitting the planes.
    room = np.empty(room_for(raw.size, codec), np.uint8).data if into is None else memoryview(into)
    stored = np.frombuffer(room, np.uint8)
    segments: list[Segment] = []
    end = 0
    for start in range(0, raw.size, CHUNK_BYTES):
        arena.clear()
        chunk = raw[start : start + CHUNK_BYTES]
        sums.add(chunk.data)
        if base is not None:
            xor = arena.take(chunk.size, np.uint8)
            chunk = np.bitwise_xor(chunk, base[start : start + CHUNK_BYTES], out=xor)
        for plane, compress in zip(_planes(codec, chunk), compressors, strict=True):
            kind, data = _store(plane, compress)
            at, length, end = end, data.size, end + aligned(data.size)
            stored[at : at + length] = data
            stored[at + length : end] = 0
            # The checksum is computed while the cache still has the bytes.
            segments.append(_segment(kind, stored[at : at + length], block, len(segments)))
    return (stored[:end], segments) if end < WORTH_ENCODING * raw.size else None


def _sample(raw: Bytes, base: Bytes | None) -> Bytes:
    """A few pieces from all over a block, whole elements of any width."""
    pieces = min(raw.size // _PROBE_STEP_BYTES, _PROBE_PIECES)
    if pieces:
        step = raw.size // pieces // 8 * 8
        rows = (pieces, step)
        raw = raw[: pieces * step].reshape(rows)[:, :_PROBE_PIECE_BYTES].ravel()
        if base is not None:
            base = base[: pieces * step].reshape(rows)[:, :_PROBE_PIECE_BYTES].ravel()
    return raw if base is None else np.bitwise_xor(raw, base)


def _choose(sample: Bytes, codec: Codec) -> Compress | None:
    """What to compress a plane with, or None if its sample is noise."""
    if not sample.size:
        return None
    by_matches: list[Compress] = [compress_runs]
    if codec is Codec.ZSTD:
        by_matches.append(compress_text)
    left, best = min(
        ((len(compress(sample.data)), compress) for compress in by_matches), key=lambda one: one[0]
    )
    alone = len(compress_noise(sample.data))
    if alone >= _ONE_BIT * sample.size and left >= _WORTH_MATCHES * alone:
        left, best = alone, compress_noise
    return best if left < _PROBE_LIMIT * sample.size else None


def _estimated(sample: Bytes, codec: Codec) -> int:
    compress = _choose(sample, codec)
    return _store(sample, compress)[1].size if sample.size else 0


def _planes(codec: Codec, chunk: Bytes) -> list[Bytes]:
    """The planes of a chunk, in scratch memory; a codec without planes gives the chunk itself."""
    if codec is Codec.ZSTD:
        return [chunk]
    planes = [arena.take(chunk.size // codec.planes, np.uint8) for _ in range(codec.planes)]
    split(codec, chunk, planes, arena)
    return planes


def _store(plane: Bytes, compress: Compress | None) -> tuple[SegmentKind, Bytes]:
    if plane[0] == plane[-1] and plane.min() == plane.max():
        return SegmentKind.CONSTANT, plane[:1]
    if compress is not None:
        frame = compress(plane.data)
        if len(frame) < WORTH_ENCODING * plane.size:
            return SegmentKind.ZSTD, np.frombuffer(frame, np.uint8)
    return SegmentKind.RAW, plane
