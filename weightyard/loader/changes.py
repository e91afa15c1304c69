"""Changes: which bytes must come so that tensors hold what another version says. Pure.

Blocks are named by their content, so what two versions share is seen without reading either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from weightyard.format.dtypes import DType
from weightyard.format.manifest import BlockEntry, Extent
from weightyard.loader.plan import Pick, TensorPlan
from weightyard.names import BlockId


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a block, and where they are in a tensor's memory."""

    into: int
    block: BlockId
    offset: int
    length: int

    @property
    def end(self) -> int:
        """In the tensor's memory."""
        return self.into + self.length

    def between(self, begin: int, end: int) -> Piece:
        """The part from `begin` to `end` in the tensor's memory."""
        return replace(self, into=begin, offset=self.offset + begin - self.into, length=end - begin)


@dataclass(frozen=True, slots=True)
class Content:
    """What a tensor holds, by the names of blocks: equal contents have equal bytes."""

    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """All its bytes in order; empty if some of them are picked."""
    picked: tuple[tuple[int | Pick, tuple[Piece, ...]], ...] = ()
    """If some bytes are picked: each fetch's place or pick, and the pieces it consists of."""


Holds: TypeAlias = Mapping[str, Content | None]
"""What tensors hold, by name; None: anything."""


@dataclass(frozen=True, slots=True)
class Change:
    """What has to come so that a tensor holds what a version says."""

    plan: TensorPlan
    content: Content
    """What it holds then."""
    before: Content | None
    """What it must hold before; None: all of it comes."""
    pieces: tuple[Piece, ...]
    """What comes, in order; empty for a tensor with picked bytes, of which all comes."""

    @property
    def bytes(self) -> int:
        """How much memory that takes."""
        if self.before is None:
            return self.plan.bytes
        return sum(piece.length for piece in self.pieces)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where what comes begins and ends in the tensor's memory, neighbours as one."""
        if self.before is None:
            return ((0, self.plan.bytes),) if self.plan.bytes else ()
        spans: list[tuple[int, int]] = []
        for piece in self.pieces:
            if spans and spans[-1][1] == piece.into:
                spans[-1] = (spans[-1][0], piece.end)
            else:
                spans.append((piece.into, piece.end))
        return tuple(spans)


def content_of(plan: TensorPlan, blocks: Sequence[BlockEntry]) -> Content:
    """What the tensor of a plan holds."""
    fetched = [
        (fetch.goes, tuple(_pieces(fetch.extents, blocks, fetch.goes))) for fetch in plan.fetches
    ]
    if plan.is_picked:
        return Content(plan.dtype, plan.shape, (), tuple(fetched))
    pieces = sorted((one for _, some in fetched for one in some), key=lambda piece: piece.into)
    return Content(plan.dtype, plan.shape, tuple(pieces))


def plan_changes(
    plans: Iterable[TensorPlan],
    contents: Mapping[str, Content],
    now: Holds,
    patched: Collection[str],
) -> tuple[Change, ...]:
    """What must come so that tensors go from what they hold now to `contents`, both by name.

    `patched`: tensors of which only what differs has to come; of others all does.
    """
    changes = []
    for plan in plans:
        after = contents[plan.name]
        held = {now.get(name) for name in plan.names}
        if held == {after}:
            continue
        before = held.pop() if len(held) == 1 and plan.name in patched else None
        if before is not None and not _is_alike(before, after):
            before = None
        pieces = after.pieces if before is None else tuple(differing(before, after))
        changes.append(Change(plan, after, before, pieces))
    return tuple(changes)


def differing(before: Content, after: Content) -> Iterator[Piece]:
    """What `after` has that `before`, of the same length, does not have in the same place."""
    old = iter(before.pieces)
    was = next(old, None)
    for piece in after.pieces:
        at = piece.into
        while was is not None and at < piece.end:
            end = min(piece.end, was.end)
            if (piece.block, piece.offset - piece.into) != (was.block, was.offset - was.into):
                yield piece.between(at, end)
            at = end
            if was.end <= at:
                was = next(old, None)


def _is_alike(one: Content, other: Content) -> bool:
    """Whether two contents can be compared byte by byte."""
    return (
        (one.dtype, one.shape) == (other.dtype, other.shape) and not one.picked and not other.picked
    )


def _pieces(
    extents: Sequence[Extent], blocks: Sequence[BlockEntry], goes: int | Pick
) -> Iterator[Piece]:
    at = goes if isinstance(goes, int) else 0
    for extent in extents:
        yield Piece(at, blocks[extent.block].id, extent.offset, extent.length)
        at += extent.length
