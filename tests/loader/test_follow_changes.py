"""What a follower has to bring: found by names of blocks, and checked where it lies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from loader_world import BERT, noise, yard_in
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from waiting import SOON_S

from weightyard.codec import fold
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.loader.changes import Content, Piece, differing
from weightyard.loader.folding import fold_where_it_lies
from weightyard.names import BlockId

LENGTH = 40
BLOCKS = [BlockId(hashlib.sha256(bytes([number])).hexdigest()) for number in range(3)]


@st.composite
def contents(draw: st.DrawFn) -> Content:
    """A tensor of LENGTH bytes out of any parts of a few blocks."""
    cuts = draw(st.sets(st.integers(1, LENGTH - 1), max_size=6))
    bounds = [0, *sorted(cuts), LENGTH]
    pieces = [
        Piece(
            begin, draw(st.sampled_from(BLOCKS)), draw(st.sampled_from([0, begin, 7])), end - begin
        )
        for begin, end in pairwise(bounds)
    ]
    return Content(DType.U8, (LENGTH,), tuple(pieces))


def spelled(pieces: tuple[Piece, ...]) -> dict[int, tuple[BlockId, int]]:
    """Which byte of which block lies where."""
    return {
        piece.into + at: (piece.block, piece.offset + at)
        for piece in pieces
        for at in range(piece.length)
    }


@given(contents(), contents())
def test_exactly_the_bytes_that_differ_have_to_come(before: Content, after: Content) -> None:
    old, new = spelled(before.pieces), spelled(after.pieces)
    comes = spelled(tuple(differing(before, after)))
    assert comes == {at: byte for at, byte in new.items() if old[at] != byte}


@given(st.integers(0, 40_000), st.integers(0, 9), st.integers(0, 2**32))
def test_a_tensor_has_the_fold_of_its_bytes_wherever_it_begins(
    length: int, start: int, seed: int
) -> None:
    data = np.random.default_rng(seed).integers(0, 256, length + start, np.uint8)
    assert fold_where_it_lies(torch.from_numpy(data)[start:]) == fold(data[start:].copy())


def test_one_changed_bit_changes_the_fold() -> None:
    raw = torch.zeros(MIB + 5, dtype=torch.uint8)
    before = fold_where_it_lies(raw)
    for at in (0, 12345, MIB + 4):
        raw[at] ^= 1
        assert fold_where_it_lies(raw) != before
        raw[at] ^= 1
    assert fold_where_it_lies(raw) == before


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_brings_its_shard_and_no_more_than_it_must(tmp_path: Path, dim: int) -> None:
    versions = [noise(4096, 1024, seed=seed) for seed in (1, 2)]
    with as_rank(2, 4) as mesh, yard_in(tmp_path, poll_s=0.05) as yard:
        local = torch.zeros_like(versions[0].chunk(4, dim)[2]).contiguous()
        weights = {"w": DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)}
        yard.push({"w": versions[0]}, BERT, alias="prod", codec="raw")
        with yard.follow(f"{BERT}@prod", weights) as follower:
            for number, values in enumerate(versions, 1):
                if number > 1:
                    yard.push({"w": values}, BERT, alias="prod", codec="raw")
                assert follower.wait(SOON_S) is not None, follower.failure
                if dim == 0:
                    assert follower.report is not None
                    assert follower.report.raw_bytes <= local.nbytes + 2 * MIB
                follower.apply()
                assert torch.equal(weights["w"].to_local(), values.chunk(4, dim)[2])
