"""A simulated device that copies as late as it may, and spoils what is used too early."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import torch


class LateMark:
    def __init__(self, device: LateDevice, number: int) -> None:
        self._device = device
        self._number = number

    def wait(self) -> None:
        self._device.reach(self._number)


class LateDevice:
    """Host memory that behaves as a device: copies wait in a queue until somebody waits for them.

    Nothing is copied before it must be, so a slab filled again too early, or a tensor handed over
    before its copies are done, has the wrong bytes. A slab is spoiled once its copies are done:
    bytes that were to stay there would be wrong.

    Memory for a tensor is given out as a caching allocator does: who had it before may still have
    work to do with it, in the caller's stream. Copies into it that do not follow that stream come
    too early: that work spoils them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[Callable[[], object]] = []
        self._done = 0
        self._before: list[torch.Tensor] = []
        """What the caller's stream has not come to yet: the work of who had the memory before."""
        self.slabs: list[torch.Tensor] = []
        self.made_bytes = 0
        self.made: Counter[torch.dtype] = Counter()
        """Bytes by dtype."""
        self.ran = 0
        self.waited = 0
        self.is_finished = False

    @property
    def is_idle(self) -> bool:
        return self._done == len(self._queue)

    def slab(self, length: int) -> torch.Tensor:
        self.slabs.append(torch.full((length,), 0xEE, dtype=torch.uint8))
        return self.slabs[-1]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        with self._lock:
            self._before.append(made.reshape(-1).view(torch.uint8))
        self.made_bytes += made.nbytes
        self.made[dtype] += made.nbytes
        return made

    def follow(self) -> None:
        self._do_what_came_before()

    def _do_what_came_before(self) -> None:
        with self._lock:
            for one in self._before:
                one.fill_(0xDD)
            self._before.clear()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        def late() -> None:
            into.copy_(source)
            source.fill_(0xEE)

        with self._lock:
            self._queue.append(late)

    def run(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._queue.append(work)
            self.ran += 1

    def mark(self) -> LateMark:
        with self._lock:
            return LateMark(self, len(self._queue))

    def hand_over(self) -> None:
        self.reach(self.mark()._number)
        self._do_what_came_before()

    def finish(self) -> None:
        self.hand_over()
        self.is_finished = True

    def reach(self, number: int) -> None:
        with self._lock:
            self.waited += number > self._done
            for late in self._queue[self._done : number]:
                late()
            self._done = max(self._done, number)
