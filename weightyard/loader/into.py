"""Loading into a module: into the memory its parameters have, or in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weightyard.errors import Refused
from weightyard.loader.asked import Asked
from weightyard.loader.choosing import admitted
from weightyard.loader.modules import Slot, fit, shards, slots_of, unmatched
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.placing import device_of
from weightyard.loader.plan import TensorPlan, plan_tensors
from weightyard.loader.report import LoadReport

if TYPE_CHECKING:
    import torch


def load_into(
    module: torch.nn.Module,
    origin: Origin,
    asked: Asked,
    *,
    device: Any = "cpu",
    strict: bool = True,
    atomic: bool = False,
) -> LoadReport:
    """Fill a module. What does not fit is found out before any tensor is read."""
    if asked.slices:
        raise Refused("the slices of a module are those of its DTensors: leave slices= out")
    meta_device = device_of(device)
    slots = slots_of(module)
    with origin.tally.stage("plan"):
        # Each goes to a place of its own: which are tied is for the module to say.
        entries = [msgspec.structs.replace(entry, tied=None) for entry in origin.chosen(asked)]
        expected = _expected(slots, asked)
        chosen = fit(slots, entries, strict=strict, expected=expected)
        missing, unexpected = unmatched(slots, (entry.name for entry in entries), expected)
        entries = [entry for entry in entries if entry.name in chosen]
        plans = plan_tensors(entries, shards(chosen, entries))
    groups: dict[tuple[torch.device, bool], list[TensorPlan]] = {}
    for plan in plans:
        tensor = chosen[plan.name].tensor
        where = meta_device if tensor.is_meta else tensor.device
        groups.setdefault((where, tensor.is_meta or atomic), []).append(plan)
    loaded: list[tuple[Slot, torch.Tensor]] = []
    for (where, beside), group in groups.items():
        targets = {} if beside else {one.name: chosen[one.name].local for one in group}
        for plan, tensor in origin.tensors(group, asked, Destination(where, targets)):
            if beside:
                loaded.append((chosen[plan.name], tensor))
    with origin.tally.stage("place"):
        for slot, tensor in loaded:
            slot.take(tensor)
    devices = sorted({str(where) for where, _ in groups})
    return origin.report(
        ", ".join(devices) or meta_device, missing=tuple(missing), unexpected=tuple(unexpected)
    )


def _expected(slots: Sequence[Slot], asked: Asked) -> set[str] | None:
    """The keys of a module that are asked for; None: all."""
    patterns = asked.tensor_patterns
    if patterns is None:
        return None
    return set(admitted((name for slot in slots for name in slot.names), patterns))
