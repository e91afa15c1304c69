"""The fold: the sums that docs/format.md defines, whoever computes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightyard.codec import compiled, fold
from weightyard.codec.folding import Folding
from weightyard.format.block import Fold


def as_defined(raw: bytes) -> Fold:
    words = np.frombuffer(raw + bytes(-len(raw) % 8), "<u8").tolist()
    weighted = sum((place + 1) * word for place, word in enumerate(words))
    return Fold(sum(words) % 2**64, weighted % 2**64)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 70_000), st.integers(0, 7), st.integers(0, 2**32))
@example(32 * 8, 0, 0)
@example(4096 * 8, 0, 0)
@example(4096 * 8 + 1, 1, 0)
def test_with_and_without_compiled_code_it_is_the_sums_of_the_format(
    length: int, shift: int, seed: int
) -> None:
    memory = np.frombuffer(np.random.default_rng(seed).bytes(length + shift), np.uint8)
    raw = memory[shift:]
    expected = as_defined(raw.tobytes())
    assert fold(raw) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_functions", {})
        assert fold(raw) == expected


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 50), st.integers(0, 2**32))
def test_parts_folded_one_after_the_other_are_the_fold_of_all(
    words: list[int], last: int, seed: int
) -> None:
    raw = np.random.default_rng(seed).bytes(8 * sum(words) + last)
    folding, start = Folding(), 0
    for length in (*(8 * count for count in words), last):
        folding.add(raw[start : start + length])
        start += length
    assert folding.fold == as_defined(raw)


def test_memory_with_gaps_is_not_for_compiled_code() -> None:
    assert compiled.fold(np.zeros(64, np.uint8)[::2]) is None
    assert (compiled.fold(np.zeros(64, np.uint8)) is not None) is compiled.is_there()
