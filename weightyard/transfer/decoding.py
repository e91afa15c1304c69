"""Decoding a run's stored bytes into the memory of whoever wants them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from weightyard import codec
from weightyard.format.block import Codec
from weightyard.transfer.plan import BlockRead, Run


def decode_run(
    run: Run,
    stored: Sequence[memoryview],
    bases: Sequence[memoryview | None],
    scratch: memoryview,
) -> float:
    """Check every chunk and put the raw bytes where they are wanted. Raises BlockCorrupt.

    `scratch` is for blocks whose chunks go to several places. Returns the seconds it took.
    """
    began = time.monotonic()
    for read, data, base in zip(run.reads, stored, bases, strict=True):
        _decode(read, data, base, scratch)
    return time.monotonic() - began


def _decode(
    read: BlockRead, stored: memoryview, base: memoryview | None, scratch: memoryview
) -> None:
    chunks = {"first_chunk": read.first_chunk, "last_chunk": read.last_chunk}
    left: Codec | None = None
    if (place := read.in_place) is not None:
        if stored is not place:
            place[:] = stored[: len(place)]
        codec.verify(read.encoding, place, **chunks)
    elif (whole := read.whole) is not None:
        if base is None and read.wanted[0].on_chunks is not None and read.encoding.codec.planes > 1:
            codec.decode_planes(read.encoding, stored, whole, **chunks)
            left = read.encoding.codec
        else:
            codec.decode(read.encoding, stored, whole, base=base, **chunks)
    else:
        out = scratch[: read.raw_bytes]
        codec.decode(read.encoding, stored, out, base=base, **chunks)
        for want in read.wanted:
            begin = want.offset - read.raw_start
            want.into[:] = out[begin : begin + want.into.nbytes]
    for want in read.wanted:
        if want.on_chunks is not None:
            want.on_chunks(left, range(read.first_chunk, read.last_chunk))
