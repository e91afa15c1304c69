"""Packing: the state of an object as items of a checkpoint, and back again.

torch's checkpoint takes nested state apart by itself, but loses what is empty and turns keys that
are numbers into text. So the tensors of a value become items of their own, and all the rest becomes
one item, a tuple, which torch leaves whole: the value without its tensors, and their paths in it.

    {"loss": [0.5], 3: tensor}   →   data: ({"loss": [0.5], 3: None}, [[3]])   data.3: tensor

A Counter, as torch's MultiStepLR keeps its milestones in, is saved as a dict; where there are any
the tuple has their paths, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from weightyard.errors import Damaged, Refused, TooLarge
from weightyard.trainer.host import share_of_memory
from weightyard.trainer.state import MAX_DEPTH, PathKey, check_object

Items: TypeAlias = dict[str, Any]
"""What a checkpoint saves or loads: tensors and objects by FQN."""


class Room:
    """A budget of memory for tensors that are made anew, with sizes that a manifest claims.

    It is taken before memory is allocated: a manifest of a few bytes can claim any size.
    """

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: in bytes; else this rank's share of the host's memory."""
        self._limit = self._left = share_of_memory() if limit is None else limit

    def take(self, fqn: str, size: int) -> None:
        """Raises TooLarge."""
        if size > self._left:
            raise TooLarge(
                f"{fqn[:200]} of {size} bytes: what a checkpoint brings besides the tensors that "
                f"are here may have {self._limit} bytes in all, and {self._left} are left"
            )
        self._left -= size


def pack(name: str, value: object) -> Items:
    """A value as items. Raises Refused for what cannot be saved, naming its keys."""
    tensors: dict[str, torch.Tensor] = {}
    paths: list[list[PathKey]] = []
    counters: list[list[PathKey]] = []

    def hollow(node: Any, path: tuple[PathKey, ...]) -> Any:
        if len(path) > MAX_DEPTH:
            raise Refused(f"{name}: over {MAX_DEPTH} containers in each other")
        if isinstance(node, torch.Tensor):
            fqn = _fqn(name, path)
            if fqn in tensors:
                raise Refused(f"{fqn}: two tensors of the state would have this name")
            tensors[fqn] = node.detach()
            paths.append(list(path))
            return None
        if type(node) is Counter:
            counters.append(list(path))
        if type(node) in (dict, Counter, OrderedDict):  # modules give an OrderedDict
            return {key: hollow(one, (*path, key)) for key, one in node.items()}
        if type(node) is list or type(node) is tuple:
            return type(node)(hollow(one, (*path, at)) for at, one in enumerate(node))
        return node

    rest = hollow(value, ())
    check_object(rest, name)
    packed = (rest, paths, counters) if counters else (rest, paths)
    return {name: packed, **tensors}


def places(names: Iterable[str], metadata: Metadata, live: Items, room: Room) -> Items:
    """Where to load values to: into the tensors there are now if they fit, else into new ones.

    Gives items, packed values as None; leaves out what the checkpoint does not have. Raises
    TooLarge before it makes a tensor.
    """
    known = metadata.state_dict_metadata
    wanted: Items = {name: None for name in names if name in known}
    named = frozenset(wanted)
    for fqn, entry in known.items():
        if not isinstance(entry, TensorStorageMetadata) or not _is_part(fqn, named):
            continue
        now = live.get(fqn)
        dtype = entry.properties.dtype
        if isinstance(now, torch.Tensor) and now.shape == entry.size and now.dtype == dtype:
            wanted[fqn] = now
        else:
            room.take(fqn, entry.size.numel() * dtype.itemsize)
            wanted[fqn] = torch.empty(entry.size, dtype=dtype)
    return wanted


def _is_part(fqn: str, names: Set[str]) -> bool:
    """Whether it is one of these names, or of a tensor in one."""
    while fqn and fqn not in names:
        fqn = fqn.rpartition(".")[0]
    return fqn in names


def unpack(name: str, items: Mapping[str, Any]) -> Any:
    """The value that was packed. Raises Damaged if the items do not make one."""
    match items.get(name):
        case (rest, list(paths)):
            counters: list[Any] = []
        case (rest, list(paths), list(counters)):
            pass
        case _:
            raise Damaged(f"{name}: not what a run saves of an object")
    if not all(isinstance(path, list) and _are_keys(path) for path in (*paths, *counters)):
        raise Damaged(f"{name}: a path in it is no list of keys")
    tensors = {tuple(path): _fqn(name, path) for path in paths}
    if missing := sorted(set(tensors.values()) - items.keys()):
        raise Damaged(f"{name}: the checkpoint lacks its tensor {missing[0][:200]}")
    filling: Mapping[Sequence[PathKey], Any] = {path: items[fqn] for path, fqn in tensors.items()}
    return _filled(rest, (), filling, {tuple(path) for path in counters})


def _fqn(name: str, path: Sequence[PathKey]) -> str:
    """The name of a tensor in a value. Even if that is the tensor, it differs from the rest's."""
    return ".".join(map(str, (name, *(path or [""]))))


def _are_keys(path: Sequence[object]) -> bool:
    return all(type(key) is str or type(key) is int for key in path)


def _filled(
    node: Any,
    path: tuple[PathKey, ...],
    tensors: Mapping[Sequence[PathKey], Any],
    counters: Set[Sequence[PathKey]],
) -> Any:
    if path in tensors:
        return tensors[path]
    if isinstance(node, dict):
        made = {key: _filled(one, (*path, key), tensors, counters) for key, one in node.items()}
        return Counter(made) if path in counters else made
    if isinstance(node, list | tuple):
        return type(node)(
            _filled(one, (*path, at), tensors, counters) for at, one in enumerate(node)
        )
    return node
