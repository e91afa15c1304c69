"""Amounts: bytes as people read them, in errors and by the command line."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(amount: int) -> str:
    """Bytes as `1.5 GiB`."""
    value = float(amount)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{amount} B" if unit == "B" else f"{value:.1f} {unit}"
