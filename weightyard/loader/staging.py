"""Staging: what changed is brought into host memory, whole and checked, before anyone sees it.

A delta is used where its base lies in a resident tensor: then only the difference travels. The
base is checked by its fold where it lies, and what came of it by the name of its block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from weightyard.codec.arena import ARENA_BYTES
from weightyard.errors import Damaged, TooLarge
from weightyard.format.block import MIB, block_id
from weightyard.format.manifest import BlockEntry, TensorEntry
from weightyard.format.pack import Placement
from weightyard.loader.batches import one_by_one
from weightyard.loader.changes import Change, Content, Holds
from weightyard.loader.filling import Filled, Read, fill
from weightyard.loader.folding import fold_where_it_lies
from weightyard.loader.plan import PICK_BYTES, Pick
from weightyard.loader.proving import read_proved
from weightyard.loader.resident import Resident, ResidentBlock, raw_bytes
from weightyard.loader.state import torch_dtype
from weightyard.loader.stored import Foreseen
from weightyard.loader.undecoded import Differences
from weightyard.logs import Log
from weightyard.names import BlockId
from weightyard.records import Version
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Placements
from weightyard.transfer.memory import SpareMemory
from weightyard.transfer.plan import RUN_BYTES, Wanted, standalone
from weightyard.transfer.reader import MAX_HOST_BYTES, Reader, ReadReport, ReadsBlocks
from weightyard.transfer.report import OnEvent

if TYPE_CHECKING:
    import torch

_log = Log(__name__)

WORKING_BYTES = 64 * MIB
"""What reading needs besides the memory of what is read. No more is kept for the next version."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How working memory is divided."""

    reading_bytes: int = MAX_HOST_BYTES // 2
    decoders: int | None = None
    """The most threads that decode, each with scratch memory; None: one for each core."""
    picked_bytes: int = 2 * PICK_BYTES
    """Of runs out of which bytes are picked."""
    proved_bytes: float = math.inf
    """Of blocks that are read whole to prove some of their bytes."""
    service_bytes: float = math.inf
    """Of blocks that come through the service: they come whole and decoded."""

    @classmethod
    def within(cls, max_host_bytes: int | None) -> Shares:
        """A quarter of WORKING_BYTES for each, where there is a bound."""
        if max_host_bytes is None:
            return cls()
        each = WORKING_BYTES // 4
        return cls(each, max(1, each // ARENA_BYTES), each, each, 2 * each)


_PREPARED = 4
"""Runs for which there is memory beforehand: about as many as are under way at once."""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor's change in host memory."""

    change: Change
    parts: tuple[tuple[int, torch.Tensor], ...]
    """Bytes, each run with where it begins in the tensor's memory."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.change.plan.names

    def put(self, resident: Resident) -> None:
        """Have the resident tensor hold it."""
        if self.change.before is None:
            for slot in resident.slots(self.names):
                slot.take(self._all())
            return
        memory = raw_bytes(resident.slot(self.names[0]).local)
        for start, part in self.parts:
            memory[start : start + part.numel()].copy_(part)

    def whole(self, resident: Resident) -> torch.Tensor:
        """All of the tensor as it will be, on the host; the resident one stays as it is."""
        if self.change.before is None:
            return self._all()
        tensor = resident.slot(self.names[0]).local.to("cpu", copy=True)
        memory = raw_bytes(tensor)
        for start, part in self.parts:
            memory[start : start + part.numel()].copy_(part)
        return tensor

    def _all(self) -> torch.Tensor:
        import torch

        plan = self.change.plan
        dtype = torch_dtype(plan.dtype)
        if not self.parts:
            return torch.empty(plan.shape, dtype=dtype)
        return self.parts[0][1].view(dtype).view(plan.shape)


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that can be applied without reading anything."""

    version: Version
    contents: Mapping[str, Content]
    """What every tensor holds then, by name."""
    tensors: tuple[StagedTensor, ...]
    entries: Sequence[TensorEntry]
    """All that was asked for of the version."""
    report: ReadReport = field(default_factory=ReadReport)
    """What it took to bring it."""

    def fits(self, now: Holds) -> bool:
        """Whether tensors hold the version once it is applied to what they hold now."""
        comes = {name: one.change for one in self.tensors for name in one.names}
        return all(
            now.get(name) == content
            or (name in comes and comes[name].before in (None, now.get(name)))
            for name, content in self.contents.items()
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """How to bring what changed."""

    source: Store | ReadsBlocks
    """The store, or where it cannot be reached, what else reads blocks of the version."""
    catalogue: Placements
    max_host_bytes: int | None = None
    verify: Literal["fast", "full"] = "fast"
    on_event: OnEvent | None = None
    settings: Settings | None = None
    spare: SpareMemory = field(default_factory=SpareMemory)
    """Working memory, for whatever is brought next."""

    def bring(
        self,
        version: Version,
        changes: Sequence[Change],
        blocks: Sequence[BlockEntry],
        resident: Resident,
        now: Holds,
        cancel: Cancel,
    ) -> tuple[tuple[StagedTensor, ...], ReadReport]:
        """All of it, or an error; `now` is what the resident tensors hold.

        Raises TooLarge before anything is read, and as a read does.
        """
        needed = sum(change.bytes for change in changes)
        budget = self.max_host_bytes
        if budget is not None and needed + WORKING_BYTES > budget:
            raise TooLarge(
                f"{version.ref} changes {needed} bytes; with {WORKING_BYTES} to read them that is "
                f"over max_host_bytes={budget}: raise it, or load the version anew"
            )
        staged = tuple(StagedTensor(change, tuple(_memory(change))) for change in changes)
        sizes = {block.id: block.raw_bytes for block in blocks}
        bringing = _Bringing(self, resident, resident.lying(now), sizes, cancel)
        bringing.read_pieces([wanted for one in staged for wanted in _wanted(one)])
        bringing.read_picked(blocks, [one for one in staged if one.change.content.picked])
        return staged, bringing.report


@dataclass(frozen=True, slots=True)
class _Delta:
    """A placement of a block, and where the base lies that it needs."""

    placement: Placement
    base: BlockId
    lying: ResidentBlock

    @property
    def stored_bytes(self) -> int:
        return self.placement.encoding.stored_bytes


class _Bringing:
    """One call of bring."""

    def __init__(
        self,
        stage: Stage,
        resident: Resident,
        lying: Mapping[BlockId, ResidentBlock],
        sizes: Mapping[BlockId, int],
        cancel: Cancel,
    ) -> None:
        self.report = ReadReport()
        self._stage = stage
        self._resident = resident
        self._lying = lying
        self._sizes = sizes
        self._cancel = cancel
        self._shares = Shares.within(stage.max_host_bytes)
        self._placements: Placements = stage.catalogue

    def read_pieces(self, wanted: Sequence[Wanted]) -> None:
        deltas = self._usable_deltas(wanted)
        by_delta: list[Wanted] = []
        rest: list[Wanted] = []
        for one in wanted:
            (by_delta if one.block in deltas and self._is_whole(one) else rest).append(one)
        rest += self._read_deltas(by_delta, deltas)
        if rest:
            self._read_full(rest)

    def read_picked(self, blocks: Sequence[BlockEntry], staged: Sequence[StagedTensor]) -> None:
        """Tensors of which bytes are picked out of longer runs, some at a time."""
        plans = [one.change.plan for one in staged]
        for batch in one_by_one(plans, self._shares.picked_bytes):
            targets = []
            for part in batch.parts:
                memory, goes = _view(staged[part.tensor].parts[0][1]), part.fetch.goes
                if not isinstance(goes, Pick):
                    memory = memory[goes : goes + part.fetch.length]
                targets.append(Filled(part.fetch, plans[part.tensor].dtype, memory))
            fill(self._read_full, blocks, targets)

    def _read_full(self, wanted: Sequence[Wanted]) -> ReadReport:
        read: Read = partial(self._read, self._placements)
        if self._stage.verify != "full":
            return read(wanted)
        report = ReadReport()
        for some in self._provable(wanted):
            report += read_proved(read, self._sizes, some)
        return report

    def _provable(self, wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
        """What is proved at a time: there must be room for blocks of which only some is wanted."""
        some = [one for one in wanted if self._is_whole(one)]
        seen: set[BlockId] = set()
        room = self._shares.proved_bytes
        for one in wanted:
            if self._is_whole(one):
                continue
            if one.block not in seen:
                if seen and self._sizes[one.block] > room:
                    yield some
                    some, seen, room = [], set(), self._shares.proved_bytes
                seen.add(one.block)
                room -= self._sizes[one.block]
            some.append(one)
        if some:
            yield some

    def _read(self, placements: Placements, wanted: Sequence[Wanted]) -> ReadReport:
        stage, source = self._stage, self._stage.source
        if isinstance(source, Store):
            reader = Reader(
                source,
                placements,
                settings=stage.settings,
                max_host_bytes=self._shares.reading_bytes,
                decoders=self._shares.decoders,
                on_event=stage.on_event,
                spare=stage.spare,
            )
            report = reader.read(wanted, cancel=self._cancel)
        else:
            report = ReadReport()
            for some in self._by_blocks(wanted):
                report += source.read(some, lambda done_bytes: self._cancel.check("reading"))
        self.report += report
        return report

    def _by_blocks(self, wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
        """What a service is asked for at a time: there must be room for whole blocks."""
        by_block: dict[BlockId, list[Wanted]] = {}
        for one in wanted:
            by_block.setdefault(one.block, []).append(one)
        some: list[Wanted] = []
        room = self._shares.service_bytes
        for block, parts in by_block.items():
            if some and self._sizes[block] > room:
                yield some
                some, room = [], self._shares.service_bytes
            room -= self._sizes[block]
            some += parts
        if some:
            yield some

    def _is_whole(self, wanted: Wanted) -> bool:
        return wanted.into.nbytes == self._sizes[wanted.block]

    def _usable_deltas(self, wanted: Sequence[Wanted]) -> dict[BlockId, _Delta]:
        """Blocks that are cheaper as a delta whose base lies unchanged in a resident tensor.

        Only the store has deltas; whatever else reads blocks gives them whole.
        """
        lying = self._lying
        if not lying or not isinstance(self._stage.source, Store):
            return {}
        foreseen = Foreseen(self._stage.catalogue, list({one.block for one in wanted}))
        self._placements = foreseen  # so that reading the blocks need not ask again
        best: dict[BlockId, _Delta] = {}
        for block in {one.block for one in wanted if self._is_whole(one)}:
            placements = foreseen.known.get(block, ())
            deltas = [
                _Delta(one, base, lying[base])
                for one in placements
                if (base := one.encoding.base) is not None
                and base in lying
                and lying[base].length == one.encoding.raw_bytes
            ]
            if not deltas:
                continue
            shortest = min(deltas, key=lambda delta: delta.stored_bytes)
            full = standalone(placements)
            if all(shortest.stored_bytes < one.encoding.stored_bytes for one in full):
                best[block] = shortest
        sound = self._sound({delta.base: delta.lying for delta in best.values()})
        return {block: delta for block, delta in best.items() if delta.base in sound}

    def _sound(self, bases: Mapping[BlockId, ResidentBlock]) -> set[BlockId]:
        """Those bases whose bytes are still what they were."""
        sound: set[BlockId] = set()
        if not bases:
            return sound
        for base, placements in self._stage.catalogue.placements(list(bases)).items():
            self._cancel.check("checking resident tensors")
            found = fold_where_it_lies(self._resident.bytes_of(bases[base]))
            if placements and found == placements[0].encoding.fold:
                sound.add(base)
            else:
                _log.info("follow.base_changed", block=base, tensor=bases[base].name)
        return sound

    def _read_deltas(
        self, wanted: Sequence[Wanted], deltas: Mapping[BlockId, _Delta]
    ) -> list[Wanted]:
        """Bring what can be had by deltas; returns the rest."""
        if not wanted:
            return []
        try:
            used = {one.block: deltas[one.block].placement for one in wanted}
            self._read(Differences(used), wanted)
        except Damaged as why:
            _log.info("follow.deltas_unusable", reason=why)
            return list(wanted)
        failed = []
        for one in wanted:
            self._cancel.check("adding deltas")
            base = _view(self._resident.bytes_of(deltas[one.block].lying).cpu())
            into = np.frombuffer(one.into, np.uint8)
            np.bitwise_xor(into, np.frombuffer(base, np.uint8), out=into)
            if block_id(one.into) != one.block:  # the tensor was changed meanwhile
                failed.append(one)
        return failed


def prepare(spare: SpareMemory, max_host_bytes: int | None) -> None:
    """Have working memory before there is anything to bring: touching fresh pages takes long."""
    reading_bytes = Shares.within(max_host_bytes).reading_bytes
    spare.prepare(_PREPARED, min(RUN_BYTES, reading_bytes // _PREPARED))


def _memory(change: Change) -> Iterator[tuple[int, torch.Tensor]]:
    import torch

    for begin, end in change.spans:
        yield begin, torch.from_numpy(np.empty(end - begin, np.uint8))


def _wanted(staged: StagedTensor) -> Iterator[Wanted]:
    """What to read so that its memory holds its pieces."""
    parts = iter(staged.parts)
    start, end, view = 0, 0, memoryview(b"")
    for piece in staged.change.pieces:
        while piece.into >= end:
            start, part = next(parts)
            end, view = start + part.numel(), _view(part)
        yield Wanted(piece.block, piece.offset, view[piece.into - start : piece.end - start])


def _view(raw: torch.Tensor) -> memoryview:
    return raw.numpy().data
