"""Tensors out of the store: batches are read in the background, tensors come as they are whole."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from weightyard.errors import DeadlineExceeded
from weightyard.format.block import MIB
from weightyard.format.manifest import Extent, FileEntry, Manifest
from weightyard.format.pack import Placement
from weightyard.loader.asked import Asked
from weightyard.loader.batches import (
    AHEAD_BYTES,
    BATCH_BYTES,
    Batch,
    all_at_once,
    one_by_one,
)
from weightyard.loader.filling import Filled, Read, fill
from weightyard.loader.leases import held
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.placing import HostPlacer, Placer
from weightyard.loader.plan import TensorPlan, cut
from weightyard.loader.proving import read_proved
from weightyard.loader.report import LoadReport, Tally
from weightyard.names import BlockId
from weightyard.records import Version
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue, Placements
from weightyard.transfer.plan import Wanted, wanted_of
from weightyard.transfer.reader import Reader, ReadReport

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

_IN_FLIGHT = 2
"""Batches read at once, so that the last requests of one do not leave the link idle."""


class StoreOrigin(Origin):
    """A version in a store."""

    def __init__(
        self,
        version: Version,
        manifest: Manifest,
        tally: Tally,
        store: Store,
        catalogue: Catalogue,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(version, manifest, tally)
        self.store = store
        self.catalogue = catalogue
        self.settings = settings

    def head(self, file: FileEntry, length: int, asked: Asked) -> bytes:
        into = np.empty(length, np.uint8).data
        wanted = wanted_of(self.manifest, tuple(cut(file.extents, 0, length)), into)
        left_s = asked.deadline.left(f"reading {file.path}")
        self.reader(self.catalogue).read(wanted, timeout_s=left_s)
        return bytes(into)

    def tensors(
        self, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        placer = placer_for(plans, asked, to, self.tally)
        ahead = AHEAD_BYTES if to.ahead_bytes is None else to.ahead_bytes
        # On the host a tensor lies where its bytes are received. Elsewhere, with a cast, and where
        # whole blocks are wanted to prove some of their bytes, there is a copy, which is bounded.
        is_straight = to.device.type == "cpu" and asked.dtype is None and asked.verify == "fast"
        if is_straight and to.ahead_bytes is None:
            batches = all_at_once(plans)
        else:
            batch_bytes = max(MIB, min(BATCH_BYTES, ahead // 4))
            batches = one_by_one(plans, batch_bytes, self.manifest.block_bytes)
        return self.place_all(plans, asked, batches, placer, ahead)

    def reader(self, placements: Placements) -> Reader:
        return Reader(self.store, placements, settings=self.settings)

    def held(self) -> AbstractContextManager[object]:
        return held(self.catalogue, self.version.ref)

    def report(self, device: object, **more: Any) -> LoadReport:
        return self.tallied(device, **more)

    def place_all(
        self,
        plans: Sequence[TensorPlan],
        asked: Asked,
        batches: Iterable[Batch],
        placer: Placer,
        ahead_bytes: int,
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        """Read batches, at most so many bytes ahead of the caller."""
        loading = _Loading(self, plans, asked, placer)
        pool = ThreadPoolExecutor(_IN_FLIGHT, "weightyard-load")
        running: deque[tuple[Batch, Future[None]]] = deque()
        ahead = 0
        upcoming = iter(batches)
        batch = next(upcoming, None)
        try:
            while batch is not None or running:
                while batch is not None and (not running or ahead + batch.bytes <= ahead_bytes):
                    loading.begin(batch)
                    running.append((batch, pool.submit(loading.fill_batch, batch)))
                    ahead += batch.bytes
                    batch = next(upcoming, None)
                done, future = running.popleft()
                loading.wait(future)
                for number in done.done:
                    self.tally.delivered(len(plans[number].names), plans[number].bytes)
                    yield plans[number], placer.finish(number)
                ahead -= done.bytes
        finally:
            loading.stop.cancel()
            pool.shutdown(wait=True, cancel_futures=True)
            placer.close()


def placer_for(plans: Sequence[TensorPlan], asked: Asked, to: Destination, tally: Tally) -> Placer:
    """What makes tensors where they are to be."""
    dtype = asked.torch_dtype
    targets = {
        number: to.targets[plan.name]
        for number, plan in enumerate(plans)
        if plan.name in to.targets
    }
    if to.device.type == "cpu":
        return HostPlacer(plans, tally, dtype=dtype, targets=targets)
    from weightyard.loader.ring import AcceleratorCopies, RingPlacer

    return RingPlacer(plans, tally, AcceleratorCopies(to.device), dtype=dtype, targets=targets)


class Reading:
    """Reads some of a version's blocks, for one load. Thread-safe."""

    def __init__(self, origin: StoreOrigin, asked: Asked, extents: Iterable[Extent]) -> None:
        """`extents`: what is going to be read."""
        self.stop = Cancel()
        self._origin = origin
        self._asked = asked
        numbers = {extent.block for extent in extents}
        blocks = [origin.manifest.blocks[number] for number in sorted(numbers)]
        self._sizes = {block.id: block.raw_bytes for block in blocks}
        with origin.tally.stage("plan"):
            placements = Foreseen(origin.catalogue, list(self._sizes))
        self._reader = origin.reader(placements)

    def fill(self, targets: Iterable[Filled]) -> None:
        """Fill memory with what is fetched for it. Raises as `Reader.read`."""
        read: Read = self._read
        if self._asked.verify == "full":
            read = partial(read_proved, self._read, self._sizes)
        with self._origin.tally.stage("read"):
            fill(read, self._origin.manifest.blocks, targets)

    def wait(self, future: Future[_T]) -> _T:
        """What a thread that reads comes to. Raises what it raises, DeadlineExceeded."""
        left_s = self._asked.deadline.left("loading")
        try:
            return future.result(None if math.isinf(left_s) else left_s)
        except FutureTimeout:
            raise DeadlineExceeded("no time left while loading") from None

    def _read(self, wanted: Sequence[Wanted]) -> ReadReport:
        report = self._reader.read(
            wanted,
            self._asked.progress,
            timeout_s=self._asked.deadline.left("loading"),
            cancel=self.stop,
        )
        self._origin.tally.read(report)
        return report


class _Loading(Reading):
    """What the threads of one load share."""

    def __init__(
        self, origin: StoreOrigin, plans: Sequence[TensorPlan], asked: Asked, placer: Placer
    ) -> None:
        fetches = (fetch for plan in plans for fetch in plan.fetches)
        super().__init__(origin, asked, (extent for one in fetches for extent in one.extents))
        self._placer = placer
        self._begun: set[int] = set()

    def begin(self, batch: Batch) -> None:
        """Memory for the tensors of which a batch has the first part, or that have none."""
        for number in (*(part.tensor for part in batch.parts), *batch.done):
            if number not in self._begun:
                self._begun.add(number)
                self._placer.begin(number)

    def fill_batch(self, batch: Batch) -> None:
        if batch.parts:
            self._placer.fill(batch, self.fill)


class Foreseen:
    """Placements asked for together, before a load asks for them batch by batch. Thread-safe.

    Each is given out once: who asks again did not find the block there, so the catalogue is asked.
    """

    def __init__(self, catalogue: Placements, blocks: Sequence[BlockId]) -> None:
        self._catalogue = catalogue
        self._known = dict(catalogue.placements(blocks))

    def placements(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        taken = {block: self._known.pop(block, None) for block in blocks}
        found = {block: places for block, places in taken.items() if places is not None}
        unknown = [block for block in taken if block not in found]
        return {**found, **(self._catalogue.placements(unknown) if unknown else {})}
