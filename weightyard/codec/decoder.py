"""Decoding runs of chunks into the caller's memory; no segment is used before it is checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from typing_extensions import Buffer

from weightyard.codec.arena import Bytes, arena
from weightyard.codec.encoder import Encoded
from weightyard.codec.frames import decompress_by_zstd, decompress_into
from weightyard.codec.planes import Plane, merge
from weightyard.errors import BlockCorrupt, Bug, Refused
from weightyard.format.block import (
    CHUNK_BYTES,
    Codec,
    Encoding,
    SegmentKind,
    aligned,
    block_id,
    check_encoding,
    segment_checksum,
)


def decode(
    encoding: Encoding,
    stored: Buffer,
    out: Buffer,
    *,
    first_chunk: int = 0,
    last_chunk: int | None = None,
    base: Buffer | None = None,
) -> None:
    """Fill `out` with the chunks first … last - 1 of a block; by default, to its end.

    `stored` is what `Encoding.chunk_span` names, with or without the padding at its end. `out` and
    `base` have the run's raw length exactly; `base` holds the same chunks of the base block. Each
    segment's checksum is checked before it is decoded, and if all of a delta is decoded, the block
    id as well. How much memory is used never depends on the bytes: only `out` and this thread's
    scratch are.
    After an error `out` holds nothing of use.

    Raises BlockCorrupt for bytes or an encoding that do not hold together, Refused for arguments
    that do not fit.
    """
    chunks, segments = _cut(encoding, stored, first_chunk, last_chunk)
    _, raw_bytes = encoding.raw_span(chunks.start, chunks.stop)
    target = _writable(encoding, out, raw_bytes)
    before = _base_of(encoding, base, raw_bytes)
    if before is not None and np.may_share_memory(before, target):
        raise Refused(f"block {encoding.block}: its base lies in the output memory")
    for turn, chunk in enumerate(chunks):
        piece = slice(turn * CHUNK_BYTES, (turn + 1) * CHUNK_BYTES)
        xor = None if before is None else before[piece]
        _decode_chunk(encoding, chunk, segments[turn], target[piece], xor)
    if before is not None and raw_bytes == encoding.raw_bytes:
        verify_whole(encoding, target.data)


def decode_planes(
    encoding: Encoding,
    stored: Buffer,
    out: Buffer,
    *,
    first_chunk: int = 0,
    last_chunk: int | None = None,
) -> None:
    """As `decode`, but each chunk is left as its planes, side by side, most significant first.

    For callers that merge them elsewhere. A codec without planes leaves the bytes as they are. Of a
    delta this gives the difference, so it takes no base.
    """
    chunks, segments = _cut(encoding, stored, first_chunk, last_chunk)
    _, raw_bytes = encoding.raw_span(chunks.start, chunks.stop)
    target = _writable(encoding, out, raw_bytes)
    planes = encoding.codec.planes
    for turn, chunk in enumerate(chunks):
        _check_chunk(encoding, chunk, segments[turn])
        piece = target[turn * CHUNK_BYTES : (turn + 1) * CHUNK_BYTES]
        size = piece.size // planes
        for plane, data in enumerate(segments[turn]):
            kind = encoding.segments[chunk * planes + plane].kind
            try:
                _decode_stream(kind, data, piece[plane * size : (plane + 1) * size])
            except BlockCorrupt as why:
                raise BlockCorrupt(f"block {encoding.block}, chunk {chunk}: {why}") from None


def verify(
    encoding: Encoding, stored: Buffer, *, first_chunk: int = 0, last_chunk: int | None = None
) -> None:
    """Check the stored bytes of a run of chunks without decoding them.

    All that is left to do for a raw block received straight into its tensor. Raises as `decode`.
    """
    for chunk, segments in zip(*_cut(encoding, stored, first_chunk, last_chunk), strict=True):
        _check_chunk(encoding, chunk, segments)


def verify_whole(encoding: Encoding, raw: Buffer) -> None:
    """Check that a block's raw bytes are those its id names. Raises BlockCorrupt."""
    found = block_id(raw)
    if found != encoding.block:
        raise BlockCorrupt(f"block {encoding.block}: its bytes are those of {found}")


class _Proofs(threading.local):
    """Memory in which each thread decodes the chunk it proves.

    A bytearray, which is compared with other memory in one go; NumPy and memoryviews are not.
    """

    def __init__(self) -> None:
        self._chunk = bytearray(CHUNK_BYTES)

    def room(self, length: int) -> bytearray:
        return self._chunk if length == CHUNK_BYTES else bytearray(length)


_proofs = _Proofs()


