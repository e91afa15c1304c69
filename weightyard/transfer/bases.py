"""Bases: which block of an older version a new block probably resembles. Pure."""

from __future__ import annotations

from weightyard.format.manifest import Manifest, TensorEntry
from weightyard.format.splitting import Split
from weightyard.names import BlockId


def bases_of(split: Split, parent: Manifest) -> dict[int, BlockId]:
    """Number of a piece → the block at the same tensor and offset of the parent.

    Tensors are the same if file, name, dtype and shape are; blocks of another length, and bundles
    of small tensors, have no base.
    """
    old = {_key(tensor, _path(parent, tensor)): tensor for tensor in parent.tensors}
    paths = [file.path for file in split.files]
    bases: dict[int, BlockId] = {}
    for tensor in split.tensors:
        path = paths[tensor.file] if tensor.file is not None else None
        before = old.get(_key(tensor, path))
        if before is None:
            continue
        there = {(box.offset, box.shape): box.extents for box in before.boxes}
        for box in tensor.boxes:
            extents = there.get((box.offset, box.shape), ())
            for extent, was in zip(box.extents, extents, strict=False):
                raw_bytes = split.pieces[extent.block].raw_bytes
                entry = parent.blocks[was.block]
                if entry.raw_bytes == raw_bytes == extent.length == was.length:
                    bases[extent.block] = entry.id
    return bases


def pieces_alone(split: Split) -> list[int]:
    """Numbers of the pieces that can be bases: those of a single tensor, not of a bundle."""
    return sorted(
        {
            extent.block
            for tensor in split.tensors
            for box in tensor.boxes
            for extent in box.extents
            if extent.length == split.pieces[extent.block].raw_bytes
        }
    )


def _path(manifest: Manifest, tensor: TensorEntry) -> str | None:
    return manifest.files[tensor.file].path if tensor.file is not None else None


def _key(tensor: TensorEntry, path: str | None) -> tuple[object, ...]:
    return path, tensor.name, tensor.dtype, tensor.shape
