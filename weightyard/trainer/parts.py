"""Parts: the objects of a run, each as items of a checkpoint.

A module's tensors go by the names it gives them, below the name the run gives it. An optimizer's
state goes by the names of parameters, so that other ranks can take it over. All other objects give
their state by themselves, as torch's Stateful does. What is iterated over, such as a loader, and
the state of a communication hook are each rank's own, and saved for every rank.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from weightyard.errors import Damaged, DoesNotFit, Refused, TooLarge
from weightyard.format.block import MIB
from weightyard.loader.state import dtype_of
from weightyard.logs import Log
from weightyard.names import is_tensor_name
from weightyard.trainer import state as states
from weightyard.trainer.hooks import HookState, UnlikeHook, hook_states, is_hook
from weightyard.trainer.packing import Items, Room, pack, places, unpack
from weightyard.trainer.rng import Rng
from weightyard.trainer.state import State, encode

_log = Log(__name__)

RANKS = "ranks"
"""The name for how many ranks there were; below it, what is each rank's own."""

STEP = "step"
RNG = "rng"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*", re.ASCII)
_RNG_BYTES = MIB
"""Far more than the generators of a process have."""


class Part(ABC):
    """One object of a run. Call order: `items` for each save; `places`, then `restore`, to load."""

    name: str

    @abstractmethod
    def items(self) -> Items:
        """What is saved of it. Raises Refused, naming what cannot be saved."""

    @abstractmethod
    def places(self, metadata: Metadata, room: Room) -> Items:
        """Where to load it to, as far as the checkpoint has it; objects as None.

        Takes room for tensors that are made anew. Raises TooLarge.
        """

    @abstractmethod
    def restore(self, items: Mapping[str, Any]) -> None:
        """Take over what was loaded to those places."""


