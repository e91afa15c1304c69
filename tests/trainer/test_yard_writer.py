"""Saving by several ranks: one checkpoint of boxes, whatever the parallel layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from trainer_world import RUN, Net, World, run_ranks, train

from weightyard.format.manifest import Manifest, TensorEntry
from weightyard.storage import layout
from weightyard.trainer.state import State, decode
from weightyard.trainer.values import save_values
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, str(tmp_path / "store"))


def ddp(net: Net) -> torch.nn.Module:
    return DistributedDataParallel(net)


def fsdp(net: Net) -> torch.nn.Module:
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def tensor_parallel(net: Net) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    return parallelize_module(net, mesh, plan)


def fsdp_and_tensor_parallel(net: Net) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    parallelize_module(net, mesh["tensor"], plan)
    return fully_shard(net, mesh=mesh["data"])


def whole(state: Mapping[str, Any]) -> dict[str, bytes]:
    """The tensors of a state dict, shards put together, as bytes by flat name."""
    flat, _ = dcp._nested_dict.flatten_state_dict(dict(state))
    tensors = {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in flat.items()
        if isinstance(one, torch.Tensor)
    }
    return {name: as_bytes(one) for name, one in tensors.items()}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save_trained(world: World, rank: int, layout: str, is_async: bool) -> dict[str, Any]:
    net = globals()[layout](Net())
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    train(net, optimizer, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optim = get_state_dict(net, optimizer, options=options)
    state = {"model": model, "optim": optim, "sched": {"lr": 0.5, "seen": [1, (2, 3)]}}
    expected = whole(state)
    with world.yard(rank) as yard, YardWriter(yard, RUN, metrics={"loss": 0.25}) as writer:
        if is_async:
            dcp.async_save(state, checkpoint_id="step-2", storage_writer=writer).result()
        else:
            dcp.save(state, checkpoint_id="step-2", storage_writer=writer)
        return {
            "tensors": expected,
            "report": writer.report,
            "version": writer.version,
            "generation": writer.generation,
        }


@pytest.mark.parametrize(
    ("layout", "ranks", "is_async"),
    [
        ("ddp", 2, False),
        ("fsdp", 4, False),
        ("fsdp", 3, True),
        ("tensor_parallel", 2, True),
        ("fsdp_and_tensor_parallel", 4, False),
    ],
)
def test_a_checkpoint_holds_the_state_of_all_ranks_bit_for_bit(
    world: World, layout: str, ranks: int, is_async: bool
) -> None:
    found = run_ranks(world, partial(save_trained, layout=layout, is_async=is_async), size=ranks)
    with world.yard(99) as yard:
        version = yard.resolve(f"{RUN}@step-2")
        assert (version.step, version.metrics) == (2, {"loss": 0.25})
        assert loaded(yard, "step-2") == found[0]["tensors"]
        assert state_of(yard, "step-2", world.folder).objects["sched.seen"] == [1, (2, 3)]
    assert [one["version"] for one in found.values()] == [version] + [None] * (ranks - 1)
    assert {one["generation"] for one in found.values()} == {1}
    reports = [one["report"] for one in found.values()]
    assert all(report.packs_written for report in reports)  # each wrote its own
    tensor_bytes = sum(map(len, found[0]["tensors"].values()))
    state_bytes = version.logical_bytes - tensor_bytes
    assert 0 < state_bytes < 20_000
    assert sum(report.logical_bytes for report in reports) == version.logical_bytes  # once


def loaded(yard: Yard, step: str) -> dict[str, bytes]:
    return {name: as_bytes(one) for name, one in yard.load(f"{RUN}@{step}").items()}


def state_of(yard: Yard, step: str, folder: Path) -> State:
    path = yard.pull(f"{RUN}@{step}", folder / step, include=["state.json"])
    return decode((path / "state.json").read_bytes())


def save_stage(world: World, rank: int) -> None:
    """Pipeline parallel: each rank has layers of its own, and what all have."""
    net = Net()
    names = (f"layers.{rank}.", f"layers.{rank + 2}.")
    mine = {name: one for name, one in net.state_dict().items() if name.startswith(names)}
    state = {"model": mine, "stages": {str(rank): f"stage {rank}"}, "step": 7}
    with world.yard(rank) as yard, YardWriter(yard, RUN) as writer:
        dcp.save(state, checkpoint_id=7, storage_writer=writer)


def test_stages_of_a_pipeline_make_one_checkpoint(world: World) -> None:
    run_ranks(world, save_stage, size=2)
    expected = {
        f"model.{name}": as_bytes(one)
        for name, one in Net().state_dict().items()
        if name.startswith("layers.")
    }
    with world.yard(99) as yard:
        assert loaded(yard, "step-7") == expected
        state = state_of(yard, "step-7", world.folder)
    assert state.objects == {"stages.0": "stage 0", "stages.1": "stage 1", "step": 7}
    assert state.paths["model.layers.3.bias"] == ("model", "layers.3.bias")
    assert state.paths.keys() == expected.keys() | state.objects.keys()


def save_shards(world: World, rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    state = {
        name: distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)
        for name, one in shards().items()
    }
    with world.yard(rank) as yard, YardWriter(yard, RUN) as writer:
        dcp.save(state, checkpoint_id=1, storage_writer=writer)


def shards() -> dict[str, torch.Tensor]:
    tied = torch.arange(256.0 * 256).reshape(256, 256)
    few = torch.arange(10).reshape(2, 5)
    return {"even": tied, "few": few, "head": tied, "none": torch.zeros(0, 4)}


def test_each_shard_is_a_box_and_empty_ones_are_left_out(world: World) -> None:
    run_ranks(world, save_shards, size=3)
    with world.yard(99) as yard:
        manifest = yard.manifest(f"{RUN}@step-1")
        assert loaded(yard, "step-1") == {name: as_bytes(one) for name, one in shards().items()}
    assert [(box.offset, box.shape) for box in entry(manifest, "even").boxes] == [
        ((0, 0), (86, 256)),
        ((86, 0), (86, 256)),
        ((172, 0), (84, 256)),
    ]
    assert [box.offset for box in entry(manifest, "few").boxes] == [(0, 0), (1, 0)]
    assert entry(manifest, "none").boxes == ()


def entry(manifest: Manifest, name: str) -> TensorEntry:
    (found,) = [one for one in manifest.tensors if one.name == name]
    return found


def cached(step: int) -> dict[str, torch.Tensor]:
    """It changes once, so that both ranks have other plans."""
    late = {"late": torch.full((300, 200), float(step))} if step > 1 else {}
    return {"w": torch.full((200, 200), float(step)), **late}


def save_cached(world: World, rank: int) -> list[int]:
    new_bytes = []
    with world.yard(rank) as yard, YardWriter(yard, RUN) as writer:
        for step in range(4):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            state = {"step": step, **cached(step)}
            dcp.save(state, checkpoint_id=step, storage_writer=writer, planner=planner)
            new_bytes.append(writer.report.logical_bytes)
    return new_bytes


def test_plans_that_the_planner_caches_bring_each_save_to_its_own_upload(world: World) -> None:
    run_ranks(world, save_cached, size=2)
    with world.yard(99) as yard:
        assert [one.step for one in yard.versions(RUN)] == [3, 2, 1, 0]
        for step in range(4):
            expected = {name: as_bytes(one) for name, one in cached(step).items()}
            assert loaded(yard, f"step-{step}") == expected
            assert state_of(yard, f"step-{step}", world.folder).objects == {"step": step}


def test_a_state_that_has_not_changed_is_another_checkpoint_with_the_same_manifest(
    world: World,
) -> None:
    with world.yard(0) as yard, YardWriter(yard, RUN) as writer:
        for step in range(2):
            save_values(writer, step, {"same": torch.ones(300)})
        found = yard.versions(RUN)
        assert [one.step for one in found] == [1, 0]
        assert len({one.digest for one in found}) == 1
        assert len(list(yard.store.list(layout.MANIFESTS))) == 1
        yard.registry.flush_outbox(yard.store)
        assert list(yard.store.list(layout.STAGING)) == []
