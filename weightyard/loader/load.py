"""Loading a version's tensors: all of them, or one after the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weightyard.errors import BadSetting
from weightyard.loader.asked import Asked
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.placing import device_of
from weightyard.loader.plan import TensorPlan, plan_tensors
from weightyard.loader.recent import Recent
from weightyard.loader.report import LoadReport
from weightyard.records import Version

if TYPE_CHECKING:
    import torch

_MOST_PLANNED = 20_000
"""How many tensors and runs all plans that are kept may have: some MB."""

_plans: Recent[Hashable, tuple[TensorPlan, ...]] = Recent(_MOST_PLANNED)
"""By the digest of the version, and what was asked for."""


class Weights(dict[str, "torch.Tensor"]):
    """Tensors by name, in model order; the version they are of; what loading them did."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], origin: Origin, report: LoadReport
    ) -> None:
        super().__init__(tensors)
        self.version: Version = origin.version
        self.report = report
        self._in_use = origin.in_use


def load(origin: Origin, asked: Asked, device: Any) -> Weights:
    """All tensors asked for, on a device. Tied ones come back tied."""
    to = Destination(device_of(device))
    plans = plan(origin, asked)
    found = {one.names: tensor for one, tensor in origin.tensors(plans, asked, to)}
    tensors = {name: found[one.names] for one in plans for name in one.names}
    return Weights(tensors, origin, origin.report(to.device))


def stream(
    origin: Origin, asked: Asked, device: Any, ahead_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors asked for, one after the other in model order, read ahead within a budget."""
    if not isinstance(ahead_bytes, int):
        raise BadSetting(f"ahead_bytes={ahead_bytes!r}: a whole number of bytes")
    to = Destination(device_of(device), ahead_bytes=ahead_bytes)
    _ = asked.torch_dtype  # a wrong one raises here, not when the first tensor is asked for
    plans = plan(origin, asked)
    origin.open_files(one.file for one in plans)
    return _stream(origin, asked, to, plans)


def _stream(
    origin: Origin, asked: Asked, to: Destination, plans: tuple[TensorPlan, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    with origin.tally.watched(origin.version.ref), origin.held(asked.deadline):
        for one, tensor in origin.tensors(plans, asked, to):
            for name in one.names:
                with origin.tally.stage("use"):
                    yield name, tensor
            del tensor  # from here on only the caller has it
    origin.report(to.device)


def plan(origin: Origin, asked: Asked) -> tuple[TensorPlan, ...]:
    """What is asked for, found and fitted, before anything of it is read."""
    with origin.tally.stage("plan"):
        if asked.slices:  # a layout is this rank's, and may change
            entries = origin.chosen(asked)
            return plan_tensors(entries, asked.indices(entries))
        patterns = (asked.file_patterns, asked.tensor_patterns)
        said = (one if one is None else tuple(one) for one in patterns)
        key = (origin.version.digest, *said)
        if (known := _plans.get(key)) is not None:
            return known
        plans = plan_tensors(origin.chosen(asked))
        return _plans.keep(key, plans, sum(1 + len(one.fetches) for one in plans))
