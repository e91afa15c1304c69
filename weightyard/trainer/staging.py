"""Staging: a rank's state copied to host memory, from where it is saved while training goes on."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from weightyard.closing import Closing
from weightyard.loader.state import is_other
from weightyard.trainer.packing import Items

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Staging(Closing):
    """Copies state into memory of its own, which the next copy overwrites.

    Training waits for this, so it does nothing but copy. torch's stager makes every DTensor anew by
    its dispatcher, which takes as long as the copy; here it is used only for uncommon values.
    """

    def __init__(self) -> None:
        has_device = torch.accelerator.is_available()
        self._is_pinned = torch.cuda.is_available()
        self._memory: dict[str, torch.Tensor] = {}
        self._seldom = DefaultStager(
            StagingOptions(
                use_pinned_memory=has_device,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_device,
            )
        )

    @torch.no_grad()
    def copied(self, items: Items) -> Items:
        """The items as they are now. Tensors that are one and the same memory stay so."""
        locals_ = {name: _local(value) for name, value in items.items()}
        others = self._seldom.stage(
            {
                name: value
                for name, value in items.items()
                if locals_[name] is None and not _is_never_saved(value)
            }
        )
        assert isinstance(others, dict)
        before, self._memory = self._memory, {}
        copies: dict[Hashable, torch.Tensor] = {}
        staged: Items = {}
        for name, local in locals_.items():
            if local is None:
                staged[name] = others.get(name, items[name])
                continue
            place = (local.data_ptr(), local.dtype, local.shape, local.stride(), is_other(local))
            copy = copies.get(place) if local.numel() else None
            if copy is None:
                copy = copies[place] = self._memory[name] = self._room(before.get(name), local)
                copy.copy_(local, non_blocking=self._is_pinned)
            staged[name] = copy if local is items[name] else _with_local(items[name], copy)
        if any(local is not None and local.device.type != "cpu" for local in locals_.values()):
            torch.accelerator.synchronize()
        return staged

    def close(self) -> None:
        self._memory = {}
        self._seldom.close()

    def _room(self, before: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
        if before is not None and before.shape == local.shape and before.dtype == local.dtype:
            return before
        return torch.empty(local.shape, dtype=local.dtype, pin_memory=self._is_pinned)


def _local(value: object) -> torch.Tensor | None:
    """The part of a tensor that this rank has; None for what is no tensor, or an uncommon one."""
    if hasattr(value, "global_offsets"):  # a CheckpointableTensor of torch: part of a whole
        return None
    local = value.to_local() if type(value) is DTensor else value
    if type(local) not in _PLAIN:
        return None
    assert isinstance(local, torch.Tensor)
    return None if _is_never_saved(local) else local


def _is_never_saved(value: object) -> bool:
    """Whether it is a tensor that the save will refuse, naming it, on all ranks at once."""
    return isinstance(value, torch.Tensor) and (
        value.layout is not torch.strided or value.is_quantized or value.is_meta
    )


def _with_local(like: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with other elements on this rank, which may be on the host if its own are not."""
    names, context = like.__tensor_flatten__()  # type: ignore[no-untyped-call]
    parts = {name: getattr(like, name) for name in names} | {"_local_tensor": local}
    remake = DTensor.__tensor_unflatten__
    made = remake(parts, context, like.size(), like.stride())  # type: ignore[no-untyped-call]
    assert isinstance(made, DTensor)
    return made
