"""Placing: where the bytes that are read become tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from weightyard.errors import Unsupported
from weightyard.loader.batches import BATCH_BYTES, Batch, Part
from weightyard.loader.converting import is_as_stored, put_picked, put_run, result_dtype
from weightyard.loader.filling import Filled
from weightyard.loader.plan import Pick, TensorPlan
from weightyard.loader.report import Tally
from weightyard.loader.state import bytes_of, empty_of
from weightyard.transfer.memory import Buffers

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
    """How many bytes a batch may have, each part aligned."""

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
    """Tensors on the host: bytes are received where they stay.

    Tensors that are converted get theirs by way of buffers that are used again and again.
    """

    def __init__(
        self,
        plans: Sequence[TensorPlan],
        tally: Tally,
        *,
        dtype: torch.dtype | None = None,
        targets: Mapping[int, torch.Tensor] | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self.batch_bytes = batch_bytes
        self._plans = plans
        self._tally = tally
        self._dtype = dtype
        self._targets = targets or {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._memory: dict[int, memoryview] = {}
        """Of those that are not converted."""
        self._buffers = Buffers()

    def begin(self, number: int) -> None:
        plan, tensor = self._plans[number], self._targets.get(number)
        if tensor is None:
            tensor = empty_of(result_dtype(plan, self._dtype), plan.shape)
        self._tensors[number] = tensor
        if is_as_stored(tensor, plan):
            self._memory[number] = bytes_of(tensor)

    def fill(self, batch: Batch, fill: Fill) -> None:
        rooms: list[tuple[Part, memoryview]] = []
        try:
            fill([self._where(part, rooms) for part in batch.parts])
            for part, room in rooms:
                self._put(part, room)
        finally:
            for _, room in rooms:
                self._buffers.give(room)

    def finish(self, number: int) -> torch.Tensor:
        self._memory.pop(number, None)
        return self._tensors.pop(number)

    def close(self) -> None:
        self._tensors.clear()
        self._memory.clear()

    def _where(self, part: Part, rooms: list[tuple[Part, memoryview]]) -> Filled:
        """Where a part goes: into its tensor or, if it has to be converted, into a buffer."""
        fetch, dtype = part.fetch, self._plans[part.tensor].dtype
        memory = self._memory.get(part.tensor)
        if memory is not None:
            if not isinstance(fetch.goes, Pick):
                memory = memory[fetch.goes : fetch.goes + fetch.length]
            return Filled(fetch, dtype, memory)
        if isinstance(fetch.goes, Pick):
            return Filled(fetch, dtype, memoryview(b""), partial(self._put_picked, part.tensor))
        room = self._buffers.take(fetch.length)
        rooms.append((part, room))
        return Filled(fetch, dtype, room)

    def _put(self, part: Part, room: memoryview) -> None:
        import torch

        assert isinstance(part.fetch.goes, int)
        source = torch.from_numpy(np.frombuffer(room, np.uint8))
        dtype = self._plans[part.tensor].dtype
        with self._tally.stage(self._stage(part.tensor), room.nbytes):
            put_run(self._tensors[part.tensor], dtype, part.fetch.goes, source)

    def _put_picked(self, number: int, pick: Pick, run: memoryview) -> None:
        dtype = self._plans[number].dtype
        picked_bytes = math.prod(pick.shape) * dtype.bits // 8
        with self._tally.stage(self._stage(number), picked_bytes):
            put_picked(self._tensors[number], dtype, pick, run)

    def _stage(self, number: int) -> str:
        return "place" if number in self._targets else "cast"


def settled(
    tensor: torch.Tensor, target: torch.Tensor | None, dtype: torch.dtype | None, tally: Tally
) -> torch.Tensor:
    """A whole tensor as it is wanted: in the target, or of the dtype. Integers are not cast."""
    if target is not None:
        if target is not tensor:
            import torch

            with tally.stage("place", tensor.nbytes), torch.no_grad():
                target.copy_(tensor)
        return target
    if dtype is not None and dtype != tensor.dtype and tensor.is_floating_point():
        with tally.stage("cast", tensor.nbytes):
            return tensor.to(dtype)
    return tensor


def device_of(device: Any) -> torch.device:
    """A device that is there. Raises Unsupported."""
    try:
        import torch
    except ImportError:
        raise Unsupported("tensors need torch: pip install 'weightyard[torch]'") from None
    if not isinstance(device, str | int | torch.device):
        raise Unsupported(f"device {device!r}: it goes by a name such as 'cpu' or 'cuda:0'")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as why:
        raise Unsupported(f"device {device}: {str(why).partition(chr(10))[0]}") from None
    accelerator = torch.accelerator.current_accelerator()
    if found.type != "cpu" and (accelerator is None or found.type != accelerator.type):
        raise Unsupported(f"device {device}: tensors are loaded onto cpu or an accelerator")
    return found