class ModelPart(Part):
    """A module, wrapped or not."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.module = module

    def items(self) -> Items:
        items: Items = {}
        for key, value in get_model_state_dict(self.module).items():
            fqn = f"{self.name}.{key}"
            items |= {fqn: value} if isinstance(value, torch.Tensor) else pack(fqn, value)
        return items

    def places(self, metadata: Metadata, room: Room) -> Items:
        live = self.items()
        wanted: Items = {}
        for key, value in get_model_state_dict(self.module).items():
            fqn = f"{self.name}.{key}"
            if isinstance(value, torch.Tensor):
                wanted[fqn] = value
            else:
                wanted |= places([fqn], metadata, live, room)
        return wanted

    def restore(self, items: Mapping[str, Any]) -> None:
        state: dict[str, Any] = {}
        for key, value in get_model_state_dict(self.module).items():
            fqn = f"{self.name}.{key}"
            is_tensor = isinstance(value, torch.Tensor)
            state[key] = items[fqn] if is_tensor else unpack(fqn, items)
        set_model_state_dict(self.module, state)


class OptimizerPart(Part):
    """An optimizer of a module's parameters."""

    def __init__(
        self, name: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Raises Refused if the optimizer keeps what would not be saved."""
        self.name = name
        self._module = module
        self._averaging: PostLocalSGDOptimizer | None = None
        if isinstance(optimizer, PostLocalSGDOptimizer):
            self._averaging, optimizer = optimizer, optimizer.optim
        self._optimizer = optimizer
        _require_no_more(name, optimizer)

    def items(self) -> Items:
        state = self._named_state()
        items: Items = {}
        for fqn, entries in state["state"].items():
            items |= _flat_entries(f"{self.name}.state.{fqn}", entries)
        return items | self._settings(state["param_groups"]) | self._averaged()

    def check_state(self) -> bool:
        """Refuse a state that could not be saved. Returns whether there is any state yet.

        Looks only at this rank's own, while `items` may ask others. Raises Refused, naming it.
        """
        states = {one: entries for one, entries in self._optimizer.state.items() if entries}
        if states:
            module = self._module
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            names = {parameter: fqn for fqn, parameter in inner.named_parameters()}
            for parameter, entries in states.items():
                fqn = f"{self.name}.state.{names.get(parameter, '?')}"
                check_items(_flat_entries(fqn, entries))
        return bool(states)

    def places(self, metadata: Metadata, room: Room) -> Items:
        """An optimizer that has not stepped has no state: it gets what the checkpoint has."""
        groups = self._named_state()["param_groups"]
        parameters: dict[str, torch.Tensor] = {}
        for group, theirs in zip(self._optimizer.param_groups, groups, strict=True):
            parameters |= zip(theirs["params"], group["params"], strict=True)
        settings = [fqn for fqn, _ in self._by_setting(groups)]
        wanted = self._averaged() | dict.fromkeys(settings)
        # As many tensors as were saved: a setting's number of tensors may change from step to step.
        wanted |= places(settings, metadata, self._settings(groups), room)
        prefix = f"{self.name}.state."
        for name, entries in _by_parameter(prefix, parameters, metadata.state_dict_metadata):
            for key, entry in entries.items():
                fqn = f"{prefix}{name}.{key}"
                wanted[fqn] = _place(fqn, entry, parameters[name], room)
        return wanted

    def restore(self, items: Mapping[str, Any]) -> None:
        groups = self._named_state()["param_groups"]
        for group in groups:
            for key in group.keys() - {"params"}:
                for fqn in group["params"][:1]:  # the same for all parameters of a group
                    group[key] = _setting(f"{self.name}.param_groups.{fqn}.{key}", items)
        names = [fqn for group in groups for fqn in group["params"]]
        state: dict[str, Any] = {fqn: {} for fqn in names}
        prefix = f"{self.name}.state."
        for name, entries in _by_parameter(prefix, names, items):
            state[name] = _nested(f"{prefix}{name}", entries)
        with _unstepped(self._optimizer):
            set_optimizer_state_dict(
                self._module, self._optimizer, {"state": state, "param_groups": groups}
            )
        for parameter in [one for one, has in self._optimizer.state.items() if not has]:
            del self._optimizer.state[parameter]
        if self._averaging is not None:
            self._averaging.averager.step = items[self._averaged_as]
            # Loading has made new groups, but torch leaves the old ones here, where a scheduler
            # would set its rates.
            self._averaging.param_groups = self._optimizer.param_groups

    @property
    def _averaged_as(self) -> str:
        return f"{self.name}.averager.step"

    def _averaged(self) -> Items:
        """The step by which post-local SGD knows when to average next, the same on all ranks."""
        if self._averaging is None:
            return {}
        return {self._averaged_as: self._averaging.averager.step}

    def _named_state(self) -> dict[str, Any]:
        """The state, and the groups' settings, by names of parameters."""
        with _unstepped(self._optimizer):
            return get_optimizer_state_dict(self._module, self._optimizer)

    def _settings(self, groups: Iterable[Mapping[str, Any]]) -> Items:
        """The settings, for each parameter: with other ranks, its group may be another one."""
        items: Items = {}
        for fqn, value in self._by_setting(groups):
            items |= _setting_items(fqn, value)
        return items

    def _by_setting(self, groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        for group in groups:
            for fqn in group["params"]:
                for key in group.keys() - {"params"}:
                    yield f"{self.name}.param_groups.{fqn}.{key}", group[key]


def _require_no_more(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what torch would leave out of a state that goes by names of parameters."""
    if more := sorted(map(repr, optimizer.state_dict().keys() - {"state", "param_groups"})):
        raise Refused(
            f"state {name}: a {type(optimizer).__name__} keeps {', '.join(more)[:200]} beside its "
            "state and groups, which would not come back; keep it in an object of its own that has "
            "state_dict and load_state_dict"
        )


@contextmanager
def _unstepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from stepping an optimizer that has no state, which it does to make one.

    Gradients would be zeros, but Adam counts the step. An empty entry is enough to prevent it.
    """
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    first = next(parameters, None)
    if optimizer.state or first is None:
        yield
        return
    optimizer.state[first] = {}
    try:
        yield
    finally:
        if not optimizer.state[first]:
            del optimizer.state[first]


def _flat_entries(fqn: str, entries: Mapping[Any, Any]) -> Items:
    """A parameter's state as items. Raises Refused, also for a key that would not come back."""
    items: Items = {}
    for key, value in entries.items():
        if not _is_plain_key(key):
            raise Refused(f"{fqn}: {key!r:.80} cannot be a key here; text without '.' can")
        items |= _flat(f"{fqn}.{key}", value)
    return items


def _flat(fqn: str, value: Any) -> Items:
    """What an optimizer keeps: tensors, numbers and dicts by keys, as torch flattens them; all else
    packed. Raises Refused."""
    if isinstance(value, torch.Tensor | int | float):
        return {fqn: value}
    if isinstance(value, dict) and value and all(_is_plain_key(key) for key in value):
        items: Items = {}
        for key, one in value.items():
            items |= _flat(f"{fqn}.{key}", one)
        return items
    packed = pack(fqn, value)
    _require_loadable(value, fqn)
    return packed


def _setting_items(fqn: str, value: Any) -> Items:
    """A setting of a group. torch would take a dict or a list apart and lose it if it is empty, so
    they are packed; so is a tuple that looks like something packed. Raises Refused."""
    is_packed = isinstance(value, dict | list) or _looks_packed(value)
    return pack(fqn, value) if is_packed else {fqn: value}


def _setting(fqn: str, items: Mapping[str, Any]) -> Any:
    return unpack(fqn, items) if _looks_packed(items[fqn]) else items[fqn]


def _looks_packed(value: object) -> bool:
    if type(value) is not tuple or len(value) not in (2, 3):  # the third: paths of Counters
        return False
    return all(type(paths) is list for paths in value[1:])


def _is_plain_key(key: object) -> bool:
    return type(key) is str and key != "" and "." not in key


def _require_loadable(value: object, where: str) -> None:
    """Refuse texts: on loading, an optimizer iterates over one, and makes something else of it."""
    if isinstance(value, str | bytes):
        raise Refused(f"{where}: torch's optimizers do not load a {type(value).__name__}")
    if isinstance(value, dict):
        for key, one in value.items():
            _require_loadable(one, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for at, one in enumerate(value):
            _require_loadable(one, f"{where}[{at}]")


def _by_parameter(
    prefix: str, names: Collection[str], items: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of each parameter's state that there are, by their keys."""
    found: dict[str, dict[str, Any]] = {}
    for fqn, entry in items.items():
        if not fqn.startswith(prefix):
            continue
        keys = fqn[len(prefix) :].split(".")
        for end in range(len(keys) - 1, 0, -1):
            if (name := ".".join(keys[:end])) in names:
                found.setdefault(name, {})[".".join(keys[end:])] = entry
                break
    yield from found.items()


def _place(fqn: str, entry: object, parameter: torch.Tensor, room: Room) -> torch.Tensor | None:
    """Where to load an entry of a parameter's state to."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if entry.size == parameter.shape:  # cut over the ranks as the parameter is
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        room.take(fqn, own.numel() * dtype.itemsize)
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    room.take(fqn, entry.size.numel() * dtype.itemsize)
    return torch.zeros(entry.size, dtype=dtype)


def _nested(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter. Raises Damaged if the entries do not make one."""
    packed = {key for key, value in entries.items() if isinstance(value, tuple)}
    items = {f"{name}.{key}": value for key, value in entries.items()}
    state: dict[str, Any] = {}
    for keys, value in entries.items():
        *outer, last = keys.split(".")
        if any(".".join(outer[:end]) in packed for end in range(1, len(outer) + 1)):
            continue  # a tensor of something packed
        inside = state
        for key in outer:
            inside = inside.setdefault(key, {})
            if not isinstance(inside, dict):
                raise Damaged(f"{name}.{keys}: a value and a part of another one")
        if last in inside:
            raise Damaged(f"{name}.{keys}: a value and a part of another one")
        inside[last] = unpack(f"{name}.{keys}", items) if keys in packed else value
    return state


class ObjectPart(Part):
    """An object that gives its state by itself, the same on all ranks."""

    def __init__(self, name: str, value: Stateful) -> None:
        self.name = name
        self.value = value

    def items(self) -> Items:
        return pack(self._saved_as, self.value.state_dict())

    def places(self, metadata: Metadata, room: Room) -> Items:
        return places([self._loaded_from(metadata)], metadata, self.items(), room)

    def restore(self, items: Mapping[str, Any]) -> None:
        (name,) = (fqn for fqn in items if not isinstance(items[fqn], torch.Tensor))
        self.value.load_state_dict(unpack(name, items))

    @property
    def _saved_as(self) -> str:
        return self.name

    def _loaded_from(self, metadata: Metadata) -> str:
        return self.name


class RankPart(ObjectPart):
    """An object with a state of its own on each rank.

    With another number of ranks, every rank gets what the first one saved.
    """

    def __init__(self, name: str, value: Stateful, rank: int, ranks: int) -> None:
        super().__init__(name, value)
        self._rank, self._ranks = rank, ranks

    def restore(self, items: Mapping[str, Any]) -> None:
        super().restore(items)
        # A loader of torchdata goes to its place only when it is next asked for something, and
        # draws random numbers on the way: better now than after the generators are put back.
        self.value.state_dict()

    @property
    def _saved_as(self) -> str:
        return f"{RANKS}.{self._rank}.{self.name}"

    def _loaded_from(self, metadata: Metadata) -> str:
        saved = saved_ranks(metadata)
        if saved != self._ranks:
            _log.info("run.from_first_rank", part=self.name, saved_ranks=saved, ranks=self._ranks)
            return f"{RANKS}.0.{self.name}"
        return self._saved_as


class RngPart(RankPart):
    """A rank's generators of random numbers."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(RNG, Rng(), rank, ranks)

    def places(self, metadata: Metadata, room: Room) -> Items:
        return super().places(metadata, Room(_RNG_BYTES))


class HookPart(RankPart):
    """What a communication hook remembers."""

    value: HookState

    def __init__(
        self, name: str, value: HookState, rank: int, ranks: int, *, was_found: bool = False
    ) -> None:
        """`was_found`: the user did not name it, so it is no error if a checkpoint has none."""
        super().__init__(name, value, rank, ranks)
        self._was_found = was_found
        self._is_of_others = False

    def is_missing(self, metadata: Metadata) -> bool:
        """Whether it begins anew, since the checkpoint is of a training without such a hook."""
        known = metadata.state_dict_metadata
        return self._was_found and self._loaded_from(metadata) not in known

    def places(self, metadata: Metadata, room: Room) -> Items:
        self._is_of_others = saved_ranks(metadata) != self._ranks
        return super().places(metadata, room)

    def restore(self, items: Mapping[str, Any]) -> None:
        try:
            super().restore(items)
        except UnlikeHook as why:
            raise DoesNotFit(
                f"{self.name}: {why}; to begin it anew give exclude_from_loading=[{self.name!r}]",
                [self.name],
                [],
            ) from why
        if self._is_of_others:
            self.value.forget_unsent()


def saved_ranks(metadata: Metadata) -> int:
    """How many ranks saved a checkpoint."""
    return sum(
        fqn.startswith(f"{RANKS}.") and fqn.endswith(f".{RNG}") and fqn.count(".") == 2
        for fqn in metadata.state_dict_metadata
    )


def parts_of(state: Mapping[str, Any], rank: int, ranks: int) -> list[Part]:
    """What a run's state consists of, in the order in which it is restored.

    Raises Refused for a name or an object that does not fit.
    """
    if not isinstance(state, Mapping):
        raise Refused(
            f'state is a {type(state).__name__}: name what makes up the training, {{"model": …}}'
        )
    modules = {name: one for name, one in state.items() if isinstance(one, torch.nn.Module)}
    parts: list[Part] = [ModelPart(name, module) for name, module in modules.items()]
    own: list[Part] = []
    for name, value in state.items():
        if not _NAME.fullmatch(name) or name in (RANKS, STEP, RNG):
            raise Refused(
                f"state {name!r:.80}: a name has letters, digits, '_' and '-', begins with a "
                f"letter, and is not {RANKS}, {STEP} or {RNG}"
            )
        if isinstance(value, torch.nn.Module):
            continue
        if isinstance(value, torch.optim.Optimizer):
            parts.append(OptimizerPart(name, _module_of(name, value, modules.values()), value))
        elif is_hook(value):
            own.append(HookPart(name, HookState(value, modules.values()), rank, ranks))
        elif not isinstance(value, Stateful):
            raise Refused(
                f"state {name}: a {type(value).__name__} has no state_dict and load_state_dict"
            )
        elif isinstance(value, Iterable):
            own.append(RankPart(name, value, rank, ranks))
        else:
            parts.append(ObjectPart(name, value))
    for name, module, hook in hook_states(modules, tuple(state.values())):
        own.append(HookPart(name, HookState(hook, [module]), rank, ranks, was_found=True))
    return parts + own


def _module_of(
    name: str, optimizer: torch.optim.Optimizer, modules: Collection[torch.nn.Module]
) -> torch.nn.Module:
    """The module whose parameters an optimizer has. Raises Refused."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        # Each rank has a part of the state, and torch gives it only whole, to one of them.
        raise Refused(
            f"state {name}: a ZeroRedundancyOptimizer cannot be saved; shard the module by "
            "fully_shard (FSDP2), whose parameters any optimizer of torch shards with them"
        )
    empty = sum(not group["params"] for group in optimizer.param_groups)
    if empty > 1:  # nothing tells such groups apart, and torch does not load them
        raise Refused(f"state {name}: {empty} of its groups have no parameters; one may have none")
    wanted = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for module in modules:
        if wanted <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise Refused(
        f"state {name}: no module of the state has all parameters of this optimizer; put the "
        "modules it trains into one, and that into the state"
    )


def check_items(items: Items) -> tuple[int, int]:
    """Refuse what could not be saved. Raises Refused, naming it; TooLarge.

    Returns how many bytes there are besides tensors, and how many of them are this rank's own.
    """
    objects: Items = {}
    for fqn, value in items.items():
        if not is_tensor_name(fqn):
            raise Refused(f"{fqn[:200]!a} cannot be the name of a value in a checkpoint")
        if not isinstance(value, torch.Tensor):
            objects[fqn] = value
            continue
        if is_lazy(value):
            raise Refused(f"{fqn}: a lazy module has no shape yet: call it once before")
        if value.layout is not torch.strided or value.is_quantized:
            raise Refused(f"{fqn}: a tensor that is sparse or quantized cannot be saved")
        if value.is_meta:
            raise Refused(f"{fqn}: a tensor on the meta device has no values to save")
        if isinstance(value, DTensor) and any(one.is_partial() for one in value.placements):
            raise Refused(f"{fqn}: a DTensor that is still to be added up over the ranks")
        dtype_of(fqn, value)
    own = {fqn: value for fqn, value in objects.items() if fqn.startswith(f"{RANKS}.")}
    try:
        whole = encode(State(objects, {fqn: (fqn,) for fqn in items}))
        return len(whole), len(encode(State(own)))
    except TooLarge as why:
        largest = max(objects, key=lambda fqn: _encoded_bytes(fqn, objects[fqn]))
        raise TooLarge(f"{largest}: {why}") from why


def check_together(of_ranks: Sequence[Sequence[int]]) -> None:
    """Refuse what fits on each rank but not in one checkpoint, by the results of `check_items`.

    Raises TooLarge.
    """
    together = of_ranks[0][0] + sum(own for _, own in of_ranks[1:])
    if together > states.MAX_STATE_BYTES:
        raise TooLarge(
            f"state besides tensors of {together} bytes on {len(of_ranks)} ranks together; at most "
            f"{states.MAX_STATE_BYTES}: keep large things in tensors, most of all in what is "
            "iterated over, of which each rank saves its own"
        )


def _encoded_bytes(fqn: str, value: object) -> float:
    try:
        return len(encode(State({fqn: value})))
    except TooLarge:
        return math.inf


def require_known(wanted: Items, metadata: Metadata, ref: str, part: str) -> None:
    """See that a checkpoint has what a part wants, in shape and dtype too. Raises DoesNotFit."""
    known = metadata.state_dict_metadata
    begin_anew = f"to begin {part} anew give exclude_from_loading=[{part!r}]"
    missing = [fqn for fqn in wanted if fqn not in known]
    if missing or not wanted:
        raise DoesNotFit(
            f"{ref} has no {', '.join(missing[:5]) or part}; {begin_anew}", missing or [part], []
        )
    for fqn, value in wanted.items():
        entry = known[fqn]
        if isinstance(entry, TensorStorageMetadata) is not isinstance(value, torch.Tensor):
            is_here = "here and not there" if isinstance(value, torch.Tensor) else "there, not here"
            raise DoesNotFit(f"{ref}: {fqn} is a tensor {is_here}; {begin_anew}", [fqn], [])
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if entry.size != value.shape:
            raise DoesNotFit(
                f"{ref}: {fqn} has shape {tuple(entry.size)}, here {tuple(value.shape)}", [fqn], []
            )
        if (saved := entry.properties.dtype) != value.dtype:
            raise DoesNotFit(
                f"{ref}: {fqn} was saved as {saved} and is {value.dtype} here: make it {saved} "
                f"before the TrainRun; {begin_anew}",
                [fqn],
                [],
            )
