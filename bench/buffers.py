"""Destination memory of the reads that are compared."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

MIB = 1024 * 1024
PIECE_BYTES = 32 * MIB
"""What a thread takes at a time when several read one file."""


def touched(length: int) -> memoryview:
    """Memory whose pages are there already, as in a process that reuses its buffers."""
    memory = fresh(length)
    np.frombuffer(memory, np.uint8)[:] = 1
    return memory


def fresh(length: int) -> memoryview:
    """Memory whose pages the kernel still has to give: the first write to each costs a fault.

    It begins with a page. On some processors of AMD the kernel copies at less than half its speed
    to memory that lies 16 bytes further into its page than the source, as NumPy's does.
    """
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # as NumPy asks for large pages, if there are any
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def pieces(length: int) -> Iterator[tuple[int, int]]:
    """Offset and length of the parts threads share out among themselves."""
    for offset in range(0, length, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, length - offset)


class Team:
    """Threads that stay for all repetitions; each may keep something of its own, such as a file."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self.own = threading.local()

    def share(self, length: int, read: Callable[[int, int], object]) -> None:
        """Call `read(offset, length)` for every piece."""
        for done in [self._pool.submit(read, *piece) for piece in pieces(length)]:
            done.result()
