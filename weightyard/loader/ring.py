"""A ring of pinned slabs: bytes go onto a device while the next ones are being read."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from weightyard.format.block import ALIGNMENT, aligned
from weightyard.loader.batches import BATCH_BYTES, Batch, Part
from weightyard.loader.budget import CONVERTED_BYTES, SLABS
from weightyard.loader.converting import is_as_stored, put_run, result_dtype
from weightyard.loader.filling import Filled
from weightyard.loader.placing import Fill, Placer
from weightyard.loader.plan import TensorPlan
from weightyard.loader.report import Tally
from weightyard.loader.state import bytes_of, empty_tensor

if TYPE_CHECKING:
    import torch


class Mark(Protocol):
    """A point in a device's queue of copies."""

    def wait(self) -> None:
        """Return when all that was queued before it is done."""


class Copies(Protocol):
    """A device that copies from host memory by itself, in order, while the host goes on."""

    def slab(self, length: int) -> torch.Tensor:
        """Bytes on the host that the device can copy from by itself."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device."""

    def follow(self) -> None:
        """Begin no later copy before what the caller's thread has queued on the device is done."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. The caller keeps the source until a mark set after this was passed."""

    def run(self, work: Callable[[], object]) -> None:
        """Queue work on the device's own memory, behind the copies queued so far."""

    def mark(self) -> Mark:
        """Set a mark behind all that was queued so far."""

    def hand_over(self) -> None:
        """What the caller's thread queues from now on comes after the copies queued so far."""

    def finish(self) -> None:
        """Return when no copy is under way."""


class _Slab:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.busy: Mark | None = None
        """Until this is passed the device may still copy from it."""


