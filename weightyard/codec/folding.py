"""The fold of raw bytes: two sums, cheap to compute again on a device (docs/format.md §2).

Compiled code, if the package has it (compiled.py), does it in one pass. Here are row and column
sums, so that NumPy stays in its vector loops: with words laid in rows of k,
sum((i + 1) · w[i]) = k · sum(row · rowsum) + sum((column + 1) · columnsum).
"""

from __future__ import annotations

import numpy as np
from typing_extensions import Buffer

from weightyard.codec import compiled
from weightyard.format.block import Fold

_COLUMNS = 4096
_ROWS = 32
"""How many are folded at a time: their columns are summed while a core's cache has them."""
_U64 = (1 << 64) - 1


class Folding:
    """The fold of bytes that come part by part: summed while a core's cache still has them."""

    def __init__(self) -> None:
        self.fold = Fold(0, 0)
        """Of all bytes so far."""
        self.folded_bytes = 0

    def add(self, data: Buffer) -> None:
        """Those that come next. All parts but the last are whole words."""
        words, more = self.folded_bytes // 8, fold(data)
        weighted = self.fold.weighted + more.weighted + words * more.total
        self.fold = Fold(self.fold.total + more.total & _U64, weighted & _U64)
        self.folded_bytes += memoryview(data).nbytes


def fold(data: Buffer) -> Fold:
    """The fold of these raw bytes."""
    raw = np.frombuffer(memoryview(data), np.uint8)
    sums = compiled.fold(raw)
    if sums is not None:
        return Fold(*sums)
    whole = raw.size // (8 * _COLUMNS) * (8 * _COLUMNS)
    rows = raw[:whole].view("<u8").reshape(-1, _COLUMNS)
    total = weighted = 0
    for start in range(0, len(rows), _ROWS):
        more, more_weighted = _fold_rows(rows[start : start + _ROWS], start * _COLUMNS)
        total, weighted = total + more, weighted + more_weighted
    if rest := raw.size - whole:
        padded = np.zeros(-(-rest // 8) * 8, np.uint8)
        padded[:rest] = raw[whole:]
        more, more_weighted = _fold_rows(padded.view("<u8").reshape(1, -1), whole // 8)
        total, weighted = total + more, weighted + more_weighted
    return Fold(total & _U64, weighted & _U64)


def _fold_rows(words: np.ndarray, before: int) -> tuple[int, int]:
    """Fold of a matrix of words that `before` other words precede, not yet reduced to 64 bits."""
    rows, columns = words.shape
    if not rows:
        return 0, 0
    row_sums = words.sum(axis=1, dtype=np.uint64)
    column_sums = words.sum(axis=0, dtype=np.uint64)
    total = int(row_sums.sum(dtype=np.uint64))
    by_row = int((row_sums * np.arange(rows, dtype=np.uint64)).sum(dtype=np.uint64))
    by_column = int((column_sums * np.arange(1, columns + 1, dtype=np.uint64)).sum(dtype=np.uint64))
    return total, columns * by_row + by_column + before * total
