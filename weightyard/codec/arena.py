"""Scratch memory that each thread keeps, so that no chunk waits for fresh pages or for a lock."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from weightyard.format.block import CHUNK_BYTES

Bytes = NDArray[np.uint8]
Words = NDArray[Any]
"""Unsigned little-endian integers of 2, 4 or 8 bytes."""

ARENA_BYTES = 8 * CHUNK_BYTES
"""Covers the deepest use: an XORed chunk, its planes, and the half-words of fp64 in three steps."""

_ALIGNMENT = 64


class Arena(threading.local):
    """Memory handed out piece by piece and taken back all at once; each thread has its own.

    Only the pages a codec touches are ever resident; bf16 needs a quarter of it to decode.
    """

    def __init__(self) -> None:
        self._memory = np.empty(ARENA_BYTES, np.uint8)
        self._used = 0

    def clear(self) -> None:
        """Take everything back. What was handed out before must no longer be in use."""
        self._used = 0

    def take(self, count: int, dtype: DTypeLike) -> Words:
        """Room for `count` items, with whatever bytes it had before."""
        start = self._used
        end = start + count * np.dtype(dtype).itemsize
        if end > ARENA_BYTES:
            raise MemoryError(f"a chunk needs more than {ARENA_BYTES} bytes of scratch memory")
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._memory[start:end].view(dtype)


arena = Arena()
