"""Filling memory with what a plan fetches: straight where that is possible, else by picking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from weightyard.format.dtypes import DType
from weightyard.format.manifest import BlockEntry, Extent
from weightyard.loader.plan import Fetch, Pick
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import ReadReport

Read: TypeAlias = Callable[[Sequence[Wanted]], ReadReport]
"""Fills every buffer, or raises."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Where a fetch goes."""

    fetch: Fetch
    dtype: DType
    memory: memoryview
    """Where the fetch's bytes go, if straight; if some are picked, the tensor's whole memory."""
    put: Callable[[Pick, memoryview], None] | None = None
    """Picks from a run into a tensor that is converted."""

    def pick(self, run: memoryview) -> None:
        """Copy what is wanted out of a run."""
        assert isinstance(self.fetch.goes, Pick)
        if self.put is not None:
            self.put(self.fetch.goes, run)
        else:
            copy_picked(self.fetch.goes, self.dtype, run, self.memory)


def fill(read: Read, blocks: Sequence[BlockEntry], targets: Iterable[Filled]) -> ReadReport:
    """Read all of it, then pick. Raises what the read raises."""
    wanted: list[Wanted] = []
    picks: list[tuple[Filled, memoryview]] = []
    for target in targets:
        run = target.memory
        if isinstance(target.fetch.goes, Pick):
            run = np.empty(target.fetch.length, np.uint8).data
            picks.append((target, run))
        wanted += _wanted(blocks, target.fetch.extents, run)
    report = read(wanted)
    for target, run in picks:
        target.pick(run)
    return report


def copy_picked(pick: Pick, dtype: DType, run: memoryview, memory: memoryview) -> None:
    """Copy elements from a run into a tensor's memory."""
    element = np.dtype((np.void, dtype.bits // 8))
    chosen: np.ndarray = np.ndarray(
        pick.shape, element, run, offset=pick.source, strides=pick.source_strides
    )
    into: np.ndarray = np.ndarray(
        pick.shape, element, memory, offset=pick.into, strides=pick.into_strides
    )
    np.copyto(into, chosen)


def _wanted(
    blocks: Sequence[BlockEntry], extents: Iterable[Extent], into: memoryview
) -> Iterator[Wanted]:
    at = 0
    for extent in extents:
        yield Wanted(blocks[extent.block].id, extent.offset, into[at : at + extent.length])
        at += extent.length