def prove(encoded: Encoded, data: Buffer, *, base: Buffer | None = None) -> None:
    """Decode what was encoded and compare it with the data, before anyone relies on it.

    Frames are decoded by zstd: readers without compiled code must be able to read what is stored.
    Raises Bug if they differ: an encoder's mistake must be found before its result is stored.
    """
    encoding, planes = encoded.encoding, encoded.encoding.codec.planes
    raw = _exactly(data, encoding.raw_bytes, "data")
    before = _base_of(encoding, base, raw.size)
    if encoding.codec is Codec.RAW and before is None:
        stored_raw = _bytes(encoded.stored)
        is_itself = stored_raw.size == raw.size and stored_raw.ctypes.data == raw.ctypes.data
        if not is_itself and not np.array_equal(stored_raw, raw):
            raise Bug(f"block {encoding.block}: the bytes to store are not those given")
        return
    stored = encoded.segments
    for chunk in range(encoding.chunks):
        piece = slice(chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES)
        xor = None if before is None else before[piece]
        back = _proofs.room(raw[piece].size)
        out = np.frombuffer(back, np.uint8)
        segments = stored[chunk * planes : (chunk + 1) * planes]
        _decode_chunk(encoding, chunk, segments, out, xor, decompress_by_zstd)
        if back != raw[piece].data:
            raise Bug(f"block {encoding.block}: {encoding.codec.name} changed its chunk {chunk}")


def _cut(
    encoding: Encoding, stored: Buffer, first: int, last: int | None
) -> tuple[range, list[list[memoryview]]]:
    """The chunks of a run and, for each, its segments as views of the stored bytes."""
    check_encoding(encoding)
    last = encoding.chunks if last is None else last
    if not 0 <= first <= last <= encoding.chunks:
        raise Refused(
            f"block {encoding.block}: chunks {first} … {last} of the {encoding.chunks} it has"
        )
    start, length = encoding.chunk_span(first, last)
    view = _bytes(stored).data
    planes, offsets, segments = encoding.codec.planes, encoding.offsets, encoding.segments
    final = segments[last * planes - 1].stored_bytes if first < last else 0
    if not length - (aligned(final) - final) <= len(view) <= length:
        raise BlockCorrupt(
            f"block {encoding.block}: {len(view)} stored bytes for chunks {first} … {last}, "
            f"not {length}"
        )
    cuts = [
        view[offsets[index] - start :][: segments[index].stored_bytes]
        for index in range(first * planes, last * planes)
    ]
    return range(first, last), [cuts[at : at + planes] for at in range(0, len(cuts), planes)]


def _bytes(memory: Buffer) -> Bytes:
    return np.frombuffer(memoryview(memory), np.uint8)


def _exactly(memory: Buffer, length: int, what: str) -> Bytes:
    found = _bytes(memory)
    if found.size != length:
        raise Refused(f"{what} of {found.size} bytes where exactly {length} are needed")
    return found


def _writable(encoding: Encoding, out: Buffer, raw_bytes: int) -> Bytes:
    target = _exactly(out, raw_bytes, "output")
    if not target.flags.writeable:
        raise Refused(f"block {encoding.block}: the output memory is read-only")
    return target


def _base_of(encoding: Encoding, base: Buffer | None, length: int) -> Bytes | None:
    if (base is None) != (encoding.base is None):
        needs = f"is a delta: give its base {encoding.base}" if encoding.base else "has no base"
        raise Refused(f"block {encoding.block} {needs}")
    return None if base is None else _exactly(base, length, "base")


def _check_chunk(encoding: Encoding, chunk: int, stored: Sequence[memoryview]) -> None:
    for index, data in enumerate(stored, chunk * encoding.codec.planes):
        if segment_checksum(data, encoding.block, index) != encoding.segments[index].checksum:
            raise BlockCorrupt(f"block {encoding.block}: the checksum of segment {index} differs")


_Decompress = Callable[[memoryview, memoryview], None]


def _decode_chunk(
    encoding: Encoding,
    chunk: int,
    stored: Sequence[memoryview],
    out: Bytes,
    xor: Bytes | None,
    decompress: _Decompress = decompress_into,
) -> None:
    _check_chunk(encoding, chunk, stored)
    arena.clear()
    codec = encoding.codec
    first = chunk * codec.planes
    kinds = [segment.kind for segment in encoding.segments[first : first + codec.planes]]
    try:
        if codec.planes == 1:
            _decode_stream(kinds[0], stored[0], out, decompress)
        else:
            size = out.size // codec.planes
            planes = [
                _decode_plane(kind, data, size, decompress)
                for kind, data in zip(kinds, stored, strict=True)
            ]
            merge(codec, planes, out, arena)
    except BlockCorrupt as why:
        raise BlockCorrupt(f"block {encoding.block}, chunk {chunk}: {why}") from None
    if xor is not None:
        np.bitwise_xor(out, xor, out=out)


def _decode_stream(
    kind: SegmentKind, stored: memoryview, out: Bytes, decompress: _Decompress = decompress_into
) -> None:
    match kind:
        case SegmentKind.RAW:
            np.copyto(out, _bytes(stored))
        case SegmentKind.CONSTANT:
            out.fill(stored[0])
        case SegmentKind.ZSTD:
            decompress(stored, out.data)


def _decode_plane(
    kind: SegmentKind, stored: memoryview, size: int, decompress: _Decompress
) -> Plane:
    match kind:
        case SegmentKind.RAW:
            return _bytes(stored)
        case SegmentKind.CONSTANT:
            return stored[0]
        case SegmentKind.ZSTD:
            plane = arena.take(size, np.uint8)
            decompress(stored, plane.data)
            return plane
