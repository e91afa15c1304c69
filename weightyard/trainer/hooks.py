"""The state of communication hooks, which compress gradients: some of them remember.

PowerSGD keeps on each rank what it did not send yet, and adds it to the next gradients. A run
resumed without that would go on training, but not as before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from weightyard.errors import Damaged
from weightyard.logs import Log

_log = Log(__name__)

_REMEMBERED = {
    PowerSGDState: (
        "iter",
        "error_dict",
        "p_memory_dict",
        "q_memory_dict",
        "total_numel_before_compression",
        "total_numel_after_compression",
        "next_stats_report",
    ),
    PostLocalSGDState: ("iter",),
}
"""What a hook's state gathers as it runs. The rest is how it was made, which the program says."""

_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
"""What is kept for each of the buckets into which DDP puts gradients."""

_UNSENT = "error_dict"


def is_hook(value: object) -> bool:
    """Whether this is the state of a hook that remembers."""
    return type(value) in _REMEMBERED


def hook_states(
    modules: Mapping[str, torch.nn.Module], named: Collection[object]
) -> Iterator[tuple[str, DistributedDataParallel, Any]]:
    """The states of hooks registered with these modules that remember something, but for `named`.

    Each is named by its module and "hook". If a hook's state is of an unknown kind, a log line says
    that it is not saved.
    """
    for name, outer in modules.items():
        for path, module in outer.named_modules(prefix=name):
            if not isinstance(module, DistributedDataParallel):
                continue
            for _, state in module._comm_hooks:
                if state is None or any(state is one for one in named):
                    continue
                if is_hook(state):
                    yield f"{path}.hook", module, state
                elif not isinstance(state, dist.ProcessGroup):
                    _log.warning("hook.not_saved", module=path, state=type(state).__name__)


class UnlikeHook(Exception):
    """A state that a hook of another kind has saved."""


class HookState:
    """Makes the state of a hook obey torch's Stateful. All ranks load it together."""

    def __init__(self, hook: Any, modules: Iterable[torch.nn.Module]) -> None:
        """`modules`: those of the run. Gradients pass the hook if exactly one of them is in DDP."""
        self._hook = hook
        wrapped = [one for one in modules if isinstance(one, DistributedDataParallel)]
        self._module = wrapped[0] if len(wrapped) == 1 else None

    def state_dict(self) -> dict[str, Any]:
        state = {key: getattr(self._hook, key) for key in _REMEMBERED[type(self._hook)]}
        state["order"] = None if self._module is None else order_of_gradients(self._module)
        if isinstance(self._hook, PowerSGDState):
            kind, words, *rest = self._hook.rng.get_state()
            state["rng"] = [kind, torch.from_numpy(np.asarray(words, np.int64)), *rest]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UnlikeHook."""
        if odd := state.keys() ^ self.state_dict().keys():
            raise UnlikeHook(f"saved by another kind of hook, as {min(odd)} shows")
        order = state["order"]
        if self._module is not None and order is not None:
            arrange_buckets(self._module, order)
        for key in _REMEMBERED[type(self._hook)]:
            setattr(self._hook, key, state[key])
        if isinstance(self._hook, PowerSGDState):
            kind, words, *rest = state["rng"]
            self._hook.rng.set_state((kind, words.numpy().astype(np.uint32), *rest))
        if order is None:
            # Otherwise the first step would add it to the gradients of other parameters.
            self._forget(_BY_BUCKET, "it is not known how the buckets were arranged")

    def forget_unsent(self) -> None:
        """Drop what ranks had not sent yet: with another number of ranks it is of none of them."""
        self._forget((_UNSENT,), "another number of ranks")

    def _forget(self, keys: Sequence[str], reason: str) -> None:
        kept = [one for key in keys if (one := getattr(self._hook, key, None))]
        for one in kept:
            one.clear()
        if kept:
            _log.warning("hook.unsent_lost", reason=reason)


def order_of_gradients(module: DistributedDataParallel) -> list[int] | None:
    """The order of the parameters in DDP's buckets, by number; None in its first steps.

    DDP arranges the buckets after its first backward, in the order in which gradients came.
    """
    logged = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    told = logged.get("rebuilt_per_bucket_param_indices")
    return None if told is None else [int(number) for number in re.findall("[0-9]+", str(told))]


def arrange_buckets(module: DistributedDataParallel, order: Sequence[int]) -> None:
    """Have DDP arrange its buckets in an order, by a backward of zeros. All ranks call it.

    Otherwise its first step after a resume would have them in the order of the parameters, and
    what is remembered by bucket would meet other gradients. Raises Damaged for an odd order.
    """
    parameters = [one for one in module.parameters() if one.requires_grad]
    if sorted(order) != list(range(len(parameters))):
        raise Damaged("the saved order of gradients is not one of this module's parameters")
    module.reducer.prepare_for_forward()
    module.reducer.prepare_for_backward([])
    for number in order:
        (parameters[number] * 0).sum().backward()  # type: ignore[no-untyped-call]
    module.zero_grad(set_to_none=True)
