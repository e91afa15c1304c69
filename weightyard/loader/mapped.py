"""Tensors out of a snapshot on this node: mapped, not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from weightyard.errors import Damaged
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.loader.asked import Asked
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.placing import settled
from weightyard.loader.plan import TensorPlan
from weightyard.loader.report import LoadReport, Tally
from weightyard.loader.slicing import Region, Steps
from weightyard.loader.snapshot import Snapshot
from weightyard.loader.state import torch_dtype
from weightyard.records import Version
from weightyard.transfer.source import FileSource

if TYPE_CHECKING:
    import torch


class SnapshotOrigin(Origin):
    """A version of which this node has the files. They are in use as long as this is."""

    def __init__(
        self, version: Version, manifest: Manifest, tally: Tally, snapshot: Snapshot
    ) -> None:
        super().__init__(version, manifest, tally)
        self._snapshot = self.in_use = snapshot  # one that is in use is not evicted

    def head(self, file: FileEntry, length: int, asked: Asked) -> bytes:
        return FileSource(self._snapshot.path.joinpath(*file.name.parts)).read_at(0, length)

    def tensors(
        self, plans: Sequence[TensorPlan], asked: Asked, to: Destination
    ) -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        dtype = asked.torch_dtype
        files: dict[int | None, dict[str, torch.Tensor]] = {}
        for plan in plans:
            if plan.file not in files:
                path = None if plan.file is None else self.manifest.files[plan.file].path
                with self.tally.stage("map"):
                    files[plan.file] = self._snapshot.tensors(path)
            target = to.targets.get(plan.name)
            with self.tally.stage("place"):
                tensor = picked(self._found(plan, files[plan.file]), plan.region)
                tensor = tensor if target is not None else tensor.to(to.device)
            self.tally.delivered(len(plan.names), plan.bytes)
            if asked.progress is not None:
                asked.progress(plan.bytes)
            asked.deadline.left("loading")
            yield plan, settled(tensor, target, dtype, self.tally)

    def held(self) -> AbstractContextManager[object]:
        return nullcontext()  # the files are this node's: nobody else takes them away

    def report(self, device: object, **more: Any) -> LoadReport:
        self._snapshot.recheck()
        return self.tallied(device, from_snapshot=True, **more)

    def _found(self, plan: TensorPlan, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors.get(plan.name)
        if tensor is None or tensor.dtype != torch_dtype(plan.dtype):
            raise Damaged(
                f"the snapshot of {self.version.ref} has no tensor {plan.name} of {plan.dtype}: "
                "see `weightyard cache verify`"
            )
        return tensor


def picked(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """What a region picks: the tensor itself if that is all of it, else a copy of its own."""
    if all(
        (steps.start, steps.count, steps.step) == (0, size, 1) and steps.is_kept
        for steps, size in zip(region, tensor.shape, strict=True)
    ):
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
