"""Cutting a rank's part: which bytes, from where, and what they become together."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import growing_at_most
from hypothesis import given
from hypothesis import strategies as st
from trainer_world import RUN, World, run_ranks

from weightyard.errors import ManifestInvalid, Refused
from weightyard.format.assembly import share_of
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType
from weightyard.format.splitting import BoxShape
from weightyard.loader.state import bytes_of
from weightyard.trainer.cutting import (
    TensorBox,
    TensorSource,
    boxes_of,
    cut,
    manifest_of_shares,
)
from weightyard.trainer.writer import YardWriter
from weightyard.transfer.source import piece_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def box(
    name: str,
    tensor: torch.Tensor,
    offset: tuple[int, ...] | None = None,
    whole: tuple[int, ...] | None = None,
    *,
    is_made: bool = False,
) -> TensorBox:
    shape = tuple(tensor.shape)
    return TensorBox(
        name,
        DType.F32,
        whole or shape,
        BoxShape(offset or (0,) * len(shape), shape),
        lambda: tensor,
        is_made,
        tensor.data_ptr(),
    )


def shares(*boxes: TensorBox) -> list[Any]:
    content = cut(boxes, MIB)
    ids = [block_id(piece_bytes(piece, content.sources)) for piece in content.split.pieces]
    return [share_of(content.split, ids)]


@given(st.data())
def test_any_run_of_a_tensor_laid_out_anyhow_is_as_if_it_were_contiguous(
    data: st.DataObject,
) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    tensor = torch.arange(torch.Size(shape).numel() or 1, dtype=torch.float32).reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start = data.draw(st.integers(0, tensor.shape[dim] - 1))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, data.draw(st.integers(1, 3))),)]
    expected = bytes_of(tensor.contiguous())
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
    source = TensorSource(box("w", tensor, is_made=data.draw(st.booleans())))
    assert source.length == expected.nbytes
    assert source.read_at(4 * start, 4 * (stop - start)) == expected[4 * start : 4 * stop]
    if (view := source.view(4 * start, 4 * (stop - start))) is not None:
        assert view == expected[4 * start : 4 * stop]


def read_slice(world: World, rank: int) -> int:
    """How many of its elements are right."""
    tensor = torch.arange(4096 * 4096, dtype=torch.float32).reshape(4096, 4096).t()
    into = bytearray(4 * 5000)
    with growing_at_most(kib=16 * 1024):
        TensorSource(box("w", tensor)).read_into(4 * 100, memoryview(into))
    expected = tensor[:2].reshape(-1)[100:5100]
    return int((torch.frombuffer(into, dtype=torch.float32) == expected).sum())


def test_a_slice_of_a_transposed_tensor_costs_no_copy_of_all_of_it(tmp_path: Path) -> None:
    """In a process of its own: what others in this one take meanwhile is not the slice's."""
    world = World(tmp_path, str(tmp_path / "store"))
    assert run_ranks(world, read_slice, size=1) == {0: 5000}


def test_ties_that_every_rank_saw_are_kept() -> None:
    top, bottom = torch.zeros(200, 200), torch.ones(200, 200)
    one = shares(box("a", top, (0, 0), (400, 200)), box("b", top, (0, 0), (400, 200)))
    two = shares(box("a", bottom, (200, 0), (400, 200)), box("b", bottom, (200, 0), (400, 200)))
    manifest = manifest_of_shares([*one, *two], MIB)
    assert [tensor.tied for tensor in manifest.tensors] == [None, "a"]


def test_ties_that_not_every_rank_saw_are_dropped_and_the_bytes_are_still_shared() -> None:
    top, bottom = torch.zeros(200, 200), torch.ones(200, 200)
    one = shares(box("a", top, (0, 0), (400, 200)), box("b", top, (0, 0), (400, 200)))
    two = shares(box("a", bottom, (200, 0), (400, 200)))
    three = shares(box("b", bottom, (200, 0), (400, 200)))
    manifest = manifest_of_shares([*one, *two, *three], MIB)
    assert [tensor.tied for tensor in manifest.tensors] == [None, None]
    assert len(manifest.blocks) == 2


def test_a_part_that_no_rank_wrote_is_noticed() -> None:
    with pytest.raises(ManifestInvalid, match="boxes"):
        manifest_of_shares(shares(box("a", torch.zeros(2, 200), (0, 0), (3, 200))), MIB)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(3).to_sparse(), "without plain memory"),
        (torch.zeros(3, device="meta"), "without plain memory"),
    ],
)
def test_a_tensor_without_plain_memory_is_refused_by_name(tensor: torch.Tensor, why: str) -> None:
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"model": {"w": tensor}})
    with pytest.raises(Refused, match=rf"model\.w: .*{why}"):
        boxes_of(planner.create_local_plan().items, planner)


class Halving(dcp.DefaultSavePlanner):
    """Saves everything as bfloat16, made whenever it is asked for."""

    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item).to(torch.bfloat16)  # type: ignore[union-attr]


def test_tensors_made_by_the_planner_are_not_taken_for_tied_where_memory_is_used_again() -> None:
    planner = Halving()
    planner.set_up_planner({f"w{number}": torch.full((999,), number * 1.0) for number in range(9)})
    boxes = boxes_of(planner.create_local_plan().items, planner)
    assert all(one.is_made and one.storage is None for one in boxes)
    assert [float(one.take()[0]) for one in boxes] == [float(number) for number in range(9)]


def save_large(world: World, rank: int, kind: str) -> int:
    """How many tensors came back of those saved with little memory."""
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: what is given back is gone
    state = {f"w{number}": torch.randn(2048, 1024) for number in range(16)}
    if kind == "transposed":
        state = {name: one.t() for name, one in state.items()}
    planner = Halving() if kind == "made" else dcp.DefaultSavePlanner()
    with world.yard(rank) as opened:
        yard = type(opened)(opened.store, opened.catalogue, block_bytes=MIB)
        with YardWriter(yard, RUN, anchors_bytes=0, threads=1) as writer:
            # Little waits to be written, however slow that is beside the encoding.
            small = replace(writer._options, pack_bytes=2 * MIB, kept_bytes=2 * MIB)
            writer._options = small
            dcp.save({"first": torch.zeros(100_000)}, checkpoint_id=0, storage_writer=writer)
            with growing_at_most(kib=40 * 1024):
                dcp.save(state, checkpoint_id=1, storage_writer=writer, planner=planner)
        loaded = yard.load(f"{RUN}@step-1")
    return sum(torch.equal(loaded[name], one.to(loaded[name].dtype)) for name, one in state.items())


@pytest.mark.parametrize("kind", ["as it is", "transposed", "made"])
def test_a_save_takes_no_second_copy_of_the_state(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    assert run_ranks(world, partial(save_large, kind=kind), size=1) == {0: 16}
