"""What the tests of the format build again and again: files, blocks in memory, small manifests."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import numpy as np

from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType, nbytes
from weightyard.format.manifest import Extent, Manifest
from weightyard.format.splitting import (
    BoxShape,
    Split,
    StateTensor,
    split_file,
    split_plain,
    split_state,
)
from weightyard.names import BlockId, FilePath

NOISE = np.random.default_rng(7).integers(0, 256, 24 * MIB, np.uint8).tobytes()
"""Bytes that nothing repeats in."""


def safetensors_file(
    tensors: Sequence[tuple[str, DType, tuple[int, ...]]], *, spaces: bool = False
) -> bytes:
    """A file as the safetensors library lays it out, of any dtype."""
    fields, at = {}, 0
    for name, dtype, shape in tensors:
        size = nbytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(fields, separators=None if spaces else (",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + NOISE[:at]


def split_bytes(path: str, data: bytes, block_bytes: int = MIB) -> Split:
    return split_file(
        FilePath(path), len(data), lambda start, length: data[start : start + length], block_bytes
    )


class Blocks:
    """Blocks by name, as a store would have them."""

    def __init__(self) -> None:
        self.data: dict[BlockId, bytes] = {}

    def keep(self, split: Split, sources: Sequence[bytes]) -> list[BlockId]:
        """Read the pieces of a split and give them their names."""
        names = []
        for piece in split.pieces:
            raw = b"".join(
                sources[part.source][part.start : part.start + part.length] for part in piece.parts
            )
            names.append(block_id(raw))
            self.data[names[-1]] = raw
        return names

    def read(self, manifest: Manifest, extents: Sequence[Extent]) -> bytes:
        blocks = manifest.blocks
        return b"".join(
            self.data[blocks[e.block].id][e.offset : e.offset + e.length] for e in extents
        )


def fake_ids(split: Split) -> list[BlockId]:
    """Different names for all pieces, for where the bytes do not matter."""
    return [block_id(repr(piece).encode()) for piece in split.pieces]


def small_manifest() -> Manifest:
    """A version with everything in it: files, a cut tensor, a bundle, boxes, a tie, a scalar."""
    model = safetensors_file(
        [
            ("big", DType.BF16, (1024, 1024)),
            ("empty", DType.F32, (0, 4)),
            ("norm.bias", DType.F32, (16,)),
            ("norm.weight", DType.F32, (16,)),
        ]
    )
    quarters = tuple(BoxShape((r, c), (2, 2)) for r in (0, 2) for c in (0, 2))
    state = split_state(
        [
            StateTensor("head", DType.F32, (4, 4), storage=1, boxes=quarters),
            StateTensor("input", DType.F32, (4, 4), storage=1, boxes=quarters),
            StateTensor("step", DType.I64, ()),
        ],
        MIB,
    )
    splits = [
        split_bytes("model.safetensors", model),
        split_plain(FilePath("conf/config.json"), 700, MIB),
        state,
    ]
    ids = [fake_ids(splits[0]), fake_ids(splits[1]), fake_ids(state)]
    return manifest_of(splits, ids)
