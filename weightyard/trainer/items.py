"""Items: what a load plan of torch's distributed checkpoint reads, and where it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from weightyard.errors import DoesNotFit, NoSuchThing, Unsupported
from weightyard.format.manifest import TensorEntry
from weightyard.loader.asked import Asked
from weightyard.loader.joint import Planned
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.plan import TensorPlan
from weightyard.loader.state import is_other, torch_dtype
from weightyard.trainer.metadata import plan_items


@runtime_checkable
class TakesObjects(Protocol):
    """A planner that has its own way of bringing objects into a state dict."""

    def load_object(self, read_item: ReadItem, value: Any) -> None:
        """As `load_bytes`, with the object itself."""


class Destinations:
    """The tensors that a planner wants filled."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        items: Iterable[ReadItem],
        planner: LoadPlanner,
        *,
        cast: bool,
    ) -> None:
        self.device = torch.device("cpu")
        """Where most bytes go."""
        self._entries = entries
        self._items = [item for item in items if item.type == LoadItemType.TENSOR]
        self._planner = planner
        self._cast = cast
        self._tensors: list[torch.Tensor] = []

    def planned(self, origin: Origin, asked: Asked) -> Planned:
        """What to read. Raises NoSuchThing, DoesNotFit, naming the key."""
        plans = plan_items(self._entries, self._items)
        self._tensors = [
            self._resolved(item, plan) for item, plan in zip(self._items, plans, strict=True)
        ]
        amounts: Counter[torch.device] = Counter()
        for tensor in self._tensors:
            amounts[tensor.device] += tensor.nbytes
        if amounts:
            self.device = amounts.most_common(1)[0][0]
        targets = {
            plan.name: tensor
            for plan, tensor in zip(plans, self._tensors, strict=True)
            if tensor.device == self.device
            and tensor.is_contiguous()
            and is_other(tensor) == (False, False)
            and tensor.dtype == torch_dtype(plan.dtype)
        }
        passing = (number for number, plan in enumerate(plans) if plan.name not in targets)
        to = Destination(self.device, targets)
        return Planned(origin, asked, to, plans, frozenset(passing))

    def take(self, number: int, tensor: torch.Tensor) -> None:
        """A tensor is whole: put it where it belongs, and tell the planner."""
        into = self._tensors[number]
        if tensor is not into:
            with torch.no_grad():
                into.copy_(tensor)
        self._planner.commit_tensor(self._items[number], into)

    def _resolved(self, item: ReadItem, plan: TensorPlan) -> torch.Tensor:
        name = item.dest_index.fqn
        tensor = self._planner.resolve_tensor(item).detach()
        if tuple(tensor.shape) != plan.shape:
            raise DoesNotFit(
                f"{name}: {list(plan.shape)} elements are to go into {list(tensor.shape)}", [], []
            )
        saved = torch_dtype(plan.dtype)
        if tensor.dtype != saved and not self._cast:
            raise DoesNotFit(
                f"{name}: it was saved as {saved} and is {tensor.dtype} here: make it {saved}, or "
                "give YardReader cast=True",
                [],
                [],
            )
        return tensor


def require_objects(items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """See that a planner can be given objects, if there are any. Raises Unsupported."""
    names = [item.dest_index.fqn for item in items if item.type == LoadItemType.BYTE_IO]
    if not names or isinstance(planner, TakesObjects) or _sets_elements(planner):
        return
    raise Unsupported(
        f"{names[0]}: {type(planner).__name__} takes objects pickled, by load_bytes, and a yard "
        "has none: give it a method load_object(read_item, value), or use DefaultLoadPlanner"
    )


def give_objects(
    items: Iterable[ReadItem], planner: LoadPlanner, objects: Mapping[str, Any]
) -> None:
    """Put what is no tensor into the state dict. Raises NoSuchThing."""
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            continue
        name = item.storage_index.fqn
        if name not in objects:
            raise NoSuchThing(f"the checkpoint has no object {name[:200]!r}")
        if isinstance(planner, TakesObjects):
            planner.load_object(item, objects[name])
            continue
        # As DefaultLoadPlanner.load_bytes does it with what it unpickled.
        assert isinstance(planner, DefaultLoadPlanner)
        if planner.flatten_state_dict:
            path = planner.mappings[item.dest_index.fqn]
            set_element(planner.original_state_dict, path, objects[name])
        else:
            planner.state_dict[item.dest_index.fqn] = objects[name]


def _sets_elements(planner: LoadPlanner) -> bool:
    own = type(planner).load_bytes
    return isinstance(planner, DefaultLoadPlanner) and own is DefaultLoadPlanner.load_bytes
