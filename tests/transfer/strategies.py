"""Arbitrary models: state dicts of any dtype and shape, in boxes, with bytes of all kinds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from hypothesis import strategies as st

from weightyard.format.block import MIB
from weightyard.format.dtypes import DType, nbytes
from weightyard.format.splitting import BoxShape, StateTensor


@dataclass(frozen=True)
class State:
    """A state dict as its tensors and the bytes of their boxes, in the order split_state wants."""

    tensors: list[StateTensor]
    boxes: list[bytes]


def _shapes(dtype: DType) -> st.SearchStrategy[tuple[int, ...]]:
    small = st.lists(st.integers(0, 9), max_size=4).map(tuple)
    rows = st.integers(1, 3 * MIB * 8 // dtype.bits // 64).map(lambda n: (n, 64))
    shapes = st.one_of(small, rows)
    return shapes if dtype.bits % 8 == 0 else shapes.map(lambda shape: (*shape, 4))


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...], dtype: DType) -> tuple[BoxShape, ...] | None:
    """The tensor whole, or cut once or twice along drawn dimensions."""
    if not shape or 0 in shape or dtype.bits % 8:
        return None
    boxes = [BoxShape((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 2))):
        dim = draw(st.integers(0, len(shape) - 1))
        box = draw(st.sampled_from(boxes))
        if box.shape[dim] > 1:
            at = draw(st.integers(1, box.shape[dim] - 1))
            boxes.remove(box)
            boxes += _cut(box, dim, at)
    return tuple(sorted(boxes, key=lambda box: box.offset)) if len(boxes) > 1 else None


def _cut(box: BoxShape, dim: int, at: int) -> tuple[BoxShape, BoxShape]:
    def part(offset: int, size: int) -> BoxShape:
        moved = (*box.offset[:dim], box.offset[dim] + offset, *box.offset[dim + 1 :])
        return BoxShape(moved, (*box.shape[:dim], size, *box.shape[dim + 1 :]))

    return part(0, at), part(at, box.shape[dim] - at)


def content(length: int, kind: str, seed: int) -> bytes:
    """Bytes that compress in different ways, or not at all."""
    random = np.random.default_rng(seed)
    match kind:
        case "weights":
            words = random.normal(0, 0.02, length // 4 + 1).astype("<f4").view("<u4") >> 16
            return words.astype("<u2").tobytes().ljust(length, b"\x07")[:length]
        case "floats":
            return random.normal(0, 1, length // 4 + 1).astype("<f4").tobytes()[:length]
        case "zeros":
            return bytes(length)
        case "text":
            return (b"weights in a yard, " * (length // 19 + 1))[:length]
        case _:
            return random.bytes(length)


@st.composite
def states(draw: st.DrawFn) -> State:
    tensors, boxes = [], []
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DType))
        shape = draw(_shapes(dtype))
        tensor = StateTensor(f"t{number}", dtype, shape, boxes=draw(_boxes(shape, dtype)))
        kind = draw(st.sampled_from(["weights", "floats", "zeros", "text", "noise"]))
        tensors.append(tensor)
        boxes += [
            content(nbytes(dtype, box.shape), kind, draw(st.integers(0, 3)))
            for box in tensor.box_shapes()
        ]
    assert sum(prod(box.shape) > 0 for t in tensors for box in t.box_shapes()) == len(boxes)
    return State(tensors, boxes)
