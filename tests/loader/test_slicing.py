"""Slices mean what they mean in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from weightyard.errors import Refused
from weightyard.loader.slicing import Steps, region_of, region_shape


@given(st.data(), npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
def test_an_index_picks_what_numpy_picks(data: st.DataObject, shape: tuple[int, ...]) -> None:
    index = data.draw(npst.basic_indices(shape, allow_newaxis=False))
    array = np.arange(np.prod(shape)).reshape(shape)
    region = region_of(index, shape)
    picked = array[
        np.ix_(*([one.start + i * one.step for i in range(one.count)] for one in region))
    ]
    expected = array[index]
    assert region_shape(region) == expected.shape
    assert picked.reshape(expected.shape).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (4, "index 4 of a dimension of 4"),
        (-5, "index -5"),
        ((0, 0, 0), "3 indices for 2 dimensions"),
        ((..., 0, ...), "at most one"),
        (None, "not of a NoneType"),
        (True, "not of a bool"),
        ("a", "not of a str"),
        ([0, 1], "not of a list"),
        (1.0, "not of a float"),
        (slice(0, 2, 0), "step"),
        (slice("a"), "slice"),
    ],
)
def test_what_is_no_basic_index_is_refused_and_named(index: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        region_of(index, (4, 3))


@given(
    st.integers(0, 20), st.integers(1, 8), st.integers(-4, 4).filter(bool), st.integers(0, 30),
    st.integers(1, 12),
)  # fmt: skip
def test_steps_within_a_box_are_those_that_lie_in_it(
    start: int, count: int, step: int, begin: int, size: int
) -> None:
    every = [start + number * step for number in range(count)]
    before, here = Steps(start, count, step).within(begin, size)
    inside = [at for at in every if begin <= at < begin + size]
    assert [begin + here.start + i * here.step for i in range(here.count)] == inside
    if inside:
        assert every[before] == inside[0]
