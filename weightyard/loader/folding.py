"""The fold of bytes in a tensor, computed where they lie: on the host or on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightyard.format.block import Fold

if TYPE_CHECKING:
    import torch

_COLUMNS = 4096
_WORD_BYTES = 8
_U64 = (1 << 64) - 1


def fold_where_it_lies(raw: torch.Tensor) -> Fold:
    """As `codec.fold`, of a flat tensor of bytes, with integer operations on its device.

    Devices have signed words only; their sums wrap as those of unsigned ones do.
    """
    import torch

    row_bytes = _WORD_BYTES * _COLUMNS
    whole = raw.numel() // row_bytes * row_bytes
    total, weighted = _fold_rows(raw[:whole], _COLUMNS, 0)
    if rest := raw.numel() - whole:
        padded = torch.zeros(-(-rest // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8).to(
            raw.device
        )
        padded[:rest] = raw[whole:]
        more, more_weighted = _fold_rows(
            padded, padded.numel() // _WORD_BYTES, whole // _WORD_BYTES
        )
        total, weighted = total + more, weighted + more_weighted
    return Fold(total & _U64, weighted & _U64)


def _fold_rows(raw: torch.Tensor, columns: int, before: int) -> tuple[int, int]:
    """Fold of rows of words that `before` other words precede, not yet reduced to 64 bits."""
    import torch

    if not raw.numel():
        return 0, 0
    if raw.storage_offset() % _WORD_BYTES:  # torch reads words only where words may begin
        raw = raw.clone()
    words = raw.view(torch.int64).view(-1, columns)
    row_sums, column_sums = words.sum(dim=1), words.sum(dim=0)
    row_numbers = torch.arange(row_sums.numel(), device=raw.device)
    column_numbers = torch.arange(1, columns + 1, device=raw.device)
    total = int(row_sums.sum())
    by_row = int((row_sums * row_numbers).sum())
    by_column = int((column_sums * column_numbers).sum())
    return total, columns * by_row + by_column + before * total
