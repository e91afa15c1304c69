"""State copied to host memory: as it was, and into the same memory each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_world import World, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weightyard.trainer.staging import Staging


@pytest.fixture
def staging() -> Iterator[Staging]:
    with Staging() as made:
        yield made


def test_a_copy_stays_what_it_was_whatever_becomes_of_the_state(staging: Staging) -> None:
    items: dict[str, Any] = {
        "weight": torch.arange(6.0).view(2, 3),
        "turned": torch.arange(6.0).view(2, 3).T,
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "bits": torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16),
        "object": ({"epoch": [1, 2]}, ["path"]),
        "step": 3,
    }
    copied = staging.copied(items)
    assert list(copied) == list(items)
    items["object"][0]["epoch"].append(3)
    with torch.no_grad():
        for value in items.values():
            if isinstance(value, torch.Tensor):
                value.fill_(9)
    assert torch.equal(copied["weight"], torch.arange(6.0).view(2, 3))
    assert torch.equal(copied["turned"], torch.arange(6.0).view(2, 3).T)
    assert copied["turned"].is_contiguous()
    assert copied["empty"].shape == (0, 4)
    assert torch.equal(copied["parameter"], torch.ones(2))
    assert copied["bits"].view(torch.int16).tolist() == [0x7FC0, -0x8000]
    assert (copied["object"], copied["step"]) == (({"epoch": [1, 2]}, ["path"]), 3)


@pytest.mark.parametrize("odd", [torch.eye(3).to_sparse(), torch.ones(2, device="meta")])
def test_what_the_save_will_refuse_is_left_for_it_to_name(
    staging: Staging, odd: torch.Tensor
) -> None:
    assert staging.copied({"odd": odd, "step": 3}) == {"odd": odd, "step": 3}


def test_the_same_memory_is_used_again_where_it_fits(staging: Staging) -> None:
    first = staging.copied({"a": torch.ones(4), "b": torch.ones(4)})
    second = staging.copied({"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.zeros(4)})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert len({one.data_ptr() for one in second.values()}) == 3
    assert second["b"].tolist() == [0.0] * 5


def test_tied_tensors_stay_tied_only_as_long_as_they_are(staging: Staging) -> None:
    weight = torch.ones(4)
    tied = staging.copied({"a": weight, "b": weight, "part": weight[:2]})
    assert tied["a"].data_ptr() == tied["b"].data_ptr() != tied["part"].data_ptr()
    untied = staging.copied({"a": weight, "b": torch.zeros(4), "part": weight[:2]})
    assert untied["a"].tolist() == [1.0] * 4
    assert untied["b"].tolist() == [0.0] * 4


def test_a_view_of_other_values_is_not_taken_for_the_memory_it_shares(staging: Staging) -> None:
    turns = torch.tensor([1 + 2j, 3 - 4j])
    back = turns.conj()
    copied = staging.copied({"a": turns, "b": back, "c": back.imag, "d": turns.imag})
    assert torch.equal(copied["b"], back)
    assert copied["c"].tolist() == [-2.0, 4.0]
    assert copied["d"].tolist() == [2.0, -4.0]


def test_a_tensor_that_says_which_part_of_a_whole_it_is_says_so_in_the_copy(
    staging: Staging,
) -> None:
    part: Any = torch.arange(6.0).view(2, 3)
    part.global_shape, part.global_offsets = (4, 3), ((2, 0),)
    part.local_offsets, part.local_sizes = ((0, 0),), ((2, 3),)
    copied = staging.copied({"part": part})["part"]
    part.fill_(9)
    assert torch.equal(copied, torch.arange(6.0).view(2, 3))
    assert (copied.global_shape, copied.global_offsets) == ((4, 3), ((2, 0),))
    assert (copied.local_offsets, copied.local_sizes) == (((0, 0),), ((2, 3),))


def copy_sharded(world: World, rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with Staging() as staging:
        found = []
        for value in (1.0, 2.0):
            local = torch.full((2, 3), value + rank)
            items = {
                "cut": DTensor.from_local(local, mesh, [Shard(0)]),
                "whole": DTensor.from_local(torch.full((2,), value), mesh, [Replicate()]),
            }
            copied = staging.copied(items)
            local.fill_(-1)
            cut, whole = copied["cut"], copied["whole"]
            assert (cut.placements, cut.device_mesh) == (items["cut"].placements, mesh)
            assert cut.to_local().data_ptr() != local.data_ptr()
            found.append((tuple(cut.shape), cut.to_local()[0, 0].item(), whole.to_local().tolist()))
        return found


def test_a_tensor_cut_over_ranks_is_copied_by_each_for_itself(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    assert run_ranks(world, copy_sharded, size=2) == {
        rank: [((4, 3), 1.0 + rank, [1.0, 1.0]), ((4, 3), 2.0 + rank, [2.0, 2.0])]
        for rank in range(2)
    }
