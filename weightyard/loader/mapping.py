"""Mapping safetensors files into memory as tensors. Nothing is copied, nothing is written back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weightyard.errors import Damaged, Unsupported

if TYPE_CHECKING:
    import torch


def map_file(file: Path, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a file. Pages are private: what is changed is copied first, by the kernel.

    `tied`: names that the file's metadata gives to tensors of another name come back too, as the
    same memory. Raises Damaged if it is no safetensors file, Unsupported.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise Unsupported("tensors need torch: pip install 'weightyard[torch]'") from None
    try:
        with safe_open(file, framework="pt") as opened:
            tensors: dict[str, torch.Tensor] = opened.get_tensors()
            names = (opened.metadata() or {}) if tied else {}
    except ModuleNotFoundError:
        raise Unsupported("tensors need torch: pip install 'weightyard[torch]'") from None
    except (SafetensorError, OSError) as why:
        raise Damaged(f"{file}: {why}: see `weightyard cache verify`") from why
    for name, first in names.items():
        if name not in tensors and first in tensors:
            tensors[name] = tensors[first]
    return tensors
