"""Loading a version's tensors into host memory, then onto the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from weightyard.errors import Refused
from weightyard.format.manifest import Box, Manifest, TensorEntry
from weightyard.loader.state import empty_tensor
from weightyard.transfer.plan import Wanted, wanted_of
from weightyard.transfer.reader import Reader

if TYPE_CHECKING:
    import torch


def load_tensors(
    reader: Reader, manifest: Manifest, device: Any = "cpu"
) -> dict[str, torch.Tensor]:
    """All tensors of a version by name. Tied ones come back tied.

    Raises Refused if two files have a tensor of the same name.
    """
    loaded: dict[str, torch.Tensor] = {}
    wanted: list[Wanted] = []
    parts: list[tuple[TensorEntry, Box, np.ndarray, np.ndarray]] = []
    for tensor in manifest.tensors:
        if tensor.name in loaded:
            raise Refused(f"tensor {tensor.name} is in several files: load them one by one")
        if tensor.tied is not None:
            loaded[tensor.name] = loaded[tensor.tied]
            continue
        loaded[tensor.name], into = empty_tensor(tensor.dtype, tensor.shape)
        if len(tensor.boxes) == 1:
            wanted += wanted_of(manifest, tensor.boxes[0].extents, into)
        else:
            for box, array, whole in _boxes(tensor, into):
                wanted += wanted_of(manifest, box.extents, array.reshape(-1).view(np.uint8).data)
                parts.append((tensor, box, array, whole))
    reader.read(wanted)
    for _, box, array, whole in parts:
        at = tuple(
            slice(begin, begin + size) for begin, size in zip(box.offset, box.shape, strict=True)
        )
        whole[at] = array
    return dict(_on_device(loaded, device))


def _boxes(tensor: TensorEntry, into: memoryview) -> Iterator[tuple[Box, np.ndarray, np.ndarray]]:
    """The boxes of a tensor, each with memory of its own and a view of the whole to put it in."""
    element = np.dtype((np.void, tensor.dtype.bits // 8))
    if tensor.boxes:
        whole = np.frombuffer(into, np.uint8).view(element).reshape(tensor.shape)
        for box in tensor.boxes:
            yield box, np.empty(box.shape, element), whole


def _on_device(loaded: dict[str, torch.Tensor], device: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Move each tensor once, so that tied ones stay tied on the device too."""
    moved: dict[int, torch.Tensor] = {}
    for name, tensor in loaded.items():
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        yield name, moved[id(tensor)]
