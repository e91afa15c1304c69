"""Slices: which elements of a tensor are wanted, by NumPy's rules for basic indexing. Pure."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType
from typing import Any, TypeAlias

from weightyard.errors import Refused

Index: TypeAlias = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """Indices along one dimension: `count` of them, from `start`, every `step`."""

    start: int
    count: int
    step: int = 1
    """Never 0; below 0 they go backwards."""
    is_kept: bool = True
    """False: a single index, whose dimension the result does not have."""

    def within(self, begin: int, size: int) -> tuple[int, Steps]:
        """How many come before begin … begin + size - 1; and those inside, counted from `begin`."""
        last = begin + size - 1
        if self.step > 0:
            first = -((self.start - begin) // self.step)
            end = (last - self.start) // self.step + 1
        else:
            first = -((last - self.start) // -self.step)
            end = (self.start - begin) // -self.step + 1
        first, end = max(first, 0), min(end, self.count)
        start = self.start + first * self.step - begin
        return first, Steps(start, max(end - first, 0), self.step, self.is_kept)


Region: TypeAlias = tuple[Steps, ...]
"""One for each dimension of the tensor."""


@lru_cache(maxsize=1024)  # most tensors of a model have one of a few shapes
def whole_region(shape: tuple[int, ...]) -> Region:
    """All of a tensor."""
    return tuple(Steps(0, size) for size in shape)


def region_of(index: Index, shape: Sequence[int]) -> Region:
    """What an index means on a tensor of this shape. Raises Refused where NumPy raises."""
    if index is ...:
        return whole_region(tuple(shape))
    given = list(index) if isinstance(index, tuple) else [index]
    gaps = [at for at, one in enumerate(given) if one is ...]
    if len(gaps) > 1:
        raise Refused("a slice has at most one ...")
    whole = [slice(None)] * (len(shape) - len(given) + len(gaps))
    if len(given) - len(gaps) > len(shape):
        raise Refused(f"{len(given)} indices for {len(shape)} dimensions")
    at = gaps[0] if gaps else len(given)
    given[at : at + len(gaps)] = whole
    return tuple(_steps(one, size) for one, size in zip(given, shape, strict=True))


def region_shape(region: Region) -> tuple[int, ...]:
    """The shape of what a region picks."""
    return tuple(steps.count for steps in region if steps.is_kept)


def _steps(one: Any, size: int) -> Steps:
    if isinstance(one, slice):
        try:
            chosen = range(*one.indices(size))
        except (TypeError, ValueError) as why:
            raise Refused(f"{one}: {why}") from None
        step = chosen.step if len(chosen) > 1 else 1
        return Steps(chosen.start if chosen else 0, len(chosen), step)
    try:
        if isinstance(one, bool):
            raise TypeError
        number = operator.index(one)
    except TypeError:
        raise Refused(
            f"a slice is made of integers, slices and ..., not of a {type(one).__name__}"
        ) from None
    if not -size <= number < size:
        raise Refused(f"index {number} of a dimension of {size}")
    return Steps(number % size, 1, is_kept=False)
