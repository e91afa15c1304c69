"""Tensors spread over ranks: each loads its own shard, and reads no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loader_world import BERT, noise, same, yard_in
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from waiting import SOON_S

from weightyard.errors import Unsupported
from weightyard.format.block import MIB
from weightyard.loader.layouts import Layout
from weightyard.yard import Yard

W = noise(4096, 1024)
ODD = noise(7, 5, seed=1)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with yard_in(tmp_path_factory.mktemp("layouts")) as opened:
        opened.push({"w.weight": W, "odd": ODD}, BERT, codec="raw")
        yield opened


@contextmanager
def as_rank(rank: int, *mesh: int) -> Iterator[DeviceMesh]:
    """This process as one of several that do not talk to each other."""
    world = 1
    for size in mesh:
        world *= size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", mesh)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
def test_the_shards_of_all_ranks_are_the_tensor(yard: Yard, dim: int) -> None:
    parts: dict[str, list[torch.Tensor]] = {"w.weight": [], "odd": []}
    for rank in range(4):
        with as_rank(rank, 4) as mesh:
            weights = yard.load(BERT, slices={"*": Layout(mesh, [Shard(dim)])})
        for name, tensor in weights.items():
            parts[name].append(tensor)
    whole = {name: torch.cat(some, dim) for name, some in parts.items()}
    assert same(whole, {"w.weight": W, "odd": ODD})


def test_a_rank_reads_its_rows_and_no_more(yard: Yard) -> None:
    with as_rank(1, 4) as mesh:
        report = yard.load(BERT, tensors="w.*", slices={"*": Layout(mesh, [Shard(0)])}).report
    assert report.bytes == report.read_bytes == W.nbytes // 4
    assert report.stored_bytes <= 1.1 * report.bytes + 2 * MIB


def test_two_dimensions_of_ranks_cut_in_both(yard: Yard) -> None:
    with as_rank(3, 2, 2) as mesh:
        both = yard.load(BERT, slices={"*": Layout(mesh, [Shard(0), Shard(1)])})
        rows = yard.load(BERT, slices={"*": Layout(mesh, [Replicate(), Shard(0)])})
    assert same(both, {"w.weight": W[2048:, 512:], "odd": ODD[4:, 3:]})
    assert same(rows, {"w.weight": W[2048:], "odd": ODD[4:]})


@pytest.mark.parametrize("rank", range(4))
def test_fsdp_over_tensor_parallelism_gets_the_rows_torch_gives_it(yard: Yard, rank: int) -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    with as_rank(rank, 2, 2) as mesh:
        weights = yard.load(BERT, slices={"*": Layout(mesh, placements)})
        expected = {}
        for name, tensor in (("w.weight", W), ("odd", ODD)):
            fitting = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
            rows, start = fitting[0][0], fitting[1][0]
            expected[name] = tensor[start : start + rows]
    assert same(weights, expected)
    tensor_parallel, data_parallel = rank % 2, rank // 2
    first = 2048 * tensor_parallel + 1024 * data_parallel
    assert torch.equal(weights["w.weight"], W[first : first + 1024])


def test_a_module_of_fsdp_over_tensor_parallelism_gets_this_rank_s_shards(yard: Yard) -> None:
    # One rank only: torch keeps the mesh of a DTensor, and with it the rank it first was.
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    with as_rank(1, 2, 2) as mesh:
        local = torch.zeros(1024, 1024, dtype=torch.bfloat16)
        module = nn.Module()
        module.w = nn.Module()
        module.w.weight = nn.Parameter(
            DTensor.from_local(
                local, mesh, placements, run_check=False, shape=W.shape, stride=W.stride()
            )
        )
        yard.load_into(module, BERT, tensors="w.*")
    assert torch.equal(local, W[2048:3072])


def test_a_layout_whose_rows_are_apart_is_refused(yard: Yard) -> None:
    layout = [Shard(0), _StridedShard(0, split_factor=2)]
    with as_rank(1, 2, 2) as mesh, pytest.raises(Unsupported, match="next to each other"):
        yard.load(BERT, slices={"w.*": Layout(mesh, layout)})


def test_a_layout_of_sums_is_refused(yard: Yard) -> None:
    with as_rank(0, 2) as mesh, pytest.raises(Unsupported, match="sharded or replicated"):
        yard.load(BERT, slices={"*": Layout(mesh, [Partial()])})


def test_the_shard_of_one_parameter_says_nothing_of_another_whose_name_it_fits_as_a_pattern(
    yard: Yard,
) -> None:
    state = {"w[0]": noise(8, 4, seed=2), "w0": noise(8, 4, seed=3)}
    yard.push(state, "team/brackets", alias="prod")
    with as_rank(2, 4) as mesh:
        module = nn.Module()
        local = torch.zeros(2, 4, dtype=torch.bfloat16)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module.register_parameter("w[0]", nn.Parameter(sharded))
        module.register_parameter("w0", nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16)))
        yard.load_into(module, "team/brackets")
        expected = {"w[0]": state["w[0]"][4:6], "w0": state["w0"]}
        assert same({"w[0]": local, "w0": module.get_parameter("w0").detach()}, expected)
        yard.push({name: -one for name, one in state.items()}, "team/brackets", alias="prod")
        with yard.follow("team/brackets@prod", module, applied="team/brackets@v1") as follower:
            assert follower.wait(SOON_S) is not None, follower.failure
            follower.apply()
        expected = {name: -one for name, one in expected.items()}
        assert same({"w[0]": local, "w0": module.get_parameter("w0").detach()}, expected)


@pytest.mark.parametrize("meta", [False, True])
def test_a_module_of_dtensors_gets_this_rank_s_shards(
    yard: Yard, tmp_path: Path, meta: bool
) -> None:
    with as_rank(2, 4) as mesh:
        module = nn.Module()
        module.w = nn.Module()
        local = torch.zeros(1024, 1024, dtype=torch.bfloat16)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module.w.weight = nn.Parameter(sharded.to("meta") if meta else sharded)
        report = yard.load_into(module, BERT, tensors="w.*")
        assert isinstance(module.w.weight, DTensor)
        assert tuple(module.w.weight.shape) == (4096, 1024)
        assert same({"w": module.w.weight.to_local().detach()}, {"w": W[2048:3072]})
        assert report.bytes == W.nbytes // 4
