"""Resident: the tensors a process serves, and how versions fit into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from weightyard.errors import DoesNotFit, Refused
from weightyard.format.manifest import TensorEntry
from weightyard.loader.asked import Asked
from weightyard.loader.changes import Holds
from weightyard.loader.choosing import admitted
from weightyard.loader.layouts import is_layout
from weightyard.loader.modules import Slot, fit, shards, slots_of
from weightyard.loader.plan import TensorPlan, plan_tensors
from weightyard.loader.state import torch_dtype
from weightyard.names import BlockId

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ResidentBlock:
    """A block that a resident tensor holds, and where."""

    name: str
    start: int
    length: int


class Resident:
    """What is served: tensors of this process, or none, where a server keeps them to itself.

    What they hold is not known here: callers say it (`now`).
    """

    def __init__(self, served: torch.nn.Module | Mapping[str, torch.Tensor] | None) -> None:
        """`served`: a module, or tensors by name. Raises Refused for else, and for meta."""
        self._served = served
        self._slots = None if served is None else _slots(served)
        self._by_name = {name: slot for slot in self._slots or () for name in slot.names}
        for slot in self._slots or ():
            if slot.tensor.is_meta:
                raise Refused(f"{slot.names[0]} is on meta: load it first, with yard.load_into")

    @property
    def has_tensors(self) -> bool:
        return self._slots is not None

    def is_of(self, served: torch.nn.Module | Mapping[str, torch.Tensor]) -> bool:
        """Whether it was made of this very module or mapping."""
        return self._served is served

    def require(
        self, entries: Sequence[TensorEntry], asked: Asked, plans: Iterable[TensorPlan]
    ) -> dict[str, Slot]:
        """Where a version's tensors go, if it was planned before it was known what is served.

        Raises DoesNotFit, also if a shard is served of a tensor that was planned whole.
        """
        chosen = self._fitting(entries, asked)
        for plan in plans:
            there = tuple(self._by_name[plan.name].local.shape)
            if there != plan.shape:
                raise DoesNotFit(
                    f"{plan.name} is {plan.shape}, in the module {there} of it: a module with "
                    "shards has to be given to follow()",
                    [],
                    [],
                )
        return chosen

    def plan(
        self, entries: Sequence[TensorEntry], asked: Asked, now: Holds
    ) -> tuple[TensorPlan, ...]:
        """Plan a version's tensors for what is served. Raises DoesNotFit if they differ."""
        if self._slots is None:
            plans = plan_tensors(entries)
            _require_same_structure(plans, now)
            return plans
        chosen = self._fitting(entries, asked)
        # Which of them are tied is for what is served to say.
        entries = [
            msgspec.structs.replace(entry, tied=None) for entry in entries if entry.name in chosen
        ]
        plans = plan_tensors(entries, shards(chosen, entries))
        return tuple(replace(plan, names=chosen[plan.name].names) for plan in plans)

    def _fitting(self, entries: Sequence[TensorEntry], asked: Asked) -> dict[str, Slot]:
        patterns = asked.tensor_patterns
        expected = None if patterns is None else set(admitted(self._by_name, patterns))
        return fit(self._slots or (), entries, strict=True, expected=expected)

    def patched(self, plans: Iterable[TensorPlan]) -> set[str]:
        """The tensors into whose memory bytes can be put as they are stored."""
        return {
            plan.name
            for plan in plans
            if (slot := self._by_name.get(plan.name)) is not None
            and not plan.dtype.bits % 8
            and slot.local.dtype == torch_dtype(plan.dtype)
            and slot.local.is_contiguous()
        }

    def slot(self, name: str) -> Slot:
        return self._by_name[name]

    def slots(self, names: Iterable[str]) -> list[Slot]:
        """The slots that have these names, each once."""
        return list({id(slot): slot for slot in map(self.slot, names)}.values())

    def tied(self, names: Sequence[str]) -> Sequence[str]:
        """These names, and the others to which the module ties them."""
        if self._slots is None:
            return names
        return [name for slot in self.slots(names) for name in slot.names]

    def lying(self, now: Holds) -> dict[BlockId, ResidentBlock]:
        """Where blocks lie in the memory of tensors; only those whose start is there."""
        found: dict[BlockId, ResidentBlock] = {}
        for name, content in now.items():
            slot = self._by_name.get(name)
            if slot is None or content is None or not slot.local.is_contiguous():
                continue
            if slot.local.dtype == torch_dtype(content.dtype):
                for piece in content.pieces:
                    if not piece.offset:
                        found[piece.block] = ResidentBlock(name, piece.into, piece.length)
        return found

    def bytes_of(self, lying: ResidentBlock) -> torch.Tensor:
        """The bytes of a block where they lie."""
        return raw_bytes(self._by_name[lying.name].local)[lying.start :][: lying.length]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as a flat tensor of bytes."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8)


def _slots(served: torch.nn.Module | Mapping[str, torch.Tensor]) -> list[Slot]:
    if not isinstance(served, Mapping):
        return slots_of(served)
    import torch

    by_memory: dict[object, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in served.items():
        if not isinstance(tensor, torch.Tensor):
            raise Refused(f"{name}: tensors can be followed, not a {type(tensor).__name__}")
        key: object = id(tensor)
        if tensor.numel() and not tensor.is_meta and not is_layout(tensor):
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        by_memory.setdefault(key, (tensor, []))[1].append(name)
    return [Slot(tensor, (), tuple(names)) for tensor, names in by_memory.values()]


def _require_same_structure(plans: Sequence[TensorPlan], now: Holds) -> None:
    if not now:
        return
    new = {name: plan for plan in plans for name in plan.names}
    missing = [name for name in now if name not in new]
    unexpected = [name for name in new if name not in now]
    wrong = [
        name
        for name, plan in new.items()
        if (was := now.get(name)) is not None and (was.dtype, was.shape) != (plan.dtype, plan.shape)
    ]
    if first := [*wrong, *missing, *unexpected][:1]:
        raise DoesNotFit(
            f"{len(missing)} tensors less, {len(unexpected)} more, {len(wrong)} of another dtype "
            f"or shape than before, such as {first[0]}",
            missing,
            unexpected,
        )
