"""Arriving: bytes of blocks become tensors, in whatever order they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightyard.format.block import aligned
from weightyard.format.manifest import Extent
from weightyard.loader.batches import Batch, Part
from weightyard.loader.filling import Filled
from weightyard.loader.placing import Placer
from weightyard.loader.plan import Fetch, Pick, TensorPlan

Arrived = tuple[Extent, memoryview]
"""Some of a block's bytes."""


@dataclass(frozen=True, slots=True)
class _Need:
    """Bytes of a block that belong into a run of a tensor."""

    offset: int
    end: int
    tensor: int
    fetch: int
    at: int
    """Where they begin in the run."""


class Arriving:
    """Tensors in the making. Is given each byte they need once; others it drops."""

    def __init__(
        self,
        plans: Sequence[TensorPlan],
        placer: Placer,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._plans = plans
        self._placer = placer
        self._progress = progress
        self._needs: dict[int, list[_Need]] = {}
        self._left = [sum(fetch.length for fetch in plan.fetches) for plan in plans]
        self._begun: set[int] = set()
        self._runs: dict[tuple[int, int], tuple[memoryview, int]] = {}
        """Runs to pick from that have come in part, and how many of their bytes have not."""
        for tensor, plan in enumerate(plans):
            for number, fetch in enumerate(plan.fetches):
                at = 0
                for extent in fetch.extents:
                    end = extent.offset + extent.length
                    need = _Need(extent.offset, end, tensor, number, at)
                    self._needs.setdefault(extent.block, []).append(need)
                    at += extent.length

    def take(self, arrived: Iterable[Arrived]) -> list[int]:
        """Put bytes where they belong. Returns the numbers of the tensors that are whole now."""
        done: list[int] = []
        parts: list[Part] = []
        sources: list[memoryview] = []
        used = 0
        for part, source in self._parts(arrived):
            needed = aligned(part.fetch.length)
            if parts and used + needed > self._placer.batch_bytes:
                done += self._place(parts, sources)
                parts, sources, used = [], [], 0
            parts.append(part)
            sources.append(source)
            used += needed
        return done + self._place(parts, sources) if parts else done

    def begin(self, tensors: Iterable[int]) -> None:
        """Have memory made for those of these tensors that have none yet."""
        for tensor in tensors:
            if tensor not in self._begun:
                self._begun.add(tensor)
                self._placer.begin(tensor)

    def empty(self) -> list[int]:
        """The numbers of the tensors that need no byte; they are begun."""
        found = [number for number, plan in enumerate(self._plans) if not plan.fetches]
        self.begin(found)
        return found

    def count(self, parts: Iterable[Part]) -> list[int]:
        """Note runs that are in place. Returns the numbers of the tensors that are whole now."""
        done = []
        for part in parts:
            self._left[part.tensor] -= part.fetch.length
            if not self._left[part.tensor]:
                done.append(part.tensor)
        return done

    def _parts(self, arrived: Iterable[Arrived]) -> Iterator[tuple[Part, memoryview]]:
        for extent, memory in arrived:
            for need in self._needs.get(extent.block, ()):
                begin = max(need.offset, extent.offset)
                end = min(need.end, extent.offset + extent.length)
                if begin >= end:
                    continue
                source = memory[begin - extent.offset : end - extent.offset]
                at = need.at + begin - need.offset
                fetch = self._plans[need.tensor].fetches[need.fetch]
                if isinstance(fetch.goes, Pick):
                    run = self._gather(need, fetch, at, source)
                    if run is not None:
                        yield Part(need.tensor, fetch), run
                    continue
                step = self._placer.batch_bytes
                for start in range(0, source.nbytes, step):
                    piece = source[start : start + step]
                    goes = fetch.goes + at + start
                    yield Part(need.tensor, Fetch((), piece.nbytes, goes)), piece

    def _gather(self, need: _Need, fetch: Fetch, at: int, source: memoryview) -> memoryview | None:
        """Add some of a run to pick from. Returns the run when all of it is there, else None."""
        if source.nbytes == fetch.length:
            return source
        key = need.tensor, need.fetch
        run, left = self._runs.pop(key, (None, fetch.length))
        if run is None:
            run = np.empty(fetch.length, np.uint8).data
        run[at : at + source.nbytes] = source
        left -= source.nbytes
        if not left:
            return run
        self._runs[key] = run, left
        return None

    def _place(self, parts: Sequence[Part], sources: Sequence[memoryview]) -> list[int]:
        def fill(targets: Iterable[Filled]) -> None:
            for target, source in zip(targets, sources, strict=True):
                if isinstance(target.fetch.goes, Pick):
                    target.pick(source)
                else:
                    np.copyto(np.frombuffer(target.memory, np.uint8), source)

        self.begin(part.tensor for part in parts)
        self._placer.fill(Batch(tuple(parts), (), 0), fill)
        if self._progress is not None:
            self._progress(sum(map(self._placed_bytes, parts)))
        return self.count(parts)

    def _placed_bytes(self, part: Part) -> int:
        if isinstance(part.fetch.goes, Pick):
            return math.prod(part.fetch.goes.shape) * self._plans[part.tensor].dtype.bits // 8
        return part.fetch.length
