"""Host memory within a budget, used again and again: touching fresh pages costs a copy."""

from __future__ import annotations

import math
import threading

import numpy as np

from weightyard.format.block import MIB


class SpareMemory:
    """Buffers left over from one read or write, for the next one. Thread-safe."""

    def __init__(self, most_bytes: int | None = None) -> None:
        """`most_bytes`: no more is kept while nothing is read; None: all that a read had."""
        self._lock = threading.Lock()
        self._buffers: list[np.ndarray] = []
        self._most_bytes = most_bytes

    def prepare(self, buffers: int, length: int) -> None:
        """Have so many before anything is read; they are written to, so that pages are there."""
        self.leave([np.full(_rounded(length), 0, np.uint8) for _ in range(buffers)])

    def take_all(self) -> list[np.ndarray]:
        with self._lock:
            taken, self._buffers = self._buffers, []
        return taken

    def leave(self, buffers: list[np.ndarray]) -> None:
        """Those of the read that ended last are kept, so there is never more than one's budget."""
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
        """Memory of this length, to be given back. Only what `fits` is asked for."""
        if not length:
            return memoryview(b"")
        size = _rounded(length)
        fitting = [one for one in self._free if size <= one.size <= 2 * size]
        fitting = [one for one in fitting if self._used_bytes + one.size <= self._budget_bytes]
        if fitting:
            buffer = fitting[-1]  # the one used last, which caches still know
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
    """Memory for many threads, used again and again; who uses it bounds how much there is.

    What is lent is at most twice as long as what was asked for. Short buffers are not kept: the
    allocator has pages for them that were touched before.
    """

    def __init__(self, spare: SpareMemory | None = None) -> None:
        """`spare`: what others left, and where `leave` leaves it."""
        self._spare = spare or SpareMemory(0)
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._lent: dict[int, np.ndarray] = {}

    def take(self, length: int) -> memoryview:
        """Memory of this length, with whatever was there before in it."""
        if length < MIB:
            return np.empty(length, np.uint8).data
        with self._lock:
            self._free += self._spare.take_all()
            fitting = [one for one in self._free if length <= one.size <= 2 * length]
            if fitting:
                # Of equal ones the one used last, so that no more are touched than are needed.
                buffer = min(fitting[::-1], key=len)
                self._free = [one for one in self._free if one is not buffer]
            else:
                # In the place of one that does not fit: never more than were lent at once.
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
