"""State dicts: tensors of torch or arrays of NumPy as sources, and back again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from weightyard.errors import Refused, Unsupported
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.transfer.pages import fresh_memory
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content

if TYPE_CHECKING:
    import torch

_TORCH = {
    "bool": DType.BOOL,
    "uint8": DType.U8,
    "int8": DType.I8,
    "float8_e5m2": DType.F8_E5M2,
    "float8_e4m3fn": DType.F8_E4M3,
    "float8_e8m0fnu": DType.F8_E8M0,
    "float8_e4m3fnuz": DType.F8_E4M3FNUZ,
    "float8_e5m2fnuz": DType.F8_E5M2FNUZ,
    "int16": DType.I16,
    "uint16": DType.U16,
    "float16": DType.F16,
    "bfloat16": DType.BF16,
    "int32": DType.I32,
    "uint32": DType.U32,
    "float32": DType.F32,
    "complex32": DType.C32,
    "int64": DType.I64,
    "uint64": DType.U64,
    "float64": DType.F64,
    "complex64": DType.C64,
    "complex128": DType.C128,
}
"""Names torch and NumPy (with ml_dtypes) give the element types."""

_LARGE_BYTES = 4 << 20
"""Tensors from this length on get huge pages, for which torch does not ask."""

_FROM_DTYPE = {dtype: name for name, dtype in _TORCH.items()}


def state_content(state: Mapping[str, Any], block_bytes: int) -> Content:
    """A state dict as content to write. Tensors on a device are copied to the host; others are not.

    Raises Refused for a name that is no text, and for a value that is no tensor, naming it.
    """
    tensors, sources = [], []
    for name, value in state.items():
        if not isinstance(name, str):
            raise Refused(f"a tensor name is text, not a {type(name).__name__}")
        dtype, shape, storage, data = _taken_apart(name, value)
        tensors.append(StateTensor(name, dtype, shape, storage=storage))
        if data.nbytes:
            sources.append(MemorySource(data))
    return Content(split_state(tensors, block_bytes), sources)


def _taken_apart(name: str, value: Any) -> tuple[DType, tuple[int, ...], object, memoryview]:
    """Dtype, shape, what identifies its memory, and its bytes in row-major order."""
    dtype = dtype_of(name, value)
    shape = tuple(int(size) for size in value.shape)
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        pointer = value.__array_interface__["data"][0] if value.nbytes else None
        storage = (pointer, value.strides) if pointer else None
        return dtype, shape, storage, array.reshape(-1).view(np.uint8).data
    tensor = value.detach()
    is_itself = tensor.numel() and is_other(tensor) == (False, False)
    storage = (tensor.data_ptr(), tensor.stride()) if is_itself else None
    resolved = tensor.resolve_conj().resolve_neg()
    return dtype, shape, storage, bytes_of(resolved.to("cpu").contiguous())


def is_other(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether it stands for the conjugates, and for the negatives, of what its memory holds."""
    return tensor.is_conj(), tensor.is_neg()


def dtype_of(name: str, value: Any) -> DType:
    """The element type of a tensor or an array. Raises Refused for anything else, naming it."""
    kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if kind not in _TORCH or not hasattr(value, "shape"):
        raise Refused(f"{name}: a {type(value).__name__} of {kind or 'no dtype'} is not a tensor")
    return _TORCH[kind]


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """What torch calls an element type. Raises Unsupported."""
    try:
        import torch
    except ImportError:
        raise Unsupported("tensors need torch: pip install 'weightyard[torch]'") from None
    kind = getattr(torch, _FROM_DTYPE.get(dtype, ""), None)
    if kind is None:
        raise Unsupported(f"this torch has no element type {dtype}")
    assert isinstance(kind, torch.dtype)
    return kind


def empty_tensor(dtype: DType, shape: tuple[int, ...]) -> tuple[torch.Tensor, memoryview]:
    """A tensor on the host to be filled, and its bytes. Raises Unsupported."""
    tensor = empty_of(torch_dtype(dtype), shape)
    return tensor, bytes_of(tensor)


def empty_of(kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on the host to be filled."""
    import torch

    length = math.prod(shape) * kind.itemsize
    if length < _LARGE_BYTES:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(fresh_memory(length)).view(kind).view(shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    import torch

    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:  # contiguous with any stride, but a view as bytes takes only 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8).numpy().data
