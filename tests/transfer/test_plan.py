from __future__ import annotations

import pytest

from weightyard.codec import encode
from weightyard.errors import FileMissing, Refused
from weightyard.format.block import CHUNK_BYTES, MIB, Codec, Encoding
from weightyard.format.pack import PackBuilder, Placement
from weightyard.names import BlockId, PackId
from weightyard.transfer.plan import Run, Wanted, plan_reads

PACK = PackId("01" * 16)
RAW_BYTES = 4 * MIB


def placed(count: int, pack: PackId = PACK) -> list[Placement]:
    """Neighbouring raw blocks of four chunks each."""
    builder = PackBuilder(pack)
    return [
        builder.add(encode(bytes([i]) * RAW_BYTES, hint=Codec.RAW).encoding) for i in range(count)
    ]


def want(placement: Placement, offset: int = 0, length: int = RAW_BYTES) -> Wanted:
    return Wanted(placement.encoding.block, offset, memoryview(bytearray(length)))


def plan(wanted: list[Wanted], placements: list[Placement]) -> tuple[Run, ...]:
    by_block: dict[BlockId, list[Placement]] = {}
    for placement in placements:
        by_block.setdefault(placement.encoding.block, []).append(placement)
    return plan_reads(wanted, by_block)


def test_neighbouring_blocks_are_one_request() -> None:
    blocks = placed(3)
    (run,) = plan([want(block) for block in reversed(blocks)], blocks)
    assert (run.start, run.length) == (blocks[0].offset, 3 * RAW_BYTES)
    assert [read.placement for read in run.reads] == blocks


def test_a_request_is_no_longer_than_the_bound() -> None:
    blocks = placed(9)
    assert [run.length // RAW_BYTES for run in plan([want(b) for b in blocks], blocks)] == [4, 4, 1]


def test_a_block_left_out_in_between_is_not_fetched() -> None:
    blocks = placed(3)
    runs = plan([want(blocks[0]), want(blocks[2])], blocks)
    assert [run.start for run in runs] == [blocks[0].offset, blocks[2].offset]


def test_of_a_block_only_the_chunks_wanted_are_fetched() -> None:
    (block,) = placed(1)
    (run,) = plan([want(block, CHUNK_BYTES + 5, CHUNK_BYTES)], [block])
    (read,) = run.reads
    assert (read.first_chunk, read.last_chunk) == (1, 3)
    assert run.length == 2 * CHUNK_BYTES
    assert read.whole is None


def test_what_is_wanted_twice_is_fetched_once() -> None:
    (block,) = placed(1)
    (run,) = plan([want(block, 0, 10), want(block, 5, 10), want(block, 0, RAW_BYTES)], [block])
    assert run.length == RAW_BYTES
    assert len(run.reads[0].wanted) == 3


def test_chunks_far_apart_in_one_block_are_two_requests() -> None:
    (block,) = placed(1)
    runs = plan([want(block, 0, 1), want(block, 3 * CHUNK_BYTES, 1)], [block])
    assert [run.length for run in runs] == [CHUNK_BYTES, CHUNK_BYTES]


def test_a_raw_block_wanted_whole_is_received_in_place() -> None:
    (block,) = placed(1)
    wanted = want(block)
    ((read,),) = (run.reads for run in plan([wanted], [block]))
    assert read.in_place is wanted.into


def test_packs_are_never_mixed_in_a_request() -> None:
    first, second = placed(1), placed(2, PackId("02" * 16))[1:]
    assert {run.pack for run in plan([want(first[0]), want(second[0])], first + second)} == {
        first[0].pack,
        second[0].pack,
    }


def test_a_standalone_placement_goes_before_a_shorter_delta() -> None:
    (block,) = placed(1)
    encoding = block.encoding
    delta = Placement(
        PackId("03" * 16),
        16,
        Encoding(
            encoding.block, encoding.raw_bytes, Codec.RAW, BlockId("ab" * 32), encoding.fold,
            encoding.segments,
        ),
    )  # fmt: skip
    (run,) = plan([want(block)], [delta, block])
    assert run.pack == PACK


def test_nothing_wanted_is_nothing_fetched() -> None:
    (block,) = placed(1)
    assert plan([], [block]) == ()
    assert plan([want(block, 7, 0)], [block]) == ()


def test_a_block_that_lies_nowhere_is_named() -> None:
    (block,) = placed(1)
    with pytest.raises(FileMissing, match=block.encoding.block.hex):
        plan([want(block)], [])


def test_bytes_a_block_does_not_have_are_refused() -> None:
    (block,) = placed(1)
    with pytest.raises(Refused, match=str(RAW_BYTES)):
        plan([want(block, RAW_BYTES - 1, 2)], [block])
