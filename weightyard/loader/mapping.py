"""Mapping safetensors files into memory as tensors. Nothing is copied, nothing is written back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weightyard.errors import Damaged, Unsupported
from weightyard.format.dtypes import DType
from weightyard.format.safetensors import (
    LENGTH_BYTES,
    HeaderTensor,
    OddFile,
    header_length,
    parse_header,
)
from weightyard.loader.recent import Recent
from weightyard.loader.state import torch_dtype
from weightyard.transfer.stamp import Stamp

if TYPE_CHECKING:
    import torch

_MOST_LYING = 20_000
"""How many tensors' places in their files are remembered: a few MB."""


_lying: Recent[Stamp, Mapping[str, HeaderTensor]] = Recent(_MOST_LYING)


class MappedFile:
    """A safetensors file whose tensors follow each other without holes, as those of versions do.

    Pages are private: the kernel copies a page before it is changed. Tensors outlive this object.
    """

    def __init__(self, file: Path) -> None:
        """Raises Damaged if it is no such file, Unsupported."""
        import torch

        path = str(file)
        try:
            seen = os.stat(path)
            # Not by `mmap`, which keeps a file open for as long as it is mapped.
            storage = torch.UntypedStorage.from_file(path, False, seen.st_size)
            assert isinstance(storage, torch.UntypedStorage)
        except (OSError, RuntimeError) as why:
            raise _damaged(file, why) from why
        self._pages = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
        stamp = Stamp.of(seen)
        found = _lying.get(stamp)
        if found is None:
            found = _tensors_in(file, self._pages)
            _lying.keep(stamp, found, len(found))
        self._lying = found

    def head(self, length: int) -> bytes:
        """The first bytes of the file."""
        return bytes(self._pages[:length])

    def tensor(
        self, name: str, dtype: DType, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor | None:
        """A tensor on the mapped pages; None if there is no such one. Raises Unsupported.

        `shape`: what it must have.
        """
        import torch

        lies = self._lying.get(name)
        if lies is None or lies.dtype is not dtype or (shape is not None and lies.shape != shape):
            return None
        kind = torch_dtype(dtype)
        if lies.begin == lies.end:
            return torch.empty(lies.shape, dtype=kind)
        count = (lies.end - lies.begin) // kind.itemsize
        flat = torch.frombuffer(self._pages, dtype=kind, count=count, offset=lies.begin)
        return flat.view(lies.shape)


def map_file(file: Path, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of any safetensors file, also one that was kept as plain bytes; mapped likewise.

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
        raise _damaged(file, why) from why
    for name, first in names.items():
        if name not in tensors and first in tensors:
            tensors[name] = tensors[first]
    return tensors


def _tensors_in(file: Path, pages: memoryview) -> dict[str, HeaderTensor]:
    length = header_length(pages[:LENGTH_BYTES], pages.nbytes)
    header = length if isinstance(length, OddFile) else parse_header(pages[:length], pages.nbytes)
    if isinstance(header, OddFile):
        raise _damaged(file, header.reason)
    return {one.name: one for one in header.tensors}


def _damaged(file: Path, why: object) -> Damaged:
    return Damaged(f"{file}: {why}: see `weightyard cache verify`")
