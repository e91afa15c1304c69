"""Host memory within a budget, used again and again: touching fresh pages costs a copy."""

from __future__ import annotations

import math
import threading

import numpy as np

from weightyard.format.block import MIB


class SpareMemory:
    """Buffers left over from one read or write, for the next one. Thread-safe."""

    def __init__(self, most_bytes: int | None = None) -> None:
        """`most_bytes`: no more is kept between reads; None: all that the last read had."""
        self._lock = threading.Lock()
        self._buffers: list[np.ndarray] = []
        self._most_bytes = most_bytes

    def prepare(self, buffers: int, length: int) -> None:
        """Make so many buffers before anything is read, and touch their pages."""
        self.leave([np.full(_rounded(length), 0, np.uint8) for _ in range(buffers)])

    def take_all(self) -> list[np.ndarray]:
        with self._lock:
            taken, self._buffers = self._buffers, []
        return taken

    def leave(self, buffers: list[np.ndarray]) -> None:
        """Replaces what was left before, so that there is never more than one read's budget."""
        kept: list[np.ndarray] = []
        left = math.inf if self._most_bytes is None else self._most_bytes
        for buffer in reversed(buffers):  # the one used last is the likeliest to fit again
            if buffer.size <= left:
                left -= buffer.size
                kept.insert(0, buffer)
        with self._lock:
            self._buffers = kept


class HostMemory:
    """Gives out buffers and takes them back. Used by one thread."""

    def __init__(self, budget_bytes: int, spare: SpareMemory) -> None:
        self.most_bytes = 0
        """The most there was at once."""
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._spare = spare
        self._free = spare.take_all()

    def fits(self, length: int) -> bool:
        return self._used_bytes + _rounded(length) <= self._budget_bytes

    def take(self, length: int) -> memoryview:
        """Memory of this length, to be given back. Ask only for what `fits`."""
        if not length:
            return memoryview(b"")
        size = _rounded(length)
        fitting = [one for one in self._free if size <= one.size <= 2 * size]
        fitting = [one for one in fitting if self._used_bytes + one.size <= self._budget_bytes]
        if fitting:
            buffer = fitting[-1]  # the one used last: the processor's caches may still hold it
            self._free = [one for one in self._free if one is not buffer]
        else:
            while self._free and self._all_bytes + size > self._budget_bytes:
                self._free.pop()
            buffer = np.empty(size, np.uint8)
        self._used_bytes += buffer.size
        self.most_bytes = max(self.most_bytes, self._all_bytes)
        return buffer.data[:length]

    def give(self, memory: memoryview) -> None:
        """Take back what `take` gave. Whoever had it must not touch it any more."""
        if not memory:
            return
        buffer = memory.obj
        if isinstance(buffer, np.ndarray):
            self._used_bytes -= buffer.size
            self._free.append(buffer)

    def close(self) -> None:
        """Leave what is free to the next read."""
        self._spare.leave(self._free)
        self._free = []

    @property
    def _all_bytes(self) -> int:
        return self._used_bytes + sum(one.size for one in self._free)


class Buffers:
    """Memory for many threads, used again and again; its users bound how much there is.

    A buffer lent is at most twice as long as was asked for. Short ones are not kept: for them the
    allocator has pages that were touched before.
    """

    def __init__(self, spare: SpareMemory | None = None) -> None:
        """`spare`: where to take what others left, and where `leave` puts what is free."""
        self._spare = spare or SpareMemory(0)
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._lent: dict[int, np.ndarray] = {}

    def take(self, length: int) -> memoryview:
        """Memory of this length, with whatever bytes it had before."""
        if length < MIB:
            return np.empty(length, np.uint8).data
        with self._lock:
            self._free += self._spare.take_all()
            fitting = [one for one in self._free if length <= one.size <= 2 * length]
            if fitting:
                # Of equally long ones the one used last, so that no more are in use than needed.
                buffer = min(fitting[::-1], key=len)
                self._free = [one for one in self._free if one is not buffer]
            else:
                # Replaces one that does not fit: so there are never more than were lent at once.
                del self._free[-1:]
                buffer = np.empty(length, np.uint8)
            self._lent[id(buffer)] = buffer
        return buffer.data[:length]

    def give(self, memory: memoryview | None) -> None:
        """Take back what `take` gave; memory that is someone else's is left alone.

        Whoever had it must not touch it any more.
        """
        if memory is not None:
            with self._lock:
                buffer = self._lent.pop(id(memory.obj), None)
                if buffer is not None:
                    self._free.append(buffer)

    def leave(self) -> None:
        """Leave what is free to whoever comes next. What is lent is forgotten."""
        with self._lock:
            self._spare.leave(self._free)
            self._free, self._lent = [], {}


def _rounded(length: int) -> int:
    return -(-length // MIB) * MIB
