"""What a load fetches, by tables: no store, no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from weightyard.errors import Refused, Unsupported
from weightyard.format.block import CHUNK_BYTES, MIB
from weightyard.format.dtypes import DType
from weightyard.format.manifest import Box, Extent, TensorEntry
from weightyard.loader.batches import all_at_once, one_by_one
from weightyard.loader.filling import copy_picked
from weightyard.loader.plan import Fetch, Pick, TensorPlan, cut, plan_tensors


def _tensor(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], width: int = 1
) -> TensorEntry:
    """A tensor whose box number n is block n."""
    dtype = {1: DType.U8, 2: DType.BF16, 4: DType.F32}[width]
    return TensorEntry(
        "t",
        None,
        dtype,
        shape,
        tuple(
            Box(offset, size, (Extent(number, 0, int(np.prod(size)) * width),))
            for number, (offset, size) in enumerate(boxes)
        ),
        None,
    )


def _whole(*shape: int, width: int = 1) -> TensorEntry:
    return _tensor(shape, [((0,) * len(shape), shape)], width)


def _planned(entry: TensorEntry, index: Any = ...) -> TensorPlan:
    (plan,) = plan_tensors([entry], {"t": index})
    return plan


def _runs(plan: TensorPlan) -> list[tuple[int, int, int]]:
    """(block, offset, length) of all that is fetched."""
    return [(e.block, e.offset, e.length) for fetch in plan.fetches for e in fetch.extents]


def _made(plan: TensorPlan, blocks: list[bytes]) -> bytes:
    """The tensor's memory, filled as a plan says."""
    memory = bytearray(b"\xee" * plan.bytes)
    for fetch in plan.fetches:
        run = b"".join(blocks[e.block][e.offset : e.offset + e.length] for e in fetch.extents)
        assert len(run) == fetch.length
        if isinstance(fetch.goes, Pick):
            copy_picked(fetch.goes, plan.dtype, memoryview(bytearray(run)), memoryview(memory))
        else:
            memory[fetch.goes : fetch.goes + fetch.length] = run
    return bytes(memory)


@pytest.mark.parametrize(
    ("index", "runs"),
    [
        (..., [(0, 0, 24)]),
        (2, [(0, 12, 6)]),
        (slice(1, 3), [(0, 6, 12)]),
        ((1, 2), [(0, 8, 1)]),
        ((slice(None), slice(1, 3)), [(0, 1, 20)]),
        ((slice(1, 4, 2), 5), [(0, 11, 13)]),
        (slice(None, None, -1), [(0, 0, 24)]),
        (slice(2, 2), []),
    ],
)
def test_a_slice_fetches_from_its_first_to_its_last_element(
    index: Any, runs: list[tuple[int, int, int]]
) -> None:
    assert _runs(_planned(_whole(4, 6), index)) == runs


def test_what_follows_without_a_hole_goes_straight_into_the_tensor() -> None:
    for index in (..., slice(1, 3), 2, (2, slice(1, 5)), (slice(1, 2), slice(0, 3))):
        assert not _planned(_whole(4, 6), index).is_picked
    for index in ((..., slice(1, 3)), slice(None, None, -1), slice(0, 4, 2)):
        assert _planned(_whole(4, 6), index).is_picked


def test_what_lies_a_chunk_apart_is_fetched_apart() -> None:
    experts = _whole(8, 4, MIB, width=2)
    assert _runs(_planned(experts, (slice(None), slice(1, 2)))) == [
        (0, (expert * 4 + 1) * 2 * MIB, 2 * MIB) for expert in range(8)
    ]
    assert _runs(_planned(experts, slice(0, 8, 4))) == [(0, 0, 8 * MIB), (0, 32 * MIB, 8 * MIB)]


def test_what_lies_nearer_is_fetched_with_what_is_between() -> None:
    near = _whole(4, CHUNK_BYTES)
    plan = _planned(near, (slice(None), slice(0, 10)))
    assert sum(length for *_, length in _runs(plan)) == 3 * CHUNK_BYTES + 10


def test_runs_to_pick_from_are_short_however_long_the_tensor_is() -> None:
    columns = _planned(_whole(4096, 65536), (slice(None), slice(0, 100)))
    assert len(columns.fetches) > 10
    assert max(fetch.length for fetch in columns.fetches) <= 16 * MIB
    vector = _planned(_whole(200 * MIB), slice(None, None, 2))
    assert max(fetch.length for fetch in vector.fetches) <= 16 * MIB


def test_only_the_boxes_that_a_slice_touches_are_fetched() -> None:
    rows = _tensor((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))])
    assert _runs(_planned(rows, slice(2, 4))) == [(1, 0, 12)]
    assert _runs(_planned(rows, slice(1, 3))) == [(0, 6, 6), (1, 0, 6)]
    assert not _planned(rows).is_picked
    columns = _tensor((4, 6), [((0, 0), (4, 3)), ((0, 3), (4, 3))])
    assert _runs(_planned(columns, (..., slice(3, 6)))) == [(1, 0, 12)]
    assert not _planned(columns, (..., slice(3, 6))).is_picked
    assert _planned(columns).is_picked


@st.composite
def _cut_tensors(draw: st.DrawFn) -> TensorEntry:
    """A tensor cut into a grid of boxes."""
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=6))
    cuts = [
        sorted({0, *draw(st.sets(st.integers(1, size), max_size=2))} - {size}) for size in shape
    ]
    spans = [
        list(zip(begins, [*begins[1:], size], strict=True))
        for begins, size in zip(cuts, shape, strict=True)
    ]
    boxes = [((), ())]
    for dim in spans:
        boxes = [
            ((*offset, begin), (*size, end - begin)) for offset, size in boxes for begin, end in dim
        ]
    return _tensor(shape, sorted(boxes), draw(st.sampled_from([1, 2, 4])))


