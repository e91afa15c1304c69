"""What a rank receives where it belongs, and what it reads beside: each chunk once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weightyard.format.block import CHUNK_BYTES
from weightyard.format.dtypes import DType
from weightyard.format.manifest import Extent
from weightyard.loader.plan import Fetch, Pick, TensorPlan
from weightyard.loader.sharing import Portion
from weightyard.loader.straight import straight_parts

PICK = Pick((1,), 0, (1,), 0, (1,))


def planned(*fetches: Fetch) -> TensorPlan:
    return TensorPlan(("t",), None, DType.U8, (0,), (), fetches)


def own(*extents: Extent) -> Portion:
    return Portion(1, (1,), extents)


def chunks(extents: list[Extent]) -> set[tuple[int, int]]:
    return {
        (one.block, at // CHUNK_BYTES)
        for one in extents
        for at in range(one.offset, one.offset + one.length, CHUNK_BYTES)
    }


def test_a_run_goes_straight_where_only_this_rank_wants_it() -> None:
    run = Fetch((Extent(0, 10, CHUNK_BYTES), Extent(1, 0, 2 * CHUNK_BYTES)), 3 * CHUNK_BYTES, 100)
    portion = own(Extent(0, CHUNK_BYTES, CHUNK_BYTES), Extent(1, 0, CHUNK_BYTES))
    parts, left = straight_parts([planned(run)], [portion])
    assert left == []
    (part,) = parts  # the end of one block and the beginning of the next are neighbours in it
    assert part.tensor == 0
    start = CHUNK_BYTES - 10
    assert part.fetch == Fetch(
        (Extent(0, CHUNK_BYTES, 10), Extent(1, 0, CHUNK_BYTES)), CHUNK_BYTES + 10, 100 + start
    )


def test_a_chunk_that_is_picked_from_or_belongs_to_an_excepted_tensor_is_left() -> None:
    straight = planned(Fetch((Extent(0, 0, 5),), 5, 0), Fetch((Extent(1, 0, 5),), 5, 5))
    picked = planned(Fetch((Extent(0, 7, 9),), 9, PICK))
    excepted = planned(Fetch((Extent(1, 9, 9),), 9, 0))
    portions = [own(Extent(0, 0, 20), Extent(1, 0, 20)), own(Extent(2, 0, 20))]
    plans = [straight, picked, excepted, planned(Fetch((Extent(2, 3, 4),), 4, 0))]
    parts, left = straight_parts(plans, portions, but={2})
    assert [(part.tensor, part.fetch.extents) for part in parts] == [(3, (Extent(2, 3, 4),))]
    assert left == [portions[0]]


runs = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 5 * CHUNK_BYTES), st.integers(1, 3 * CHUNK_BYTES)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(runs, st.booleans()), max_size=5),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7))),
    st.sets(st.integers(0, 4)),
)
def test_straight_and_left_are_all_of_it_and_share_no_chunk(
    fetches: list[tuple[list[tuple[int, int, int]], bool]],
    mine: set[tuple[int, int]],
    but: set[int],
) -> None:
    plans = [
        planned(
            Fetch(
                tuple(Extent(*run) for run in some),
                sum(length for _, _, length in some),
                PICK if is_picked else 0,
            )
        )
        for some, is_picked in fetches
    ]
    portions = [
        own(Extent(block, chunk * CHUNK_BYTES, CHUNK_BYTES)) for block, chunk in sorted(mine)
    ]
    parts, left = straight_parts(plans, portions, but)
    beside = chunks([extent for one in left for extent in one.extents])
    into: dict[int, int] = dict.fromkeys(range(len(plans)), 0)
    for part in parts:
        assert part.tensor not in but
        assert not isinstance(plans[part.tensor].fetches[0].goes, Pick)
        into[part.tensor] += part.fetch.length
        for extent in part.fetch.extents:
            first, last = extent.offset, extent.offset + extent.length - 1
            for chunk in range(first // CHUNK_BYTES, last // CHUNK_BYTES + 1):
                assert (extent.block, chunk) in mine - beside
    for number, plan in enumerate(plans):
        is_picked = isinstance(plan.fetches[0].goes, Pick)
        expected = 0 if is_picked or number in but else _bytes_in(plan.fetches[0], mine - beside)
        assert into[number] == expected


def _bytes_in(fetch: Fetch, some: set[tuple[int, int]]) -> int:
    return sum(
        min(extent.offset + extent.length, (chunk + 1) * CHUNK_BYTES)
        - max(extent.offset, chunk * CHUNK_BYTES)
        for extent in fetch.extents
        for block, chunk in some
        if block == extent.block
        and chunk * CHUNK_BYTES < extent.offset + extent.length
        and extent.offset < (chunk + 1) * CHUNK_BYTES
    )
