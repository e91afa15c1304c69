"""Checkpoints of four ranks read by other numbers of ranks, with other layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_world import World, run_ranks
from reading_world import RUN, is_same, noise, opened, stored_bytes, world_in
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from weightyard.format.block import MIB
from weightyard.testing.faults import FaultyStore
from weightyard.trainer.reader import RestoreReport, YardReader
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard

OBJECTS = {"epoch": 3, "rates": [0.1, 0.2], "seen": (1, {5: "five"})}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Some of them cut unevenly by any number of ranks, some into nothing for most of them."""
    return {
        "wide": noise(257, 4099, seed=seed + 1),
        "tall": noise(5003, 250, seed=seed + 2),
        "half": noise(1024, 513, dtype=torch.bfloat16, seed=seed + 3),
        "few": noise(2, 3000, seed=seed + 4),
        "vector": noise(1001, seed=seed + 5),
        "scalar": torch.tensor(0.25 + seed, dtype=torch.float64),
        "none": torch.empty(0, 8),
        "count": torch.tensor([seed, 2, 3]),
    }


Layouts = Mapping[str, tuple[Placement, ...]]
SHARDED: Layouts = {name: (Shard(0),) for name in ("wide", "tall", "half", "few", "vector", "none")}
"""As FSDP2 shards."""
COLUMNS: Layouts = {
    "wide": (Shard(1),),
    "tall": (Shard(0),),
    "half": (Shard(1),),
    "few": (Shard(1),),
}
"""As tensor parallel does it: some by columns, some by rows, the rest on every rank."""
REPLICATED: Layouts = {}
"""As DDP: everything on every rank."""
BOTH: Layouts = {
    "wide": (Shard(0), Shard(1)),
    "tall": (Shard(0), Shard(0)),
    "half": (Replicate(), Shard(1)),
}
"""FSDP2 over tensor parallel: a mesh of two dimensions."""
LAYOUTS = {"sharded": SHARDED, "columns": COLUMNS, "replicated": REPLICATED, "both": BOTH}


def spread(
    values: Mapping[str, torch.Tensor], layouts: Layouts, mesh: DeviceMesh
) -> dict[str, Any]:
    return {
        name: distribute_tensor(value.clone(), mesh, layouts[name]) if name in layouts else value
        for name, value in values.items()
    }


def laid_out(values: Mapping[str, torch.Tensor], layout: str, mesh: DeviceMesh) -> dict[str, Any]:
    return spread(values, LAYOUTS[layout], mesh)


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def write(world: World, rank: int, layout: str, steps: int = 1) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with world.yard(rank) as yard, YardWriter(yard, RUN, threads=1) as writer:
        for step in range(steps):
            values = changed(step)
            state = {"model": laid_out(values, layout, mesh), **OBJECTS}
            dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    return ""


def changed(step: int) -> dict[str, torch.Tensor]:
    """As training leaves them: a little of each has moved."""
    values = tensors()
    for value in values.values():
        if step and value.is_floating_point() and value.numel():
            value.view(-1)[:: 37 + step] += 1e-3 * step
    return values


@dataclass(frozen=True)
class Came:
    """What a rank's load came to."""

    wrong: tuple[str, ...] = ()
    objects: Any = None
    report: RestoreReport | None = None
    calls: tuple[str, ...] = ()
    error: str = ""


def read(
    world: World, rank: int, layout: str, step: int = 0, mesh_shape: tuple[int, ...] = ()
) -> Came:
    """Load on a node where nobody knows anything of the store yet."""
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),))
    wanted = changed(step)
    blank = {name: torch.full_like(value, 77) for name, value in wanted.items()}
    into, expected = (laid_out(one, layout, mesh) for one in (blank, wanted))
    state: dict[str, Any] = {"model": into, **dict.fromkeys(OBJECTS)}
    cache = world.folder / f"{layout}-{step}-{rank}"
    with world.yard(rank) as plain:
        store = FaultyStore(plain.store)
        settings = plain._settings.model_copy(update={"cache": cache})
        yard = Yard(store, plain.catalogue, block_bytes=MIB, settings=settings)
        reader = YardReader(yard, f"{RUN}@step-{step}")
        try:
            dcp.load(state, storage_reader=reader)
        except CheckpointException as why:
            return Came(error=str(why))
    wrong = [name for name in wanted if not is_same(local(into[name]), local(expected[name]))]
    objects = {name: state[name] for name in OBJECTS}
    return Came(tuple(wrong), objects, reader.report, tuple(store.calls))


@pytest.fixture(scope="module", params=["sharded", "columns"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    made = world_in(tmp_path_factory.mktemp(request.param))
    with opened(made):
        pass
    assert run_ranks(made, partial(write, layout=request.param, steps=2)) == dict.fromkeys(
        range(4), ""
    )
    return made


def packs_of(yard: Yard, ref: str) -> int:
    """How many packs hold a version's blocks and their bases."""
    blocks = [block.id for block in yard.manifest(ref).blocks]
    places = [one[0] for one in yard.catalogue.placements(blocks).values()]
    bases = sorted({one.encoding.base for one in places if one.encoding.base is not None})
    places += [one[0] for one in yard.catalogue.placements(bases).values()]
    return len({one.pack for one in places})


@pytest.mark.parametrize(
    ("layout", "size", "step", "mesh"),
    [
        ("sharded", 4, 0, ()),
        ("sharded", 3, 1, ()),
        ("sharded", 8, 1, ()),
        ("columns", 3, 0, ()),
        ("replicated", 3, 1, ()),
        ("both", 6, 1, (3, 2)),
    ],
)
def test_a_checkpoint_of_four_ranks_is_read_once_by_others_with_other_layouts(
    world: World, layout: str, size: int, step: int, mesh: tuple[int, ...]
) -> None:
    job = partial(read, layout=layout, step=step, mesh_shape=mesh)
    came = run_ranks(world, job, size=size)
    assert {one.error for one in came.values()} == {""}
    assert {one.wrong for one in came.values()} == {()}
    assert all(one.objects == OBJECTS for one in came.values())
    with opened(world) as yard:
        needed = stored_bytes(yard, f"{RUN}@step-{step}")
        packs = packs_of(yard, f"{RUN}@step-{step}")
    reports = [one.report for one in came.values()]
    assert {report.stored_bytes for report in reports} == {
        sum(report.load.stored_bytes for report in reports)
    }
    assert all(report.stored_bytes <= 1.05 * report.needed_bytes for report in reports)
    assert reports[0].stored_bytes <= 1.05 * needed
    assert reports[0].needed_bytes >= 0.95 * needed  # the rest is its objects
    # The manifest, and each pack: not for each rank.
    calls = [name for one in came.values() for name in one.calls]
    assert calls.count("locate") <= packs + 1
    assert {"list", "stat"}.isdisjoint(calls)


def fail(world: World, rank: int) -> str:
    state = {"model": {"vector": torch.zeros(1001, dtype=torch.half if rank == 2 else None)}}
    with world.yard(rank) as yard:
        try:
            dcp.load(state, storage_reader=YardReader(yard, f"{RUN}@step-0"))
        except CheckpointException as why:
            return " ".join(f"{who}:{type(one).__name__}" for who, (one, _) in why.failures.items())
    return ""


def test_where_one_rank_fails_all_hear_of_it_and_of_what_it_said(world: World) -> None:
    came = run_ranks(world, fail, size=3)
    assert set(came.values()) == {"0:RankFailed 1:RankFailed 2:DoesNotFit"}
