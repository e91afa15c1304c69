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


def test_a_small_gap_is_fetched_unless_it_is_somebody_elses_to_read() -> None:
    builder = PackBuilder(PACK)
    blocks = [
        builder.add(encode(bytes([number]) * 4096, hint=Codec.RAW).encoding) for number in range(3)
    ]
    wanted = [want(blocks[0], 0, 4096), want(blocks[2], 0, 4096)]
    known = {block.encoding.block: [block] for block in blocks}
    assert [run.length for run in plan_reads(wanted, known)] == [3 * 4096]
    assert [run.length for run in plan_reads(wanted, known, gap_bytes=16)] == [4096, 4096]


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


def encoded(count: int, raw_bytes: int = RAW_BYTES) -> list[Placement]:
    """Neighbouring blocks that need decoding."""
    builder = PackBuilder(PACK)
    return [builder.add(encode(bytes([i]) * raw_bytes).encoding) for i in range(count)]


def delta_of(placement: Placement) -> Placement:
    """The same block on a base, in another pack."""
    one = placement.encoding
    on_base = Encoding(
        one.block, one.raw_bytes, Codec.RAW, BlockId("ab" * 32), one.fold, one.segments
    )
    return Placement(PackId("03" * 16), placement.offset, on_base)


def test_raw_blocks_need_no_memory_and_others_as_much_as_they_store() -> None:
    raw, others = placed(2), encoded(2)
    (in_place,) = plan([want(block) for block in raw], raw)
    assert in_place.host_bytes == in_place.scratch_bytes == 0
    (run,) = plan([want(block) for block in others], others)
    assert run.length <= run.host_bytes < run.length + 1024


def test_what_goes_to_several_places_needs_memory_for_its_raw_bytes() -> None:
    (block,) = placed(1)
    (run,) = plan([want(block, 0, CHUNK_BYTES + 1)], [block])
    assert run.host_bytes == 2 * CHUNK_BYTES + 2 * CHUNK_BYTES


def test_a_delta_needs_memory_for_its_base_as_well() -> None:
    delta = delta_of(placed(1)[0])
    (run,) = plan([want(delta)], [delta])
    assert 3 * RAW_BYTES <= run.host_bytes < 3 * RAW_BYTES + 8192


@pytest.mark.parametrize("is_delta", [False, True])
def test_no_run_needs_more_memory_than_it_may(is_delta: bool) -> None:
    blocks = [delta_of(block) for block in placed(5)] if is_delta else encoded(5)
    wanted = [want(block) for block in blocks] + [want(blocks[0], 7, RAW_BYTES - 9)]
    by_block = {block.encoding.block: [block] for block in blocks}
    runs = plan_reads(wanted, by_block, host_bytes=5 * MIB)
    assert max(run.host_bytes for run in runs) <= 5 * MIB
    got = sorted(
        (part.block.hex, part.offset, part.end)
        for run in runs
        for read in run.reads
        for part in read.wanted
    )
    for block in blocks:
        covered = {
            byte
            for name, begin, end in got
            if name == block.encoding.block.hex
            for byte in range(begin, end, 4096)
        }
        assert covered >= set(range(0, RAW_BYTES, CHUNK_BYTES))


def test_what_is_cut_for_memory_fills_the_same_buffer() -> None:
    (block,) = encoded(1)
    into = memoryview(bytearray(RAW_BYTES))
    wanted = [Wanted(block.encoding.block, 0, into)]
    runs = plan_reads(wanted, {block.encoding.block: [block]}, host_bytes=5 * MIB)
    for run in runs:
        for read in run.reads:
            for part in read.wanted:
                part.into[:] = bytes([part.offset // CHUNK_BYTES + 1]) * part.into.nbytes
    assert [into[at] for at in range(0, RAW_BYTES, CHUNK_BYTES)] == [1, 1, 3, 3]


def test_a_pack_to_avoid_is_used_only_for_what_lies_nowhere_else() -> None:
    (block,) = placed(1)
    (elsewhere,) = placed(1, PackId("02" * 16))
    by_block = {block.encoding.block: [block, elsewhere]}
    (run,) = plan_reads([want(block)], by_block, avoid={PACK})
    assert run.pack == elsewhere.pack
    (run,) = plan_reads([want(block)], {block.encoding.block: [block]}, avoid={PACK})
    assert run.pack == PACK


def test_stored_bytes_are_laid_out_by_place_and_gaps_go_with_what_is_decoded() -> None:
    builder = PackBuilder(PACK)
    blocks = [
        builder.add(encode(bytes(RAW_BYTES)).encoding),
        builder.add(encode(bytes([1]) * RAW_BYTES).encoding),
        builder.add(encode(bytes([2]) * RAW_BYTES, hint=Codec.RAW).encoding),
        builder.add(encode(bytes([3]) * RAW_BYTES).encoding),
    ]
    wanted = [want(block) for block in blocks]
    (run,) = plan(wanted, blocks)
    scratch = memoryview(bytearray(run.scratch_bytes))
    reads, stored = run.lay_out(scratch)
    assert [read.offset for read in reads] == [blocks[at].offset for at in (0, 2, 3)]
    assert reads[1].into is wanted[2].into
    assert stored[2] is wanted[2].into
    for read, at in ((0, 0), (1, 0), (3, 2)):
        source = reads[at]
        source.into[:] = bytes(source.into.nbytes)
        source.into[blocks[read].offset - source.offset] = 77
        assert stored[read][0] == 77
        assert stored[read].nbytes == blocks[read].encoding.stored_bytes
    apart = memoryview(bytearray(run.length))
    ((whole,), stored) = run.lay_out_apart(apart)
    assert (whole.offset, whole.into.nbytes) == (run.start, run.length)
    assert [one.nbytes for one in stored] == [block.encoding.stored_bytes for block in blocks]
