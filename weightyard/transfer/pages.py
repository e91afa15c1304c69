"""Fresh memory in huge pages: the first touch of small ones costs more than reading into them."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from weightyard.format.block import MIB

HUGE_BYTES = 2 * MIB


def fresh_memory(length: int) -> np.ndarray:
    """Bytes that begin where a huge page may. Raises MemoryError.

    What an allocator gives begins behind its own notes, never at such a place: of 32 MiB two would
    lie in small pages, and cost as much to touch as the other thirty.
    """
    for spare in (0, HUGE_BYTES):  # Linux 6.7 finds such a place by itself if the length fits
        try:
            pages = mmap.mmap(-1, length + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # too many mappings: the allocator may have memory left over
            break
        memory = np.frombuffer(pages, np.uint8)
        begin = -memory.ctypes.data % HUGE_BYTES
        if begin <= spare:
            with suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE, begin, length)
            return memory[begin : begin + length]
    return np.empty(length, np.uint8)
