"""Planning a load: which bytes of which blocks are needed for a tensor or a slice of it. Pure.

A tensor lies in boxes, a box in row-major order in blocks. What is wanted of a box is fetched as
runs of neighbouring bytes. A run that the tensor has just so goes straight into its memory; out of
other runs elements are picked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import mul

from weightyard.errors import Refused, Unsupported
from weightyard.format.block import CHUNK_BYTES, MIB
from weightyard.format.dtypes import DType, nbytes
from weightyard.format.manifest import Box, Extent, TensorEntry
from weightyard.loader.slicing import Index, Region, region_of, region_shape, whole_region

PICK_BYTES = 16 * MIB
"""No run to pick from is longer, so that picking takes little memory beside the tensor."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Elements to copy out of a run: as an array in its memory, and as one in the tensor's."""

    shape: tuple[int, ...]
    source: int
    """Where the first element begins in the run."""
    source_strides: tuple[int, ...]
    into: int
    """Where it begins in the tensor's memory."""
    into_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """A run of neighbouring bytes of a box, and what becomes of them."""

    extents: tuple[Extent, ...]
    length: int
    goes: int | Pick
    """Where they begin in the tensor's memory, or which of them to pick."""

    def part(self, start: int, length: int) -> Fetch:
        """Some of a run that goes straight into the tensor."""
        assert isinstance(self.goes, int)
        return Fetch(tuple(cut(self.extents, start, length)), length, self.goes + start)


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to make. Plans, and what was computed from them, are kept from load to load."""

    names: tuple[str, ...]
    """Its own, then those of tensors tied to it."""
    file: int | None
    """The number of its file; None in a state dict."""
    dtype: DType
    shape: tuple[int, ...]
    """Of the slice, if one is wanted."""
    region: Region
    """What is wanted of the tensor as it is stored."""
    fetches: tuple[Fetch, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def bytes(self) -> int:
        """The length of its memory."""
        return nbytes(self.dtype, self.shape)

    @cached_property
    def is_whole(self) -> bool:
        """Whether all of a tensor of its shape is wanted, as it is stored."""
        return self.region == whole_region(self.shape)

    @property
    def is_picked(self) -> bool:
        """Whether some of it cannot go straight into its memory."""
        return any(isinstance(fetch.goes, Pick) for fetch in self.fetches)


def plan_tensors(
    entries: Iterable[TensorEntry], slices: Mapping[str, Index] | None = None
) -> tuple[TensorPlan, ...]:
    """What to fetch for tensors, in the order given; `slices` are by tensor name.

    Tied tensors of which the same is wanted get one plan. Raises Refused for a slice that does not
    fit its tensor, Unsupported for one of elements under a byte.
    """
    plans: dict[tuple[str, Region], tuple[TensorEntry, list[str]]] = {}
    for entry in entries:
        try:
            region = region_of((slices or {}).get(entry.name, ...), entry.shape)
        except Refused as why:
            raise Refused(f"slice of tensor {entry.name}: {why}") from None
        plans.setdefault((entry.tied or entry.name, region), (entry, []))[1].append(entry.name)
    return tuple(plan_region(entry, region, names) for (_, region), (entry, names) in plans.items())


def plan_region(entry: TensorEntry, region: Region, names: Sequence[str]) -> TensorPlan:
    """What to fetch for some of a tensor. Raises Unsupported for elements under a byte."""
    return TensorPlan(
        tuple(names),
        entry.file,
        entry.dtype,
        region_shape(region),
        region,
        tuple(_fetches(entry, region)),
    )


def cut(extents: Sequence[Extent], start: int, length: int) -> Iterator[Extent]:
    """The bytes start … start + length of what some extents hold."""
    end, at = start + length, 0
    for extent in extents:
        begin, stop = max(start, at), min(end, at + extent.length)
        if begin < stop:
            yield Extent(extent.block, extent.offset + begin - at, stop - begin)
        at += extent.length
        if at >= end:
            return


def _fetches(entry: TensorEntry, region: Region) -> Iterator[Fetch]:
    shape = region_shape(region)
    if 0 in shape:
        return
    width, rest = divmod(entry.dtype.bits, 8)
    if rest:
        if shape != entry.shape or len(entry.boxes) != 1:
            raise Unsupported(f"tensor {entry.name}: {entry.dtype} is only loaded whole")
        extents = entry.boxes[0].extents
        yield Fetch(extents, nbytes(entry.dtype, shape), 0)
        return
    if len(entry.boxes) == 1 and region == whole_region(entry.shape):
        yield Fetch(entry.boxes[0].extents, nbytes(entry.dtype, shape), 0)
        return
    kept = iter(_strides(shape, width))
    into_strides = [next(kept) if steps.is_kept else 0 for steps in region]
    for box in entry.boxes:
        yield from _box_fetches(box, region, into_strides, width)


@dataclass(frozen=True, slots=True)
class _Dim:
    """One dimension of what is wanted of a box; strides are in bytes."""

    count: int
    source_stride: int
    into_stride: int


def _box_fetches(
    box: Box, region: Region, into_strides: Sequence[int], width: int
) -> Iterator[Fetch]:
    dims: list[_Dim] = []
    source = into = 0
    for steps, begin, size, stride, into_stride in zip(
        region, box.offset, box.shape, _strides(box.shape, width), into_strides, strict=True
    ):
        before, here = steps.within(begin, size)
        if not here.count:
            return
        source += here.start * stride
        into += before * into_stride
        dims.append(_Dim(here.count, here.step * stride, into_stride))
    dims = [dim for dim in dims if dim.count > 1]
    outer = _split_depth(dims, width)
    inner = dims[outer:]
    for place in product(*(range(dim.count) for dim in dims[:outer])):
        moved = list(zip(place, dims[:outer], strict=True))
        yield from _runs(
            box.extents,
            inner,
            source + sum(number * dim.source_stride for number, dim in moved),
            into + sum(number * dim.into_stride for number, dim in moved),
            width,
        )


def _runs(
    extents: Sequence[Extent], dims: Sequence[_Dim], source: int, into: int, width: int
) -> Iterator[Fetch]:
    """One run from the first to the last element; cut along its first dimension if it is long."""
    length = _span(dims, width)
    if _is_dense(dims, width):
        yield Fetch(tuple(cut(extents, source, length)), length, into)
        return
    first, rest = dims[0], dims[1:]
    fit = max(1, (PICK_BYTES - _span(rest, width)) // abs(first.source_stride) + 1)
    if fit < first.count:
        for number in range(0, first.count, fit):
            some = _Dim(min(fit, first.count - number), first.source_stride, first.into_stride)
            yield from _runs(
                extents,
                [some, *rest] if some.count > 1 else rest,
                source + number * first.source_stride,
                into + number * first.into_stride,
                width,
            )
        return
    lowest = source + sum(min(0, (dim.count - 1) * dim.source_stride) for dim in dims)
    pick = Pick(
        shape=tuple(dim.count for dim in dims),
        source=source - lowest,
        source_strides=tuple(dim.source_stride for dim in dims),
        into=into,
        into_strides=tuple(dim.into_stride for dim in dims),
    )
    yield Fetch(tuple(cut(extents, lowest, length)), length, pick)


def _split_depth(dims: Sequence[_Dim], width: int) -> int:
    """How many dimensions to walk index by index: those with gaps of a chunk or more between them.

    A chunk is the least that can be read, so skipping a smaller gap saves nothing.
    """
    depths = range(len(dims), 0, -1)
    return next(
        (
            depth
            for depth in depths
            if abs(dims[depth - 1].source_stride) - _span(dims[depth:], width) >= CHUNK_BYTES
        ),
        0,
    )


def _span(dims: Sequence[_Dim], width: int) -> int:
    """Bytes from the first to the end of the last element."""
    return sum((dim.count - 1) * abs(dim.source_stride) for dim in dims) + width


def _is_dense(dims: Sequence[_Dim], width: int) -> bool:
    """Whether the elements follow each other without a hole, in the box as in the tensor."""
    strides = _strides([dim.count for dim in dims], width)
    return all(
        dim.source_stride == dim.into_stride == stride
        for dim, stride in zip(dims, strides, strict=True)
    )


def _strides(shape: Sequence[int], width: int) -> list[int]:
    """Of an array in row-major order, in bytes."""
    return [*accumulate(reversed(shape[1:]), mul, initial=width)][::-1] if shape else []
