"""Modules: which parameters and buffers a module has, and which tensors of a version fit them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightyard.errors import DoesNotFit, Refused
from weightyard.format.manifest import TensorEntry
from weightyard.loader.layouts import is_layout, local_index
from weightyard.loader.slicing import Index
from weightyard.loader.state import torch_dtype

if TYPE_CHECKING:
    import torch

_FEW = 20


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or persistent buffer, and every place of a module that has it."""

    tensor: torch.Tensor
    places: tuple[tuple[torch.nn.Module, str], ...]
    names: tuple[str, ...]
    """More than one where the module ties them."""

    @property
    def local(self) -> torch.Tensor:
        """Its memory: of a DTensor, this rank's shard."""
        shard = getattr(self.tensor, "to_local", None)
        return self.tensor.detach() if shard is None else shard().detach()

    def take(self, loaded: torch.Tensor) -> None:
        """Take over a loaded tensor: copy its values or, if this is on meta, put it in place."""
        import torch

        if not self.tensor.is_meta:
            with torch.no_grad():
                self.local.copy_(loaded)
            return
        if is_layout(self.tensor):
            loaded = _as_shard(loaded, self.tensor)
        if isinstance(self.tensor, torch.nn.Parameter):
            loaded = torch.nn.Parameter(loaded, requires_grad=self.tensor.requires_grad)
        for module, name in self.places:
            setattr(module, name, loaded)


def _as_shard(local: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def slots_of(module: torch.nn.Module) -> list[Slot]:
    """What a module's state dict has, tied ones as one. Raises Refused for what is no module."""
    import torch

    if not isinstance(module, torch.nn.Module):
        raise Refused(f"a torch.nn.Module can be filled, not a {type(module).__name__}")
    found: dict[int, tuple[torch.Tensor, list[tuple[torch.nn.Module, str]], list[str]]] = {}
    for name, owner, key, tensor in _walk(module):
        _, places, names = found.setdefault(id(tensor), (tensor, [], []))
        places.append((owner, key))
        names.append(name)
    return [Slot(tensor, tuple(places), tuple(names)) for tensor, places, names in found.values()]


def _walk(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        hidden = owner._non_persistent_buffers_set
        buffers = [(key, one) for key, one in owner._buffers.items() if key not in hidden]
        for key, tensor in (*owner._parameters.items(), *buffers):
            if tensor is not None:
                yield f"{before}{key}", owner, key, tensor


def fit(
    slots: Sequence[Slot],
    entries: Iterable[TensorEntry],
    *,
    strict: bool,
    expected: Iterable[str] | None = None,
) -> dict[str, Slot]:
    """The slot each tensor goes to, by the tensor's name. One name of a tie is enough.

    With `strict`, missing and unexpected keys are an error; `expected`: the keys that must
    be there; None: all of the module's. Raises DoesNotFit, also for another shape or kind: into
    memory that is there floats are cast to floats, and nothing else is cast.
    """
    by_name = {entry.name: entry for entry in entries}
    fitting: dict[str, Slot] = {}
    wrong: list[str] = []
    for slot in slots:
        if there := [by_name[name] for name in slot.names if name in by_name]:
            wrong += _misfits(slot, there)
            fitting[there[0].name] = slot
    missing, unexpected = unmatched(slots, by_name, expected) if strict else ([], [])
    if wrong or missing or unexpected:
        raise DoesNotFit(_said(wrong, missing, unexpected), missing, unexpected)
    return fitting


def unmatched(
    slots: Sequence[Slot], there: Iterable[str], expected: Iterable[str] | None = None
) -> tuple[list[str], list[str]]:
    """Missing and unexpected keys, if tensors of these names are there. `expected`: see `fit`."""
    there = dict.fromkeys(there)
    expected = None if expected is None else set(expected)
    known = {name for slot in slots for name in slot.names}
    missing = [
        name
        for slot in slots
        if not any(one in there for one in slot.names)
        for name in slot.names
        if expected is None or name in expected
    ]
    return missing, [name for name in there if name not in known]


def shards(chosen: Mapping[str, Slot], entries: Iterable[TensorEntry]) -> dict[str, Index]:
    """Of tensors that go to DTensors, by name: the slice this rank has. Raises Unsupported."""
    return {
        entry.name: local_index(tensor, entry.shape)
        for entry in entries
        if is_layout(tensor := chosen[entry.name].tensor)
    }


def _misfits(slot: Slot, there: Sequence[TensorEntry]) -> Iterator[str]:
    """Why a tensor does not fit its slot; `there`: it, and what the tie's other names have."""
    entry, tensor = there[0], slot.tensor
    for other in there[1:]:
        if other.boxes != entry.boxes:
            yield f"{other.name} differs from {entry.name}, to which the module ties it"
    if tuple(tensor.shape) != entry.shape:
        yield f"{entry.name} is {list(entry.shape)}, in the module {list(tensor.shape)}"
    comes = torch_dtype(entry.dtype)
    are_floats = comes.is_floating_point and tensor.dtype.is_floating_point
    if comes != tensor.dtype and not are_floats and not tensor.is_meta:
        yield f"{entry.name} is {comes}, in the module {tensor.dtype}"


def _said(wrong: Sequence[str], missing: Sequence[str], unexpected: Sequence[str]) -> str:
    said = [
        f"{what}: {', '.join(names[:_FEW])}"
        + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
        for what, names in (
            ("shapes, kinds or ties that differ", wrong),
            ("missing keys", missing),
            ("unexpected keys", unexpected),
        )
        if names
    ]
    return "; ".join(said)
