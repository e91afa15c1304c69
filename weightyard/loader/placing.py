"""Placing: where the bytes that are read become tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from weightyard.errors import Unsupported
from weightyard.loader.batches import BATCH_BYTES, Batch
from weightyard.loader.filling import Filled
from weightyard.loader.plan import Pick, TensorPlan
from weightyard.loader.report import Tally
from weightyard.loader.state import bytes_of, empty_tensor, torch_dtype

if TYPE_CHECKING:
    import torch

Fill: TypeAlias = Callable[[Iterable[Filled]], None]
"""Fills memory with what was fetched for it, or raises."""


class Placer(ABC):
    """Makes tensors out of batches. Tensors go by their numbers among those planned.

    Call order, for each tensor: begin (from the caller's thread) → fill, for each batch that has a
    part of it (from any thread, several at once) → finish (from the caller's thread, when those
    fills are done). Last of all close, whatever happened.
    """

    batch_bytes: int = BATCH_BYTES
    """What is on its way in one batch: at most so many bytes, each part aligned."""

    @abstractmethod
    def begin(self, number: int) -> None:
        """Make memory for a tensor."""

    @abstractmethod
    def fill(self, batch: Batch, fill: Fill) -> None:
        """Have a batch filled, and on its way to the device."""

    @abstractmethod
    def finish(self, number: int) -> torch.Tensor:
        """The tensor, which from now on is the caller's."""

    @abstractmethod
    def close(self) -> None:
        """Give everything up; returns when nothing is written any more. Idempotent."""


class HostPlacer(Placer):
    """Tensors on the host: bytes are received where they stay."""

    def __init__(
        self,
        plans: Sequence[TensorPlan],
        tally: Tally,
        *,
        dtype: torch.dtype | None = None,
        targets: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._plans = plans
        self._tally = tally
        self._dtype = dtype
        self._targets = targets or {}
        self._tensors: dict[int, tuple[torch.Tensor, memoryview]] = {}

    def begin(self, number: int) -> None:
        plan, target = self._plans[number], self._targets.get(number)
        if target is not None and is_same_memory(target, plan):
            self._tensors[number] = target, bytes_of(target)
        else:
            self._tensors[number] = empty_tensor(plan.dtype, plan.shape)

    def fill(self, batch: Batch, fill: Fill) -> None:
        fill(self._where(batch))

    def _where(self, batch: Batch) -> Iterable[Filled]:
        for part in batch.parts:
            memory, goes = self._tensors[part.tensor][1], part.fetch.goes
            if not isinstance(goes, Pick):
                memory = memory[goes : goes + part.fetch.length]
            yield Filled(part.fetch, self._plans[part.tensor].dtype, memory)

    def finish(self, number: int) -> torch.Tensor:
        tensor, _ = self._tensors.pop(number)
        return settled(tensor, self._targets.get(number), self._dtype, self._tally)

    def close(self) -> None:
        self._tensors.clear()


def is_same_memory(target: torch.Tensor, plan: TensorPlan) -> bool:
    """Whether a tensor takes the bytes of a plan as they are."""
    return target.dtype == torch_dtype(plan.dtype) and target.is_contiguous()


def settled(
    tensor: torch.Tensor, target: torch.Tensor | None, dtype: torch.dtype | None, tally: Tally
) -> torch.Tensor:
    """A whole tensor as it is wanted: in the target, or of the dtype. Integers are not cast."""
    if target is not None:
        if target is not tensor:
            import torch

            with tally.stage("place"), torch.no_grad():
                target.copy_(tensor)
        return target
    if dtype is not None and dtype != tensor.dtype and tensor.is_floating_point():
        with tally.stage("cast"):
            return tensor.to(dtype)
    return tensor


def device_of(device: Any) -> torch.device:
    """A device that is there. Raises Unsupported."""
    try:
        import torch
    except ImportError:
        raise Unsupported("tensors need torch: pip install 'weightyard[torch]'") from None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as why:
        raise Unsupported(f"device {device}: {str(why).partition(chr(10))[0]}") from None
    accelerator = torch.accelerator.current_accelerator()
    if found.type != "cpu" and (accelerator is None or found.type != accelerator.type):
        raise Unsupported(f"device {device}: tensors are loaded onto cpu or an accelerator")
    return found