@given(st.data(), _cut_tensors())
@settings(max_examples=150, deadline=None)
def test_any_slice_of_any_boxes_is_what_numpy_makes_of_the_tensor(
    data: st.DataObject, entry: TensorEntry
) -> None:
    width = entry.dtype.bits // 8
    array = np.arange(np.prod(entry.shape), dtype=f"<u{width}").reshape(entry.shape)
    blocks = [
        array[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))].tobytes()
        for box in entry.boxes
    ]
    index = data.draw(npst.basic_indices(entry.shape, allow_newaxis=False))
    plan = _planned(entry, index)
    assert plan.shape == array[index].shape
    assert _made(plan, blocks) == array[index].tobytes()


def test_tensors_tied_in_the_version_are_one_where_the_same_is_wanted_of_them() -> None:
    first = _whole(4, 6)
    again = TensorEntry("u", None, first.dtype, first.shape, first.boxes, "t")
    assert [plan.names for plan in plan_tensors([first, again])] == [("t", "u")]
    apart = plan_tensors([first, again], {"u": slice(0, 2)})
    assert [(plan.names, plan.shape) for plan in apart] == [(("t",), (4, 6)), (("u",), (2, 6))]
    assert [plan.names for plan in plan_tensors([again])] == [("u",)]


def test_a_slice_that_does_not_fit_names_the_tensor() -> None:
    with pytest.raises(Refused, match="slice of tensor t: index 9"):
        _planned(_whole(4, 6), 9)


def test_elements_under_a_byte_are_only_had_whole() -> None:
    box = Box((0,), (8,), (Extent(0, 0, 4),))
    packed = TensorEntry("t", None, DType.F4, (8,), (box,), None)
    assert _runs(_planned(packed)) == [(0, 0, 4)]
    with pytest.raises(Unsupported, match="whole"):
        _planned(packed, slice(0, 2))


def test_extents_are_cut_where_a_run_begins_and_ends() -> None:
    extents = [Extent(5, 100, 10), Extent(6, 0, 20), Extent(9, 7, 5)]
    assert list(cut(extents, 4, 22)) == [Extent(5, 104, 6), Extent(6, 0, 16)]
    assert list(cut(extents, 10, 20)) == [Extent(6, 0, 20)]
    assert list(cut(extents, 30, 5)) == [Extent(9, 7, 5)]


def _big(name: str, length: int) -> TensorPlan:
    entry = TensorEntry(
        name, None, DType.U8, (length,), (Box((0,), (length,), (Extent(0, 0, length),)),), None
    )
    return plan_tensors([entry])[0]


def test_batches_begin_small_and_stay_within_their_bound() -> None:
    plans = [_big(f"t{number}", 8 * MIB) for number in range(30)]
    batches = list(one_by_one(plans, 64 * MIB))
    assert [batch.bytes // MIB for batch in batches] == [8, 16, 32, 64, 64, 56]
    assert [number for batch in batches for number in batch.done] == list(range(30))


def test_a_long_tensor_lies_in_several_batches_and_is_whole_in_the_last() -> None:
    (plan,) = [_big("t", 100 * MIB + 7)]
    batches = list(one_by_one([plan], 32 * MIB))
    fetched = [part.fetch for batch in batches for part in batch.parts]
    assert [batch.done for batch in batches] == [()] * (len(batches) - 1) + [(0,)]
    assert max(batch.bytes for batch in batches) <= 32 * MIB
    assert sum(fetch.length for fetch in fetched) == plan.bytes
    at = 0
    for fetch in fetched:
        assert fetch.goes == at
        assert fetch.extents == (Extent(0, at, fetch.length),)
        at += fetch.length


def test_pieces_of_a_run_end_with_a_chunk_wherever_it_begins() -> None:
    (plan,) = plan_tensors([_whole(100 * MIB)], {"t": slice(MIB // 2, 90 * MIB)})
    batches = list(one_by_one([plan], 32 * MIB))
    extents = [e for batch in batches for part in batch.parts for e in part.fetch.extents]
    assert [e.offset % MIB for e in extents[1:]] == [0] * (len(extents) - 1)
    assert sum(e.length for e in extents) == plan.bytes


def test_what_needs_no_memory_beside_its_own_is_one_batch() -> None:
    straight = [_big(f"t{number}", 300 * MIB) for number in range(3)]
    picked = _planned(_whole(4096, 65536), (slice(None), slice(0, 100)))
    batches = list(all_at_once([straight[0], picked, *straight[1:]]))
    assert (batches[0].done, batches[0].bytes) == ((0, 2, 3), 0)
    assert max(batch.bytes for batch in batches) <= 64 * MIB
    assert batches[-1].done == (1,)


def test_a_tensor_without_elements_is_done_without_a_part() -> None:
    (empty,) = plan_tensors([TensorEntry("t", None, DType.F32, (0, 3), (), None)])
    assert empty.fetches == ()
    for batches in (all_at_once([empty]), one_by_one([empty])):
        assert [(batch.parts, batch.done) for batch in batches] == [((), (0,))]


def test_a_fetch_is_cut_into_parts_of_itself() -> None:
    fetch = Fetch((Extent(3, 5, 10), Extent(4, 0, 10)), 20, 100)
    assert fetch.part(8, 4) == Fetch((Extent(3, 13, 2), Extent(4, 0, 2)), 4, 108)
