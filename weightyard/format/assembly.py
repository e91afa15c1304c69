"""From splits and the names of their blocks to a manifest (docs/format.md §6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from weightyard.errors import Refused
from weightyard.format.manifest import (
    MANIFEST_FORMAT,
    BlockEntry,
    Box,
    Extent,
    FileEntry,
    Manifest,
    TensorEntry,
    check,
)
from weightyard.format.splitting import Split
from weightyard.names import BlockId


@dataclass(frozen=True, slots=True)
class Share:
    """What one writer has of a version: files and boxes whose extents number its blocks."""

    blocks: tuple[BlockEntry, ...]
    files: tuple[FileEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()


def share_of(split: Split, block_ids: Sequence[BlockId]) -> Share:
    """A split whose pieces have got their names. Several of them may be one block."""
    blocks = (
        BlockEntry(block.hex, piece.raw_bytes)
        for block, piece in zip(block_ids, split.pieces, strict=True)
    )
    return Share(tuple(blocks), split.files, split.tensors)


def manifest_of(splits: Sequence[Split], block_ids: Sequence[Sequence[BlockId]]) -> Manifest:
    """The manifest of a version made of these splits, given the names of their pieces.

    Raises as `joined` does.
    """
    if len({split.block_bytes for split in splits}) != 1:
        raise Refused("a version is made of one or more splits of one block size")
    shares = [share_of(split, ids) for split, ids in zip(splits, block_ids, strict=True)]
    return joined(shares, splits[0].block_bytes)


def joined(shares: Sequence[Share], block_bytes: int) -> Manifest:
    """The manifest of a version made of these shares.

    Equal blocks become one. Boxes of one state-dict tensor that come from several shares (ranks)
    are put together. Raises ManifestInvalid if they do not make a whole version, Refused.
    """
    blocks = _Blocks()
    files = tuple(
        FileEntry(file.path, file.bytes, file.kind, blocks.renumber(file.extents, share.blocks))
        for file, share in sorted(
            ((file, share) for share in shares for file in share.files),
            key=lambda pair: pair[0].path,
        )
    )
    numbers = {file.path: number for number, file in enumerate(files)}
    tensors = sorted(
        (
            (-1 if tensor.file is None else numbers[share.files[tensor.file].path], tensor, share)
            for share in shares
            for tensor in share.tensors
        ),
        key=lambda row: (row[0], row[1].name),
    )
    entries = tuple(
        _joined(file, [(tensor, share.blocks) for _, tensor, share in same], blocks)
        for (file, _), same in groupby(tensors, key=lambda row: (row[0], row[1].name))
    )
    manifest = Manifest(MANIFEST_FORMAT, block_bytes, tuple(blocks.entries), files, entries)
    check(manifest)
    return manifest


class _Blocks:
    """Lists blocks in the order in which extents first need them."""

    def __init__(self) -> None:
        self.entries: list[BlockEntry] = []
        self._numbers: dict[str, int] = {}

    def renumber(
        self, extents: Iterable[Extent], pieces: Sequence[BlockEntry]
    ) -> tuple[Extent, ...]:
        """Extents that number pieces, made to number blocks; neighbours become one."""
        merged: list[Extent] = []
        block, start, end = -1, 0, 0
        for extent in extents:
            number = self._number(pieces[extent.block])
            if number != block or extent.offset != end:
                if end > start:
                    merged.append(Extent(block, start, end - start))
                block, start = number, extent.offset
            end = extent.offset + extent.length
        if end > start:
            merged.append(Extent(block, start, end - start))
        return tuple(merged)

    def _number(self, piece: BlockEntry) -> int:
        number = self._numbers.setdefault(piece.hex, len(self.entries))
        if number == len(self.entries):
            self.entries.append(piece)
        elif self.entries[number].raw_bytes != piece.raw_bytes:
            raise Refused(f"block {piece.hex} is named for pieces of different lengths")
        return number


def _joined(
    file: int, shares: Sequence[tuple[TensorEntry, Sequence[BlockEntry]]], blocks: _Blocks
) -> TensorEntry:
    """One tensor from the shares of it that different splits have."""
    first = shares[0][0]
    if any(
        (share.dtype, share.shape, share.tied) != (first.dtype, first.shape, first.tied)
        for share, _ in shares
    ):
        raise Refused(f"tensor {first.name} differs from split to split in dtype, shape or tie")
    boxes = sorted(
        ((box, pieces) for share, pieces in shares for box in share.boxes),
        key=lambda pair: pair[0].offset,
    )
    return TensorEntry(
        first.name,
        None if file < 0 else file,
        first.dtype,
        first.shape,
        tuple(Box(b.offset, b.shape, blocks.renumber(b.extents, pieces)) for b, pieces in boxes),
        first.tied,
    )
