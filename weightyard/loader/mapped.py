"""Tensors out of a snapshot on this node: mapped, not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from weightyard.errors import Damaged
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.loader.asked import Asked
from weightyard.loader.mapping import MappedFile
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.placing import settled
from weightyard.loader.plan import TensorPlan
from weightyard.loader.report import LoadReport, Tally
from weightyard.loader.slicing import Region, Steps, whole_region
from weightyard.loader.snapshot import Snapshot
from weightyard.records import Version
from weightyard.transfer.source import FileSource

if TYPE_CHECKING:
    import torch


class SnapshotOrigin(Origin):
    """A version of which this node has the files. They are in use as long as this is."""

    def __init__(
        self,
        version: Version,
        manifest: Manifest,
        tally: Tally,
        snapshot: Snapshot,
        *,
        is_told: bool = False,
    ) -> None:
        """`is_told`: its bytes were told as progress already, when they came to this node."""
        super().__init__(version, manifest, tally)
        self._is_told = is_told
        self._snapshot = self.in_use = snapshot  # one that is in use is not evicted
        self._mapped: dict[str | None, MappedFile] = {}

    def open_files(self, files: Iterable[int | None]) -> None:
        """Map them: one that is removed or set aside while it is in use loses only its names."""
        for number in dict.fromkeys(files):
            path = self._path(number)
            if path not in self._mapped:
                with self.tally.stage("map"):
                    self._mapped[path] = self._snapshot.mapped(path)

    def head(self, file: FileEntry, length: int, asked: Asked) -> bytes:
        if (mapped := self._mapped.get(file.path)) is not None:
            return mapped.head(length)
        return FileSource(self._snapshot.path.joinpath(*file.name.parts)).read_at(0, length)

    def tensors(
        self, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        dtype = asked.torch_dtype
        is_here = to.device.type == "cpu"
        self.open_files(plan.file for plan in plans)
        for plan in plans:
            target = to.targets.get(plan.name)
            tensor = self._found(plan, self._mapped[self._path(plan.file)])
            if not is_here or plan.region != whole_region(tensor.shape):
                with self.tally.stage("place"):
                    tensor = picked(tensor, plan.region)
                    tensor = tensor if target is not None else tensor.to(to.device)
            self.tally.delivered(len(plan.names), tensor.nbytes)
            if asked.progress is not None and not self._is_told:
                asked.progress(tensor.nbytes)
            asked.deadline.left("loading")
            yield plan, settled(tensor, target, dtype, self.tally)

    def held(self) -> AbstractContextManager[object]:
        return nullcontext()  # the files are this node's: nobody else takes them away

    def report(self, device: object, **more: Any) -> LoadReport:
        self._snapshot.recheck()
        return self.tallied(device, from_snapshot=True, **more)

    def _path(self, number: int | None) -> str | None:
        return None if number is None else self.manifest.files[number].path

    def _found(self, plan: TensorPlan, file: MappedFile) -> torch.Tensor:
        tensor = file.tensor(plan.name, plan.dtype)
        if tensor is None and plan.file is None:  # of those that are tied the file has the first
            tied = (one.tied for one in self.manifest.tensors if one.name == plan.name)
            tensor = file.tensor(next(tied, None) or plan.name, plan.dtype)
        if tensor is None:
            raise Damaged(
                f"the snapshot of {self.version.ref} has no tensor {plan.name} of {plan.dtype}: "
                "see `weightyard cache verify`"
            )
        return tensor


def picked(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """What a region picks: the tensor itself if that is all of it, else a copy of its own."""
    if region == whole_region(tensor.shape):
        return tensor
    chosen = tensor[tuple(map(_forward, region))]
    kept = [steps for steps in region if steps.is_kept]
    backward = [dim for dim, steps in enumerate(kept) if steps.step < 0]
    return chosen.flip(backward) if backward else chosen.clone()


def _forward(steps: Steps) -> int | slice:
    """The same indices, the lowest first: torch has no steps below 0."""
    if not steps.is_kept:
        return steps.start
    last = steps.start + (steps.count - 1) * steps.step
    first, last = min(steps.start, last), max(steps.start, last)
    return slice(first, last + 1 if steps.count else first, abs(steps.step))
