"""A pack read as a whole: each byte of a block is held against what it must be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weightyard.codec import Encoded, decode, encode, encode_delta
from weightyard.errors import BlockCorrupt
from weightyard.format.block import CHUNK_BYTES, Codec, Fold, aligned, block_id
from weightyard.transfer.verifying import require_block, require_stored

NOISE = np.random.default_rng(3).bytes(CHUNK_BYTES + 65536 + 2)
SOFT = bytes(range(7)) * 30_001
BASE = NOISE[:1000] + SOFT[1000:]


def laid_out(encoded: Encoded) -> bytearray:
    return bytearray(
        b"".join(bytes(one).ljust(aligned(len(one)), b"\0") for one in encoded.segments)
    )


def padding_of(encoded: Encoded) -> list[int]:
    offsets = encoded.encoding.offsets
    return [
        at
        for index, segment in enumerate(encoded.encoding.segments)
        for at in range(offsets[index] + segment.stored_bytes, offsets[index + 1])
    ]


BLOCKS = {
    "raw": (encode(NOISE), None),
    "zstd": (encode(SOFT), None),
    "planes": (encode(bytes(4) + SOFT[:60_000], hint=Codec.PLANES_FP32), None),
    "delta": (encode_delta(SOFT, BASE, block_id(BASE)), BASE),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_bytes_in_the_padding_pass_an_ordinary_read_and_no_look_at_the_whole(kind: str) -> None:
    encoded, base = BLOCKS[kind]
    stored, raw = laid_out(encoded), bytearray(encoded.encoding.raw_bytes)
    require_block(encoded.encoding, memoryview(stored), base)
    padding = padding_of(encoded)
    assert padding
    for at in {padding[0], padding[-1]}:
        stored[at] = 1
        decode(encoded.encoding, stored, raw, base=base)
        for look in (
            lambda view: require_stored(encoded.encoding, view),
            lambda view: require_block(encoded.encoding, view, base),
        ):
            with pytest.raises(BlockCorrupt, match="padding"):
                look(memoryview(stored))
        stored[at] = 0


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_fold_of_other_bytes_is_found_by_a_look_at_the_whole(kind: str) -> None:
    encoded, base = BLOCKS[kind]
    encoding, right = encoded.encoding, encoded.encoding.fold
    for wrong in (Fold(right.total ^ 1, right.weighted), Fold(right.total, right.weighted ^ 1)):
        with pytest.raises(BlockCorrupt, match="fold"):
            require_block(replace(encoding, fold=wrong), memoryview(laid_out(encoded)), base)
