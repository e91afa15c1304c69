"""Modules and optimizers as torch wraps them: what one layout saved another one loads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_world import World, run_ranks
from reading_world import RUN, bits, opened, world_in
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from weightyard.trainer.reader import YardReader
from weightyard.trainer.writer import YardWriter

BOTH = "fsdp2 over tensor parallel"
"""On a mesh of two dimensions."""

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(50, 232)
        self.down = torch.nn.Linear(232, 50)
        self.norm = torch.nn.LayerNorm(50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.down(self.up(x).relu()))
        return out


def wrapped(net: Net, how: str) -> torch.nn.Module:
    if how == "ddp":
        return DistributedDataParallel(net)
    cut = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if how == BOTH:
        both = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, both["tp"], cut)
        mesh = both["dp"]
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "tensor parallel":
        parallelize_module(net, mesh, cut)
        return net
    for module in (net.up, net.down, net):
        fully_shard(module, mesh=mesh)
    return net


def trained(how: str, *, seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wrapped(Net(seed), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    # Two ranks of tensor parallelism see the same, or what both have whole would differ.
    batch = dist.get_rank() // 2 if how == BOTH else dist.get_rank()
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + batch)
        model(torch.randn(8, 50, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=FLAT)
    return {"model": weights, "optim": moments}


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """The whole of it, as every rank can have it; tensors as dtype, shape and bytes."""
    found: dict[str, Any] = {}
    for part in ("model", "optim"):
        for name, value in state[part].items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if isinstance(value, torch.Tensor):
                value = str(value.dtype), tuple(value.shape), bits(value).numpy().tobytes()
            found[f"{part}.{name}"] = value
    return found


def save_trained(world: World, rank: int, how: str) -> dict[str, Any]:
    state = state_of(*trained(how, seed=1, steps=2))
    with world.yard(rank) as yard, YardWriter(yard, RUN, threads=1) as writer:
        dcp.save(state, checkpoint_id=2, storage_writer=writer)
    found = gathered(state)
    return found if rank == 0 else {}


def load_trained(world: World, rank: int, how: str) -> dict[str, Any]:
    model, optimizer = trained(how, seed=2, steps=0)
    state = state_of(model, optimizer)
    with world.yard(rank) as yard:
        dcp.load(state, storage_reader=YardReader(yard, f"{RUN}@step-2"))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=FLAT,
    )
    found = gathered(state_of(model, optimizer))
    return found if rank == dist.get_world_size() - 1 else {}


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "ranks"),
    [
        ("fsdp2", "tensor parallel", 3),
        ("fsdp2", "ddp", 6),
        ("tensor parallel", "fsdp2", 3),
        (BOTH, "fsdp2", 3),
        (BOTH, BOTH, 2),
        ("fsdp2", BOTH, 4),
    ],
)
def test_a_module_and_its_optimizer_go_from_one_layout_to_another(
    tmp_path_factory: pytest.TempPathFactory, saved_as: str, loaded_as: str, ranks: int
) -> None:
    world = world_in(tmp_path_factory.mktemp("modules"))
    with opened(world):
        pass
    saved = run_ranks(world, partial(save_trained, how=saved_as))[0]
    loaded = run_ranks(world, partial(load_trained, how=loaded_as), size=ranks)[ranks - 1]
    assert any("exp_avg" in name for name in saved)
    assert loaded.keys() == saved.keys()
    assert [name for name in saved if loaded[name] != saved[name]] == []
