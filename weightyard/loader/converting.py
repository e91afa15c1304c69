"""Converting: stored bytes on their way into a tensor of another dtype or memory order.

What arrives is put into the tensor piece by piece, so that the stored form never is in memory as a
whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from weightyard.errors import Unsupported
from weightyard.format.dtypes import DType
from weightyard.loader.plan import Pick, TensorPlan
from weightyard.loader.state import torch_dtype

if TYPE_CHECKING:
    import torch

_WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
"""A type that both torch and NumPy know, by the bytes of an element."""


def result_dtype(plan: TensorPlan, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the resulting tensor. Only floating-point tensors are cast."""
    stored = torch_dtype(plan.dtype)
    return stored if dtype is None or not stored.is_floating_point else dtype


def is_as_stored(tensor: torch.Tensor, plan: TensorPlan) -> bool:
    """Whether a tensor takes the bytes of a plan as they are."""
    return tensor.dtype == torch_dtype(plan.dtype) and tensor.is_contiguous()


def converted(
    plans: Sequence[TensorPlan], dtype: torch.dtype | None, targets: Mapping[int, torch.Tensor]
) -> frozenset[int]:
    """The numbers of the tensors that are not as they are stored. Raises Unsupported."""
    return frozenset(
        number
        for number, plan in enumerate(plans)
        if (
            not is_as_stored(targets[number], plan)
            if number in targets
            else result_dtype(plan, dtype) != torch_dtype(plan.dtype)
        )
    )


def widening(plans: Sequence[TensorPlan], dtype: torch.dtype | None) -> int:
    """How many times as long as stored a tensor is at most, once it is cast."""
    wider = (-(-8 * result_dtype(plan, dtype).itemsize // plan.dtype.bits) for plan in plans)
    return max(wider, default=1)


def put_run(into: torch.Tensor, dtype: DType, start: int, source: torch.Tensor) -> None:
    """Put stored bytes into a tensor; `start`: where they begin in its stored form.

    Both are on one device, and no memory is taken there. Raises Unsupported for parts of elements.
    """
    width = dtype.bits // 8
    if start % width or source.numel() % width:
        raise Unsupported(f"elements of {dtype} that are cut in two are only loaded as they are")
    values = source.view(torch_dtype(dtype))
    into = into.detach()
    if into.is_contiguous():
        into = into.view(-1)
    at = 0
    for box in boxes(tuple(into.shape), start // width, values.numel()):
        part = into[box]
        part.copy_(values[at : at + part.numel()].view(part.shape))
        at += part.numel()


def put_picked(into: torch.Tensor, dtype: DType, pick: Pick, run: memoryview) -> None:
    """Put elements of a run into a tensor of the host."""
    import torch

    width = dtype.bits // 8
    chosen: np.ndarray = np.ndarray(
        pick.shape, _WORDS[width], run, offset=pick.source, strides=pick.source_strides
    )
    if min(pick.source_strides) < 0 or not chosen.flags.aligned:  # torch has no such tensors
        chosen = chosen.copy()
    part = into.detach()[pick_box(pick, tuple(into.shape), width)]
    part.copy_(torch.from_numpy(chosen).view(torch_dtype(dtype)).reshape(part.shape))


def boxes(shape: tuple[int, ...], start: int, count: int) -> Iterator[tuple[slice, ...]]:
    """A run of elements in row-major order, as few boxes. Pure."""
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    end = start + count
    first, last = -(-start // row), end // row
    if first > last:  # all of it within a row
        yield from _within_row(shape, last, start, end)
        return
    if start < first * row:
        yield from _within_row(shape, first - 1, start, first * row)
    if first < last:
        yield slice(first, last), *(slice(0, size) for size in shape[1:])
    if last * row < end:
        yield from _within_row(shape, last, last * row, end)


def _within_row(
    shape: tuple[int, ...], number: int, start: int, end: int
) -> Iterator[tuple[slice, ...]]:
    row = math.prod(shape[1:])
    for box in boxes(shape[1:], start - number * row, end - start):
        yield slice(number, number + 1), *box


def pick_box(pick: Pick, shape: tuple[int, ...], width: int) -> tuple[slice, ...]:
    """The box of a tensor that a pick fills: each of its strides is that of a dimension. Pure."""
    counts = dict(zip(pick.into_strides, pick.shape, strict=True))
    at = pick.into
    box = []
    for dim, size in enumerate(shape):
        stride = math.prod(shape[dim + 1 :]) * width
        begin, at = divmod(at, stride)
        count = counts.get(stride, 1) if size > 1 else 1
        box.append(slice(begin, begin + count))
    return tuple(box)
