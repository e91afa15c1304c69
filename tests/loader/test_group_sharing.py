"""Who reads what: a pure function of what ranks want, where it lies and where they are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightyard.errors import Refused
from weightyard.format.block import CHUNK_BYTES, MIB
from weightyard.format.manifest import BlockEntry
from weightyard.loader.sharing import (
    ROUND_BYTES,
    PackReplicas,
    Portion,
    Split,
    Wants,
    decode_wants,
    encode_wants,
    split_reads,
    wanted_by_any,
)
from weightyard.storage.store import Replica
from weightyard.transfer.replicas import Place

NEAR_A = PackReplicas("pack-a", (Replica("a:1", "a", "/rack-a"),))
NEAR_B = PackReplicas("pack-b", (Replica("b:1", "b", "/rack-b"),))


def blocks(count: int, raw_bytes: int = 16 * MIB) -> list[BlockEntry]:
    return [BlockEntry(f"{number:064x}", raw_bytes) for number in range(count)]


def all_of(some: list[BlockEntry]) -> Wants:
    return {number: [(0, -(-block.raw_bytes // CHUNK_BYTES))] for number, block in enumerate(some)}


def portions(split: Split) -> list[Portion]:
    return [one for some in split.own + split.rounds for one in some]


def read_by(split: Split, ranks: int) -> list[int]:
    return [
        sum(one.length for one in split.own[rank])
        + sum(one.length for several in split.rounds for one in several if one.reader == rank)
        for rank in range(ranks)
    ]


chunk_runs = st.lists(
    st.tuples(st.integers(0, 7), st.integers(1, 8))
    .map(lambda two: (two[0], sum(two)))
    .map(lambda run: (run[0], min(run[1], 8))),
    max_size=3,
)
wishes = st.lists(
    st.dictionaries(st.integers(0, 9), chunk_runs.filter(bool), max_size=10),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(wishes, st.booleans(), st.integers(1, 20))
def test_every_chunk_wanted_is_read_once_by_one_that_wants_it_and_goes_to_all_that_do(
    wanted: list[Wants], whole: bool, round_chunks: int
) -> None:
    some = blocks(10, 8 * MIB - 5)
    wants = [decode_wants(encode_wants(one), some, whole=whole) for one in wanted]
    lying = {number: (NEAR_A, NEAR_B)[number % 2] for number in range(10)}
    places = [Place("/rack-a"), Place("/rack-b"), Place(), Place("/rack-a"), Place("/rack-c")]
    split = split_reads(
        wants,
        some,
        lying,
        places[: len(wants)],
        whole=whole,
        round_bytes=round_chunks * CHUNK_BYTES,
    )
    seen: Counter[tuple[int, int]] = Counter()
    for portion in portions(split):
        assert portion.reader in portion.wanting
        for extent in portion.extents:
            assert extent.offset % CHUNK_BYTES == 0
            for at in range(extent.offset, extent.offset + extent.length, CHUNK_BYTES):
                chunk = extent.block, at // CHUNK_BYTES
                seen[chunk] += 1
                assert portion.wanting == tuple(
                    rank
                    for rank, one in enumerate(wants)
                    if any(first <= chunk[1] < end for first, end in one.get(chunk[0], ()))
                )
    assert set(seen.values()) <= {1}
    assert set(seen) == {
        (block, chunk)
        for one in wants
        for block, runs in one.items()
        for first, end in runs
        for chunk in range(first, end)
    }
    again = split_reads(
        wants,
        some,
        dict(reversed(lying.items())),
        places[: len(wants)],
        whole=whole,
        round_bytes=round_chunks * CHUNK_BYTES,
    )
    assert again == split


def test_ranks_that_are_equally_near_read_equally_much() -> None:
    some = blocks(64)
    split = split_reads([all_of(some)] * 4, some, {}, [Place()] * 4)
    amounts = read_by(split, 4)
    assert max(amounts) - min(amounts) <= 16 * MIB
    assert sum(amounts) == 64 * 16 * MIB == split.bytes


def test_a_rank_reads_what_is_near_to_it() -> None:
    some = blocks(40)
    lying = {number: (NEAR_A, NEAR_B)[number >= 20] for number in range(40)}
    places = [Place("/rack-b"), Place("/rack-a"), Place("/rack-b"), Place("/rack-a")]
    split = split_reads([all_of(some)] * 4, some, lying, places)
    for portion in portions(split):
        rack = "/rack-a" if portion.extents[0].block < 20 else "/rack-b"
        assert places[portion.reader].rack == rack
    first = {portion.reader for portion in split.rounds[0]}
    assert first == {0, 1, 2, 3}  # all are reading, though what one reads comes last in the model


def test_nearness_gives_no_rank_more_than_twice_its_share() -> None:
    some = blocks(64)
    lying = dict.fromkeys(range(64), NEAR_A)
    places = [Place("/rack-a", "a"), *[Place("/rack-b")] * 7]
    split = split_reads([all_of(some)] * 8, some, lying, places)
    amounts = read_by(split, 8)
    assert amounts[0] == 2 * 64 * 16 * MIB // 8
    assert max(amounts[1:]) - min(amounts[1:]) <= 16 * MIB


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
def test_a_round_is_bounded_whatever_the_model_is(ranks: int) -> None:
    some = blocks(300)
    split = split_reads([all_of(some)] * ranks, some, {}, [Place()] * ranks)
    for some_portions in split.rounds:
        assert sum(one.length for one in some_portions) <= ROUND_BYTES


def test_what_only_one_rank_wants_it_reads_itself_and_nothing_is_exchanged() -> None:
    some = blocks(8)
    wants: list[Wants] = [{rank: [(0, 16)], rank + 4: [(0, 16)]} for rank in range(4)]
    split = split_reads(wants, some, {}, [Place()] * 4)
    assert split.rounds == ()
    for rank, own in enumerate(split.own):
        assert {one.wanting for one in own} == {(rank,)}
        assert {extent.block for one in own for extent in one.extents} == {rank, rank + 4}


def test_what_any_rank_wants_is_counted_once() -> None:
    wants: list[Wants] = [{1: [(0, 2)]}, {}, {2: [(0, 1)], 1: [(1, 3), (4, 5)]}]
    assert wanted_by_any(wants) == {1: [(0, 3), (4, 5)], 2: [(0, 1)]}


@pytest.mark.parametrize(
    "bad",
    [b"123", encode_wants({9: [(0, 1)]}), encode_wants({0: [(0, 17)]})],
    ids=["torn", "no such block", "no such chunk"],
)
def test_a_wish_that_does_not_fit_the_version_is_refused(bad: bytes) -> None:
    with pytest.raises(Refused, match="another rank"):
        decode_wants(bad, blocks(2))