class RingPlacer(Placer):
    """Tensors on a device. Host memory is bounded by the slabs, whatever the tensors are."""

    def __init__(
        self,
        plans: Sequence[TensorPlan],
        tally: Tally,
        copies: Copies,
        *,
        dtype: torch.dtype | None = None,
        targets: Mapping[int, torch.Tensor] | None = None,
        slab_bytes: int = BATCH_BYTES,
        slabs: int = SLABS,
    ) -> None:
        self._plans = plans
        self._tally = tally
        self._copies = copies
        self._dtype = dtype
        self._targets = targets or {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._converted: set[int] = set()
        self._picked: dict[int, tuple[torch.Tensor, memoryview]] = {}
        self._free: queue.SimpleQueue[_Slab] = queue.SimpleQueue()
        needed = sum(aligned(plan.bytes) for plan in plans)
        self.batch_bytes = max(ALIGNMENT, min(slab_bytes, needed))
        for _ in range(slabs):
            self._free.put(_Slab(copies.slab(self.batch_bytes)))
        self._scratch: torch.Tensor | None = None
        """On the device, for bytes that are converted there; used again and again, in order."""
        # Several threads queue work on the scratch memory: a copy into it and its use go together.
        self._queueing = threading.Lock()

    def begin(self, number: int) -> None:
        plan, tensor = self._plans[number], self._targets.get(number)
        if tensor is None:
            tensor = self._copies.empty(plan.shape, result_dtype(plan, self._dtype))
        if not is_as_stored(tensor, plan):
            self._converted.add(number)
            if self._scratch is None and not plan.is_picked:
                self._scratch = self._scratch_of(min(CONVERTED_BYTES, self.batch_bytes))
        self._copies.follow()
        self._tensors[number] = tensor
        if plan.is_picked:
            self._picked[number] = empty_tensor(plan.dtype, plan.shape)

    def fill(self, batch: Batch, fill: Fill) -> None:
        with self._slab() as slab:
            sent: list[tuple[Part, torch.Tensor]] = []
            where: list[Filled] = []
            at = 0
            for part in batch.parts:
                dtype, length = self._plans[part.tensor].dtype, part.fetch.length
                if part.tensor in self._picked:
                    where += self.assembled(part)
                else:
                    room = slab.memory[at : at + length]
                    where.append(Filled(part.fetch, dtype, bytes_of(room)))
                    sent.append((part, room))
                    at += aligned(length)
            fill(where)
            with self._tally.stage("place", sum(len(room) for _, room in sent)):
                for part, room in sent:
                    self._send(part, room)
            slab.busy = self._copies.mark()

    def _send(self, part: Part, room: torch.Tensor) -> None:
        """Queue what becomes of bytes in a slab."""
        goes, tensor = part.fetch.goes, self._tensors[part.tensor]
        assert isinstance(goes, int)
        if part.tensor not in self._converted:
            self._copies.copy(self.bytes_on_device(part.tensor, goes, len(room)), room)
            return
        dtype, scratch = self._plans[part.tensor].dtype, self._scratch
        assert scratch is not None
        with self._queueing:
            for begin in range(0, len(room), len(scratch)):
                piece = room[begin : begin + len(scratch)]
                there = scratch[: len(piece)]
                self._copies.copy(there, piece)
                self._copies.run(partial(put_run, tensor, dtype, goes + begin, there))

    def assembled(self, part: Part) -> Iterator[Filled]:
        """Where a part of a tensor goes that is put together on the host."""
        memory = self._picked[part.tensor][1]
        if isinstance(part.fetch.goes, int):
            memory = memory[part.fetch.goes : part.fetch.goes + part.fetch.length]
        yield Filled(part.fetch, self._plans[part.tensor].dtype, memory)

    def bytes_on_device(self, number: int, start: int, length: int) -> torch.Tensor:
        """Some of the memory of a tensor that was begun."""
        return _flat(self._tensors[number])[start : start + length]

    def finish(self, number: int) -> torch.Tensor:
        tensor = self._tensors.pop(number)
        if number in self._picked:
            with self._tally.stage("place", self._plans[number].bytes):
                tensor.detach().copy_(self._picked.pop(number)[0])
        self._copies.hand_over()
        return tensor

    def close(self) -> None:
        # First of all: a copy that is still queued could write to memory that was given back.
        self._copies.finish()
        self._tensors.clear()
        self._picked.clear()
        self._scratch = None

    def _scratch_of(self, length: int) -> torch.Tensor:
        import torch

        return self._copies.empty((length,), torch.uint8)

    @contextmanager
    def _slab(self) -> Iterator[_Slab]:
        """A slab nobody copies from any more."""
        slab = self._free.get()
        try:
            if slab.busy is not None:
                with self._tally.stage("place"):
                    slab.busy.wait()
            yield slab
        finally:
            self._free.put(slab)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


class _EventMark:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class AcceleratorCopies:
    """Copies on a side stream of whatever accelerator this torch has. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._side = torch.Stream(device)
        self._lock = threading.Lock()

    def slab(self, length: int) -> torch.Tensor:
        import torch

        return torch.empty(length, dtype=torch.uint8, pin_memory=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=dtype, device=self._device)

    def follow(self) -> None:
        import torch

        # Memory from torch's allocator may have been given back by work that is still queued.
        self._side.wait_stream(torch.accelerator.current_stream(self._device))

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self.run(lambda: into.copy_(source, non_blocking=True))

    def run(self, work: Callable[[], object]) -> None:
        import torch

        with self._lock:
            # Setting a stream also makes its device the current one of this thread.
            device_index = torch.accelerator.current_device_index()
            before = torch.accelerator.current_stream(self._device)
            torch.accelerator.set_stream(self._side)
            try:
                work()
            finally:
                torch.accelerator.set_stream(before)
                torch.accelerator.set_device_index(device_index)

    def mark(self) -> Mark:
        return _EventMark(self._side.record_event())

    def hand_over(self) -> None:
        import torch

        torch.accelerator.current_stream(self._device).wait_stream(self._side)

    def finish(self) -> None:
        self._side.synchronize()
