"""Tensors out of a snapshot on this node: mapped, not read."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weightyard.errors import Damaged
from weightyard.format.manifest import Extent, FileEntry, Manifest, TensorEntry
from weightyard.loader.asked import Asked
from weightyard.loader.batches import Batch, one_by_one
from weightyard.loader.converting import result_dtype
from weightyard.loader.delivering import deliver
from weightyard.loader.filling import Filled
from weightyard.loader.mapping import MappedFile
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.placing import settled
from weightyard.loader.plan import Fetch, TensorPlan
from weightyard.loader.report import LoadReport, Tally
from weightyard.loader.slicing import Region, Steps
from weightyard.loader.snapshot import Snapshot
from weightyard.loader.state import bytes_of, torch_dtype
from weightyard.loader.stored import placer_for
from weightyard.records import Version
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.transfer.source import FileSource

if TYPE_CHECKING:
    import torch


class SnapshotOrigin(Origin):
    """A version whose files this node has. They are in use, and so kept, as long as this lives."""

    def __init__(
        self,
        version: Version,
        manifest: Manifest,
        tally: Tally,
        snapshot: Snapshot,
        *,
        is_told: bool = False,
    ) -> None:
        """`is_told`: its bytes counted as progress already, when they came to this node."""
        super().__init__(version, manifest, tally)
        self._is_told = is_told
        self._snapshot = self.in_use = snapshot  # one that is in use is not evicted
        self._mapped: dict[str | None, MappedFile] = {}

    def open_files(self, files: Iterable[int | None]) -> None:
        """Map them: a snapshot removed or set aside meanwhile loses only its files' names."""
        for number in dict.fromkeys(files):
            path = self._path(number)
            if path not in self._mapped:
                with self.tally.stage("map"):
                    try:
                        self._mapped[path] = self._snapshot.mapped(path)
                    except Damaged:
                        self._snapshot.require_sound(path)
                        raise  # such as for want of memory

    def head(self, file: FileEntry, length: int, asked: Asked) -> bytes:
        if (mapped := self._mapped.get(file.path)) is not None:
            return mapped.head(length)
        # What an index says decides which tensors are the model, and nothing else checks it.
        self._snapshot.require_sound(file.path)
        return FileSource(self._snapshot.path.joinpath(*file.name.parts)).read_at(0, length)

    def tensors(
        self, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        self.open_files(plan.file for plan in plans)
        self.tally.moved("map", sum(plan.bytes for plan in plans))
        is_here = to.device.type == "cpu"
        made = self._here(plans, asked, to) if is_here else self._onto(plans, asked, to)
        progress = None if self._is_told else asked.progress
        delivered, left = self.tally.delivered, asked.deadline.left
        with closing(made):
            for plan, tensor in made:
                delivered(len(plan.names), plan.bytes)
                if progress is not None:
                    progress(plan.bytes)
                left("loading")
                yield plan, tensor
                del tensor  # from here on only the caller has it

    def _here(
        self, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Generator[tuple[TensorPlan, torch.Tensor]]:
        dtype = asked.torch_dtype
        if dtype is None and not to.targets:
            for plan in plans:
                yield plan, self._wanted(plan)
            return
        for plan in plans:
            target = to.targets.get(plan.name)
            is_cast = dtype is not None and result_dtype(plan, dtype) != torch_dtype(plan.dtype)
            is_copied = target is not None or is_cast
            tensor = self._wanted(plan, is_copied=is_copied)
            yield plan, settled(tensor, target, dtype, self.tally)

    def _onto(
        self, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Generator[tuple[TensorPlan, torch.Tensor]]:
        """Onto a device: what is mapped goes through the same slabs as what is read."""
        whole = [replace(plan, fetches=tuple(_straight(plan.bytes))) for plan in plans]
        placer = placer_for(whole, replace(asked, device_decode=False), to, self.tally)
        ahead = asked.budget.ahead_bytes(to.ahead_bytes)
        batch_bytes = min(asked.budget.batch_bytes(ahead), placer.batch_bytes)
        sources: dict[int, memoryview] = {}

        def batches() -> Iterator[Batch]:
            for batch in one_by_one(whole, batch_bytes):
                for number in (part.tensor for part in batch.parts):
                    if number not in sources:
                        sources[number] = bytes_of(self._wanted(plans[number]))
                yield batch

        def fill(batch: Batch) -> None:
            def copy(targets: Iterable[Filled]) -> None:
                for part, target in zip(batch.parts, targets, strict=True):
                    goes, length = part.fetch.goes, part.fetch.length
                    assert isinstance(goes, int)
                    source = sources[part.tensor][goes : goes + length]
                    np.copyto(np.frombuffer(target.memory, np.uint8), source)

            if batch.parts:
                placer.fill(batch, copy)

        placed = deliver(batches(), placer, fill, ahead_bytes=ahead, deadline=asked.deadline)
        with closing(placed):
            for number, tensor in placed:
                sources.pop(number, None)
                yield plans[number], tensor
                del tensor

    def foresee(self, entries: Iterable[TensorEntry], asked: Asked) -> None:
        """Nothing is to be asked: the files are here."""

    def held(self, deadline: Deadline = NEVER) -> AbstractContextManager[object]:
        return nullcontext()  # the files are this node's: nobody else takes them away

    def recheck(self) -> None:
        self._snapshot.recheck()

    def report(self, device: object, **more: Any) -> LoadReport:
        self.recheck()
        cached_bytes = 0 if self._is_told else self.tally.bytes
        return self.tallied(device, from_snapshot=True, cached_bytes=cached_bytes, **more)

    def _path(self, number: int | None) -> str | None:
        return None if number is None else self.manifest.files[number].path

    def _wanted(self, plan: TensorPlan, *, is_copied: bool = False) -> torch.Tensor:
        """What is wanted of a tensor: mapped if that is all of it, else a copy of its own.

        `is_copied`: the caller makes a copy, so that a view of what is mapped will do.
        """
        file = self._mapped[self._path(plan.file)]
        if plan.is_whole:
            tensor = file.tensor(plan.name, plan.dtype, plan.shape)
            if tensor is not None:
                return tensor
        tensor = self._found(plan, file)
        if not plan.is_whole or tensor.shape != plan.shape:
            with self.tally.stage("place"):
                tensor = picked(tensor, plan.region, is_copied=is_copied)
        if tuple(tensor.shape) != plan.shape:  # such a file was changed, and is not verified yet
            raise self._damaged(plan)
        return tensor

    def _found(self, plan: TensorPlan, file: MappedFile) -> torch.Tensor:
        tensor = file.tensor(plan.name, plan.dtype)
        if tensor is None and plan.file is None:  # of those that are tied the file has the first
            tied = (one.tied for one in self.manifest.tensors if one.name == plan.name)
            tensor = file.tensor(next(tied, None) or plan.name, plan.dtype)
        if tensor is None:
            raise self._damaged(plan)
        return tensor

    def _damaged(self, plan: TensorPlan) -> Damaged:
        self._snapshot.require_sound(self._path(plan.file))
        return Damaged(
            f"the snapshot of {self.version.ref} has no tensor {plan.name} of {plan.dtype}: "
            "see `weightyard cache verify`"
        )


def _straight(length: int) -> Iterator[Fetch]:
    """All of a tensor as one run, which lies in no block."""
    if length:
        yield Fetch((Extent(0, 0, length),), length, 0)


def picked(tensor: torch.Tensor, region: Region, *, is_copied: bool = False) -> torch.Tensor:
    """What a region picks, with memory of its own unless the caller copies it."""
    chosen = tensor[tuple(map(_forward, region))]
    kept = [steps for steps in region if steps.is_kept]
    backward = [dim for dim, steps in enumerate(kept) if steps.step < 0]
    if backward:
        return _flipped(chosen, backward)
    return chosen if is_copied else chosen.clone()


def _flipped(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """A flipped copy. torch flips integers of these widths, but not every type that has them."""
    import torch

    word = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, tensor.dtype)
    return tensor.view(word).flip(dims).view(tensor.dtype)


def _forward(steps: Steps) -> int | slice:
    """The same indices, the lowest first: torch has no steps below 0."""
    if not steps.is_kept:
        return steps.start
    last = steps.start + (steps.count - 1) * steps.step
    first, last = min(steps.start, last), max(steps.start, last)
    return slice(first, last + 1 if steps.count else first, abs(steps.step))
