"""Bytes that arrive piece by piece in tensors which are not as they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from weightyard.errors import Unsupported
from weightyard.format.dtypes import DType
from weightyard.format.manifest import Box, Extent, TensorEntry
from weightyard.loader.converting import boxes, put_picked, put_run
from weightyard.loader.plan import Pick, plan_tensors

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_elements_in_a_row_are_few_boxes_that_cover_them(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    start = data.draw(st.integers(0, elements.size - 1))
    count = data.draw(st.integers(1, elements.size - start))
    found = [elements[box].reshape(-1) for box in boxes(shape, start, count)]
    assert np.concatenate(found).tolist() == list(range(start, start + count))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def transposed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that does not lie in row-major order."""
    return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))


@pytest.mark.parametrize("into", [torch.zeros(3, 5, 7), transposed((3, 5, 7), torch.bfloat16)])
@pytest.mark.parametrize("step", [1, 4, 16, 37, 105])
def test_pieces_of_any_length_make_the_tensor(into: torch.Tensor, step: int) -> None:
    stored = torch.randn(3, 5, 7).to(torch.float16)
    flat = stored.view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), 2 * step):
        put_run(into, DType.F16, start, flat[start : start + 2 * step])
    assert torch.equal(into, stored.to(into.dtype))


def test_parts_of_elements_are_refused() -> None:
    for start, length in ((1, 4), (0, 3)):
        with pytest.raises(Unsupported, match="cut in two"):
            put_run(torch.zeros(4), DType.F16, start, torch.zeros(length, dtype=torch.uint8))


@settings(max_examples=100, deadline=None)
@given(shape=npst.array_shapes(min_dims=1, max_dims=4, max_side=5), data=st.data())
def test_any_slice_is_picked_into_a_tensor_of_another_dtype(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    index: Any = data.draw(npst.basic_indices(shape, allow_newaxis=False))
    stored = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    extents = (Extent(0, 0, stored.nbytes),)
    entry = TensorEntry(
        "t", None, DType.F32, shape, (Box((0,) * len(shape), shape, extents),), None
    )
    (plan,) = plan_tensors([entry], {"t": index})
    for into in (torch.zeros(plan.shape).double(), transposed(plan.shape, torch.float64)):
        for fetch in plan.fetches:
            extent = fetch.extents[0]
            run = bytearray(stored.tobytes()[extent.offset : extent.offset + fetch.length])
            if isinstance(fetch.goes, Pick):
                put_picked(into, DType.F32, fetch.goes, memoryview(run))
            else:
                put_run(into, DType.F32, fetch.goes, torch.frombuffer(run, dtype=torch.uint8))
        assert np.array_equal(into.numpy(), stored[index])
