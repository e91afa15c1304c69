"""Tensors out of the store: batches are read in the background, tensors come as they are whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from weightyard.errors import Damaged
from weightyard.format.manifest import BlockEntry, Extent, FileEntry, Manifest, TensorEntry
from weightyard.format.pack import Placement
from weightyard.loader.asked import Asked
from weightyard.loader.batches import Batch, all_at_once, one_by_one
from weightyard.loader.budget import Budget
from weightyard.loader.changes import Piece
from weightyard.loader.converting import converted, widening
from weightyard.loader.decoding_ring import DecodingRing
from weightyard.loader.delivering import deliver, wait_for
from weightyard.loader.filling import Filled, Read, fill
from weightyard.loader.in_packs import checked, raw_chunks_of
from weightyard.loader.leases import held
from weightyard.loader.loaded import Loaded
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.placing import HostPlacer, Placer
from weightyard.loader.plan import TensorPlan, cut
from weightyard.loader.proving import read_proved
from weightyard.loader.report import LoadReport, Tally
from weightyard.loader.ring import AcceleratorCopies, RingPlacer
from weightyard.loader.undecoded import Differences, Undecoded, only_deltas
from weightyard.loader.verified import Verified
from weightyard.logs import Log
from weightyard.names import BlockId
from weightyard.records import Version
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue, Placements
from weightyard.transfer.plan import GAP_BYTES, Wanted, wanted_of
from weightyard.transfer.reader import Reader, ReadReport

if TYPE_CHECKING:
    import torch

_log = Log(__name__)

_T = TypeVar("_T")


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
        on_loaded: Callable[[Loaded], None] | None = None,
        expect: Callable[[Version], None] = lambda version: None,
        cache: Path | None = None,
    ) -> None:
        """`on_loaded` is told of what was loaded, when that is reported.

        `expect` is told whenever packs of the version may be asked for: what remembers where they
        lie forgets versions that nobody read for long. `cache`: where this node remembers which
        packs in a folder it has checked; None: all is checked.
        """
        super().__init__(version, manifest, tally)
        self.store = store
        self.catalogue = catalogue
        self.settings = settings
        self._on_loaded = on_loaded
        self._loaded = Loaded(manifest)
        self._expect = expect
        self._cache = cache
        self._foreseen: dict[BlockId, Sequence[Placement]] = {}

    def expect(self) -> None:
        """Say that packs of it may be asked for."""
        self._expect(self.version)

    def head(self, file: FileEntry, length: int, asked: Asked) -> bytes:
        into = np.empty(length, np.uint8).data
        wanted = wanted_of(self.manifest, tuple(cut(file.extents, 0, length)), into)
        left_s = asked.deadline.left(f"reading {file.path}")
        self.expect()
        self.reader(self.catalogue).read(wanted, timeout_s=left_s)
        return bytes(into)

    def open_files(self, files: Iterable[int | None]) -> None:
        """Nothing is to be opened: packs have names of their own, and a lease keeps them."""

    def tensors(
        self, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        # A caller that limits reading ahead, wants tensors in order or blocks proved, gets a copy.
        is_plain = to.device.type == "cpu" and to.ahead_bytes is None and asked.verify == "fast"
        if is_plain and isinstance(self.store, LocalStore):
            return self._mapped_or_read(self.store.folder, plans, asked, to)
        return self._read(plans, asked, to)

    def _mapped_or_read(
        self, folder: Path, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        """Out of packs on this host: what lies there just as it is wanted is not copied."""
        with self.tally.stage("plan"):
            fetches = (fetch for plan in plans for fetch in plan.fetches)
            blocks = self.blocks_of(extent for one in fetches for extent in one.extents)
            placements = self.foreseen([block.id for block in blocks], asked)
            copied = converted_for(plans, asked, to) | _targets(plans, to).keys()
            lying = [
                (plan, raw_chunks_of(plan, self.manifest.blocks, placements.known))
                for number, plan in enumerate(plans)
                if number not in copied
            ]
        mapped: dict[str, torch.Tensor] = {}
        verified = Verified(self._cache, folder) if self._cache is not None else None
        with self.tally.stage("read"), closing(checked(folder, lying, verified)) as found:
            for plan, tensor, report in found:
                self.tally.read(report)
                mapped[plan.name] = tensor
                if asked.progress is not None:
                    asked.progress(plan.bytes)
                asked.deadline.left("loading")
        left = [plan for plan in plans if plan.name not in mapped]
        for plan in plans:
            if plan.name in mapped:
                self.tally.delivered(len(plan.names), plan.bytes)
                yield plan, self._noted(plan, mapped.pop(plan.name))
        if left:
            yield from self._read(left, asked, to, placements)

    def _read(
        self,
        plans: Sequence[TensorPlan],
        asked: Asked,
        to: Destination,
        placements: Foreseen | None = None,
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        placer = placer_for(plans, asked, to, self.tally)
        beside = converted_for(plans, asked, to)
        ahead = asked.budget.ahead_bytes(to.ahead_bytes)
        if to.ahead_bytes is not None and beside:
            # What is ahead takes its converted length and, for a while, its stored length too.
            ahead = 3 * ahead // 4 // widening(plans, asked.torch_dtype)
        batch_bytes = min(asked.budget.batch_bytes(ahead), placer.batch_bytes)
        block_bytes = self.manifest.block_bytes
        # On the host bytes are received right in the tensor. On a device, and where whole blocks
        # are read to prove a part of them, they are copied, through bounded memory.
        is_straight = to.device.type == "cpu" and asked.verify == "fast"
        if is_straight and to.ahead_bytes is None:
            batches = all_at_once(plans, batch_bytes, block_bytes, beside)
        else:
            batches = one_by_one(plans, batch_bytes, block_bytes)
        return self.place_all(plans, asked, batches, placer, ahead, placements)

    def blocks_of(self, extents: Iterable[Extent]) -> list[BlockEntry]:
        """The blocks in which these lie, each once."""
        numbers = {extent.block for extent in extents}
        return [self.manifest.blocks[number] for number in sorted(numbers)]

    def reader(
        self,
        placements: Placements,
        gap_bytes: int = GAP_BYTES,
        budget: Budget | None = None,
    ) -> Reader:
        budget = budget or Budget()
        return Reader(
            self.store,
            placements,
            settings=self.settings,
            max_host_bytes=budget.reading_bytes,
            decoders=budget.decoders,
            gap_bytes=gap_bytes,
            on_event=self.tally.say,
        )

    def foresee(self, entries: Iterable[TensorEntry], asked: Asked) -> None:
        extents = (extent for one in entries for box in one.boxes for extent in box.extents)
        blocks = [block.id for block in self.blocks_of(extents)]
        found = Foreseen(self.catalogue, blocks, asked.deadline).known
        bases = [base for base in bases_of(found) if base not in found]
        self._foreseen.update(found)
        self._foreseen.update(Foreseen(self.catalogue, bases, asked.deadline).known)

    def foreseen(self, blocks: Sequence[BlockId], asked: Asked) -> Foreseen:
        """Where blocks lie, for one load; those that were foreseen are not asked for again."""
        return Foreseen(self.catalogue, blocks, asked.deadline, self._foreseen)

    def recheck(self) -> None:
        """Nothing is kept here: every read is checked."""

    def held(self, deadline: Deadline = NEVER) -> AbstractContextManager[object]:
        return held(self.catalogue, self.version.ref, deadline)

    def report(self, device: object, **more: Any) -> LoadReport:
        report = self.tallied(device, **more)
        if self._on_loaded is not None:
            self._on_loaded(self._loaded)
        return report

    def place_all(
        self,
        plans: Sequence[TensorPlan],
        asked: Asked,
        batches: Iterable[Batch],
        placer: Placer,
        ahead_bytes: int,
        placements: Foreseen | None = None,
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        """Read batches, at most so many bytes ahead of the caller."""
        loading = _Loading(self, plans, asked, placer, placements)
        placed = deliver(
            batches,
            placer,
            loading.fill_batch,
            ahead_bytes=ahead_bytes,
            deadline=asked.deadline,
            stop=loading.stop.cancel,
        )
        with closing(placed):
            for number, tensor in placed:
                self.tally.delivered(len(plans[number].names), plans[number].bytes)
                yield plans[number], self._noted(plans[number], tensor)
                del tensor  # from here on only the caller has it

    def _noted(self, plan: TensorPlan, tensor: torch.Tensor) -> torch.Tensor:
        if self._on_loaded is not None:
            self._loaded.note(plan, tensor)
        return tensor


def placer_for(
    plans: Sequence[TensorPlan],
    asked: Asked,
    to: Destination,
    tally: Tally,
    *,
    by_group: bool = False,
) -> Placer:
    """What makes tensors where they are to be. `by_group`: as of `Budget.slab_bytes`."""
    dtype, targets = asked.torch_dtype, _targets(plans, to)
    if to.device.type == "cpu":
        batch_bytes = asked.budget.batch_bytes(asked.budget.ahead_bytes())
        return HostPlacer(plans, tally, dtype=dtype, targets=targets, batch_bytes=batch_bytes)
    ring = DecodingRing if asked.device_decode else RingPlacer
    return ring(
        plans,
        tally,
        AcceleratorCopies(to.device),
        dtype=dtype,
        targets=targets,
        slab_bytes=asked.budget.slab_bytes(device_decode=asked.device_decode, by_group=by_group),
    )


def converted_for(plans: Sequence[TensorPlan], asked: Asked, to: Destination) -> frozenset[int]:
    """The numbers of the tensors that are not as they are stored. Raises Unsupported."""
    return converted(plans, asked.torch_dtype, _targets(plans, to))


def _targets(plans: Sequence[TensorPlan], to: Destination) -> dict[int, torch.Tensor]:
    return {
        number: to.targets[plan.name]
        for number, plan in enumerate(plans)
        if plan.name in to.targets
    }


class Reading:
    """Reads some of a version's blocks, for one load. Thread-safe."""

    def __init__(
        self,
        origin: StoreOrigin,
        asked: Asked,
        extents: Iterable[Extent],
        gap_bytes: int = GAP_BYTES,
        placements: Foreseen | None = None,
    ) -> None:
        """`extents`: what is going to be read; `gap_bytes`: as of a Reader; `placements`: of the
        blocks these extents lie in, if they were looked up already."""
        self.stop = Cancel()
        self._origin = origin
        self._asked = asked
        blocks = origin.blocks_of(extents)
        self._sizes = {block.id: block.raw_bytes for block in blocks}
        if placements is None:
            with origin.tally.stage("plan"):
                placements = origin.foreseen(list(self._sizes), asked)
        self._reader = origin.reader(placements, gap_bytes, asked.budget)
        self._deltas = only_deltas(placements.known) if asked.device_decode else {}
        self._reader_of_differences = origin.reader(
            Differences(self._deltas), gap_bytes, asked.budget
        )

    @property
    def blocks(self) -> Sequence[BlockEntry]:
        return self._origin.manifest.blocks

    def fill(self, targets: Iterable[Filled]) -> None:
        """Fill memory with what is fetched for it. Raises as `Reader.read`."""
        read: Read = self._read
        if self._asked.verify == "full":
            read = partial(read_proved, self._read, self._sizes)
        with self._origin.tally.stage("read"):
            fill(read, self._origin.manifest.blocks, targets)

    def read_undecoded(self, targets: Sequence[Undecoded], *, are_bases: bool = False) -> None:
        """Fill memory with what a device will decode. Raises as `Reader.read`.

        Of blocks that are stored only as deltas: the differences. Bases do not count as progress.
        """
        straight: list[Wanted] = []
        deltas: list[tuple[Undecoded, Piece]] = []
        for target in targets:
            for piece in target.pieces:
                if piece.block in self._deltas:
                    deltas.append((target, piece))
                else:
                    straight.append(target.wanted(piece))
        with self._origin.tally.stage("read"):
            if straight:
                self._read(straight, are_bases=are_bases)
            if deltas:
                self._read_differences(deltas)

    def _read_differences(self, deltas: Sequence[tuple[Undecoded, Piece]]) -> None:
        wanted = [target.wanted(piece) for target, piece in deltas]
        try:
            self._read(wanted, self._reader_of_differences)
        except Damaged as why:  # they may lie elsewhere by now
            _log.info("load.deltas_unusable", version=self._origin.version.ref, reason=why)
            self._read(wanted)
        else:
            for target, piece in deltas:
                target.differences.append((piece, self._deltas[piece.block].encoding))

    def wait(self, future: Future[_T]) -> _T:
        """The result of a thread that reads. Raises what it raises, DeadlineExceeded."""
        return wait_for(future, self._asked.deadline)

    def _read(
        self, wanted: Sequence[Wanted], reader: Reader | None = None, *, are_bases: bool = False
    ) -> ReadReport:
        self._origin.expect()
        report = (reader or self._reader).read(
            wanted,
            None if are_bases else self._asked.progress,
            timeout_s=self._asked.deadline.left("loading"),
            cancel=self.stop,
        )
        if are_bases:
            report.raw_bytes = report.decoded_bytes = 0  # bases hold no bytes of the tensors
        self._origin.tally.read(report)
        return report


