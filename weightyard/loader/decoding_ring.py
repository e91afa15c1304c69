"""A ring whose device decodes: planes are merged, and deltas added to their bases, on the device.

The host only checks and decompresses, into the slabs. What is left to do for the device is copied
from there into scratch memory of its own, which is used again and again, and put where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from weightyard.errors import BlockCorrupt
from weightyard.format.block import Encoding
from weightyard.format.manifest import BlockEntry
from weightyard.loader.batches import BATCH_BYTES, Batch
from weightyard.loader.budget import SLABS
from weightyard.loader.changes import Piece
from weightyard.loader.filling import Filled
from weightyard.loader.folding import fold_where_it_lies
from weightyard.loader.merging import put
from weightyard.loader.plan import TensorPlan
from weightyard.loader.report import Tally
from weightyard.loader.ring import Copies, RingPlacer
from weightyard.loader.state import bytes_of
from weightyard.loader.undecoded import Undecoded, pieces_of
from weightyard.names import BlockId

if TYPE_CHECKING:
    import torch


class ReadsUndecoded(Protocol):
    """What reads for such a ring. Thread-safe."""

    @property
    def blocks(self) -> Sequence[BlockEntry]:
        """The version's blocks."""

    def fill(self, targets: Iterable[Filled]) -> None:
        """Fill memory with decoded bytes."""

    def read_undecoded(self, targets: Sequence[Undecoded], *, are_bases: bool = False) -> None:
        """Fill memory with what the device decodes. `are_bases`: of deltas read before."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Pieces of blocks, and for which bytes of a tensor on the device they are."""

    tensor: int
    start: int
    """In the tensor's memory."""
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class _Added:
    """A part of a block that was made of a delta and its base."""

    block_start: int
    """Where the block begins in the tensor, or would."""
    length: int
    encoding: Encoding


class DecodingRing(RingPlacer):
    """Tensors on a device that decodes. That takes memory there: a slab's length and a little."""

    def __init__(
        self,
        plans: Sequence[TensorPlan],
        tally: Tally,
        copies: Copies,
        *,
        dtype: torch.dtype | None = None,
        targets: Mapping[int, torch.Tensor] | None = None,
        slab_bytes: int = BATCH_BYTES,
        slabs: int = SLABS,
    ) -> None:
        super().__init__(
            plans, tally, copies, dtype=dtype, targets=targets, slab_bytes=slab_bytes, slabs=slabs
        )
        self._scratch = self._scratch_of(self.batch_bytes)
        copies.follow()
        self._added: dict[int, list[_Added]] = {}

    def fill_undecoded(self, batch: Batch, reads: ReadsUndecoded) -> None:
        """As `fill`, but the device decodes.

        Not for tensors that are put together on the host or converted on the way: merging and
        adding need the stored form, which would take memory of its own.
        """
        decoded = [part for part in batch.parts if self._is_for_host(part.tensor)]
        if decoded:
            self.fill(Batch(tuple(decoded), (), 0), reads.fill)
        sent = []
        for part in batch.parts:
            if not self._is_for_host(part.tensor):
                assert isinstance(part.fetch.goes, int)
                pieces = pieces_of(part.fetch, reads.blocks)
                sent.append(_Sent(part.tensor, part.fetch.goes, pieces))
        if not sent:
            return
        bases: list[_Sent] = []
        for one, came in zip(sent, self._bring(sent, reads), strict=True):
            for piece, encoding in came.differences:
                assert encoding.base is not None
                start = one.start + piece.into
                base = Piece(0, encoding.base, piece.offset, piece.length)
                bases.append(_Sent(one.tensor, start, (base,)))
                added = _Added(start - piece.offset, piece.length, encoding)
                self._added.setdefault(one.tensor, []).append(added)
        if bases:
            self._bring(bases, reads, adds=True)

    def _is_for_host(self, number: int) -> bool:
        return number in self._picked or number in self._converted

    def finish(self, number: int) -> torch.Tensor:
        """The tensor. Raises BlockCorrupt if a delta and its base do not make the block.

        Checked are blocks that lie in it whole, in however many parts they came: the fold of a
        part is not known.
        """
        self._copies.hand_over()
        blocks: dict[tuple[int, BlockId], list[_Added]] = {}
        for one in self._added.pop(number, ()):
            blocks.setdefault((one.block_start, one.encoding.block), []).append(one)
        for (start, block), parts in blocks.items():
            raw_bytes, fold = parts[0].encoding.raw_bytes, parts[0].encoding.fold
            if sum(part.length for part in parts) != raw_bytes:
                continue
            if fold_where_it_lies(self.bytes_on_device(number, start, raw_bytes)) != fold:
                raise BlockCorrupt(f"block {block}: on the device it has another fold")
        return super().finish(number)

    def _bring(
        self, sent: Sequence[_Sent], reads: ReadsUndecoded, *, adds: bool = False
    ) -> list[Undecoded]:
        """Read into a slab, and queue what becomes of it."""
        came: list[tuple[int, Undecoded]] = []
        with self._slab() as slab:
            at = 0
            for one in sent:
                room = bytes_of(slab.memory[at : at + one.length])
                came.append((at, Undecoded(one.pieces, room)))
                at += one.length
            reads.read_undecoded([undecoded for _, undecoded in came], are_bases=adds)
            placed_bytes = 0 if adds else sum(one.length for one in sent)
            with self._tally.stage("place", placed_bytes), self._queueing:
                for one, (begin, undecoded) in zip(sent, came, strict=True):
                    into = self.bytes_on_device(one.tensor, one.start, one.length)
                    self._queue(slab.memory, begin, undecoded, into, adds=adds)
            slab.busy = self._copies.mark()
        return [undecoded for _, undecoded in came]

    def _queue(
        self,
        memory: torch.Tensor,
        begin: int,
        undecoded: Undecoded,
        into: torch.Tensor,
        *,
        adds: bool,
    ) -> None:
        assert self._scratch is not None
        for run in undecoded.lying():
            room = slice(begin + run.start, begin + run.start + run.length)
            goes = into[run.start : run.start + run.length]
            if run.codec is None and not adds:
                self._copies.copy(goes, memory[room])
            else:
                self._copies.copy(self._scratch[room], memory[room])
                self._copies.run(partial(put, run.codec, self._scratch[room], goes, adds=adds))
