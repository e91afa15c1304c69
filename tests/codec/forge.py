"""Blocks as a pack would hold them, honest and forged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import ml_dtypes
import numpy as np

from weightyard.codec import Encoded, decode, decode_planes
from weightyard.format.block import (
    Codec,
    Encoding,
    Segment,
    SegmentKind,
    aligned,
    segment_checksum,
)

PLANE_CODECS = (Codec.PLANES_BF16, Codec.PLANES_FP16, Codec.PLANES_FP32, Codec.PLANES_FP64)

DTYPES = {
    Codec.PLANES_BF16: np.dtype(ml_dtypes.bfloat16),
    Codec.PLANES_FP16: np.dtype("<f2"),
    Codec.PLANES_FP32: np.dtype("<f4"),
    Codec.PLANES_FP64: np.dtype("<f8"),
    Codec.ZSTD: np.dtype(ml_dtypes.float8_e4m3fn),
    Codec.RAW: np.dtype("<f2"),
}

GUARD = b"\xa5" * 64


def weights(codec: Codec, raw_bytes: int, seed: int = 0) -> bytes:
    """Trained-looking values of the codec's dtype."""
    dtype = DTYPES[codec]
    values = np.random.default_rng(seed).normal(0, 0.02, raw_bytes // dtype.itemsize)
    return values.astype(dtype).tobytes()


def laid_out(segments: Sequence[bytes | memoryview]) -> bytes:
    """Segments one after the other, padded, as they lie in a pack."""
    return b"".join(bytes(data).ljust(aligned(len(data)), b"\0") for data in segments)


def forged(encoding: Encoding, kinds: Sequence[SegmentKind], stored: Sequence[bytes]) -> Encoding:
    """The encoding a liar would write for these segments: every size and checksum agrees."""
    return replace(
        encoding,
        segments=tuple(
            Segment(kind, len(data), segment_checksum(data, encoding.block, index))
            for index, (kind, data) in enumerate(zip(kinds, stored, strict=True))
        ),
    )


def decoded(
    encoding: Encoding,
    stored: bytes,
    *,
    first: int = 0,
    last: int | None = None,
    base: bytes | None = None,
    out_bytes: int | None = None,
) -> bytes:
    with guarded(encoding.raw_bytes if out_bytes is None else out_bytes) as out:
        decode(encoding, stored, out, first_chunk=first, last_chunk=last, base=base)
        return bytes(out)


def planes_of(encoding: Encoding, stored: bytes) -> bytes:
    with guarded(encoding.raw_bytes) as out:
        decode_planes(encoding, stored, out)
        return bytes(out)


@contextmanager
def guarded(size: int) -> Iterator[memoryview]:
    """Memory between guards, which must stay as they are whatever happens."""
    memory = bytearray(GUARD + b"\x5a" * size + GUARD)
    try:
        yield memoryview(memory)[len(GUARD) : len(GUARD) + size]
    finally:
        assert memory.startswith(GUARD)
        assert memory.endswith(GUARD)


def came_back(encoded: Encoded, base: bytes | None = None) -> bytes:
    return decoded(encoded.encoding, laid_out(encoded.segments), base=base)