class _Loading(Reading):
    """What the threads of one load share."""

    def __init__(
        self,
        origin: StoreOrigin,
        plans: Sequence[TensorPlan],
        asked: Asked,
        placer: Placer,
        placements: Foreseen | None,
    ) -> None:
        fetches = (fetch for plan in plans for fetch in plan.fetches)
        extents = (extent for one in fetches for extent in one.extents)
        super().__init__(origin, asked, extents, placements=placements)
        self._placer = placer

    def fill_batch(self, batch: Batch) -> None:
        if not batch.parts:
            return
        if isinstance(self._placer, DecodingRing):
            self._placer.fill_undecoded(batch, self)
        else:
            self._placer.fill(batch, self.fill)


def bases_of(placements: Mapping[BlockId, Sequence[Placement]]) -> set[BlockId]:
    """The bases of all deltas among these."""
    bases = (place.encoding.base for places in placements.values() for place in places)
    return {base for base in bases if base is not None}


class Foreseen:
    """Placements asked for together, before a load asks for them batch by batch. Thread-safe.

    Each is given out once: whoever asks again did not find the block there, so the catalogue is
    asked.
    """

    def __init__(
        self,
        catalogue: Placements,
        blocks: Sequence[BlockId],
        deadline: Deadline = NEVER,
        before: dict[BlockId, Sequence[Placement]] | None = None,
    ) -> None:
        """`before`: what is known already; blocks of it that moved get their new placements."""
        self._catalogue = catalogue
        self._before = {} if before is None else before
        self._known = {block: self._before[block] for block in blocks if block in self._before}
        if unknown := [block for block in blocks if block not in self._known]:
            left_s = deadline.left("asking where blocks lie")
            self._known.update(catalogue.placements(unknown, within_s=left_s))
        for base in bases_of(self._known):
            if base in self._before:
                self._known.setdefault(base, self._before[base])

    @property
    def known(self) -> Mapping[BlockId, Sequence[Placement]]:
        """Those not given out yet."""
        return self._known

    def placements(
        self, blocks: Sequence[BlockId], *, within_s: float = math.inf
    ) -> Mapping[BlockId, Sequence[Placement]]:
        taken = {block: self._known.pop(block, None) for block in blocks}
        found = {block: places for block, places in taken.items() if places is not None}
        unknown = [block for block in taken if block not in found]
        if not unknown:
            return found
        fresh = self._catalogue.placements(unknown, within_s=within_s)
        self._before.update((block, fresh[block]) for block in fresh if block in self._before)
        return {**found, **fresh}
