"""Undecoded: parts of blocks on their way to a device, which merges planes and adds deltas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from weightyard.format.block import CHUNK_BYTES, Codec, Encoding
from weightyard.format.manifest import BlockEntry
from weightyard.format.pack import Placement
from weightyard.loader.changes import Piece
from weightyard.loader.plan import Fetch
from weightyard.names import BlockId
from weightyard.transfer.plan import Wanted, standalone


@dataclass(frozen=True, slots=True)
class UndecodedRun:
    """How a run of bytes lies in memory: as planes of a codec, or as it is."""

    codec: Codec | None
    start: int
    length: int


class Undecoded:
    """Memory to be filled with pieces of blocks, in order, and how they lie there then."""

    def __init__(self, pieces: Sequence[Piece], memory: memoryview) -> None:
        self.pieces = pieces
        self.memory = memory
        self.differences: list[tuple[Piece, Encoding]] = []
        """Pieces of which the memory holds only the difference to a base."""
        self._codecs: dict[tuple[Piece, int], Codec | None] = {}

    def wanted(self, piece: Piece) -> Wanted:
        """What to read for one of them."""
        told = partial(self._note, piece)
        return Wanted(piece.block, piece.offset, self.memory[piece.into : piece.end], told)

    def lying(self) -> Iterator[UndecodedRun]:
        """All of it in order; neighbours that lie alike are one run."""
        last: UndecodedRun | None = None
        for piece in self.pieces:
            for one in self._chunks(piece):
                # Planes are joined only behind whole chunks: that is how they are taken apart.
                is_alike = last is not None and last.codec is one.codec
                if is_alike and last and (one.codec is None or not last.length % CHUNK_BYTES):
                    last = replace(last, length=last.length + one.length)
                    continue
                if last is not None:
                    yield last
                last = one
        if last is not None:
            yield last

    def _chunks(self, piece: Piece) -> Iterator[UndecodedRun]:
        at, end = piece.offset, piece.offset + piece.length
        while at < end:
            chunk = at // CHUNK_BYTES
            until = min(end, (chunk + 1) * CHUNK_BYTES)
            codec = self._codecs.get((piece, chunk))
            yield UndecodedRun(codec, piece.into + at - piece.offset, until - at)
            at = until

    def _note(self, piece: Piece, codec: Codec | None, chunks: range) -> None:
        for chunk in chunks:
            self._codecs[piece, chunk] = codec


def pieces_of(fetch: Fetch, blocks: Sequence[BlockEntry]) -> tuple[Piece, ...]:
    """A run that is fetched, by the names of its blocks."""
    pieces = []
    at = 0
    for extent in fetch.extents:
        pieces.append(Piece(at, blocks[extent.block].id, extent.offset, extent.length))
        at += extent.length
    return tuple(pieces)


def only_deltas(placements: Mapping[BlockId, Sequence[Placement]]) -> dict[BlockId, Placement]:
    """Of each block that is stored only as deltas, the shortest."""
    return {
        block: min(found, key=lambda placement: placement.encoding.stored_bytes)
        for block, found in placements.items()
        if found and not standalone(found)
    }


class Differences:
    """Placements by which a reader gets the bytes of deltas, and leaves their bases to others."""

    def __init__(self, deltas: Mapping[BlockId, Placement]) -> None:
        self._deltas = {
            block: replace(one, encoding=replace(one.encoding, base=None))
            for block, one in deltas.items()
        }

    def placements(
        self, blocks: Sequence[BlockId], *, within_s: float = math.inf
    ) -> Mapping[BlockId, Sequence[Placement]]:
        return {block: [self._deltas[block]] for block in blocks}
