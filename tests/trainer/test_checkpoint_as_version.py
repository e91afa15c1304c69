"""A checkpoint is a version like any other: what loads versions loads it, box by box."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_world import World, run_ranks
from reading_world import RUN, Cut, columns, is_same, noise, opened, rows, save, whole, world_in

from weightyard.format.block import MIB
from weightyard.trainer.state import State
from weightyard.yard import Yard

TENSORS = {
    "model.rows": rows(noise(1000, 700, seed=1), 250, 251, 760),
    "model.columns": columns(noise(900, 1000, dtype=torch.bfloat16, seed=2), 100, 700),
    "model.grid": Cut(noise(30, 40, 50, seed=3), {0: [7], 1: [20], 2: [1, 49]}),
    "model.bias": whole(noise(300, seed=4)),
    "optim.step": whole(torch.tensor(7)),
    "optim.none": whole(torch.empty(3, 0)),
}
REF = f"{RUN}@step-1200"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = world_in(tmp_path_factory.mktemp("version"))
    with opened(made) as yard:
        save(yard, 1200, TENSORS, State({"epoch": 3}))
    return made


@pytest.fixture
def yard(world: World) -> Iterator[Yard]:
    with opened(world) as found:
        yield found


@pytest.mark.parametrize("verify", ["fast", "full"])
def test_all_its_tensors_are_loaded(yard: Yard, verify: Any) -> None:
    weights = yard.load(REF, verify=verify)
    assert weights.keys() == TENSORS.keys()
    for name, cut in TENSORS.items():
        assert is_same(weights[name], cut.tensor), name


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.rows", (slice(200, 800), slice(3, 5))),
        ("model.rows", (slice(None, None, -3),)),
        ("model.columns", (..., slice(50, 750, 7))),
        ("model.columns", (899, slice(None))),
        ("model.grid", (slice(5, 9), 20, slice(None))),
        ("model.grid", (slice(None), slice(15, 25), slice(48, 0, -1))),
    ],
)
def test_slices_go_across_boxes(yard: Yard, name: str, index: Any) -> None:
    weights = yard.load(REF, tensors=name, slices={name: index})
    # NumPy takes steps below 0, torch does not; 16 bits are 16 bits.
    whole_of_it = TENSORS[name].tensor
    bits = whole_of_it.view(torch.int16 if whole_of_it.element_size() == 2 else torch.int32)
    expected = np.ascontiguousarray(bits.numpy()[index])
    assert list(weights) == [name]
    assert np.array_equal(weights[name].view(bits.dtype).numpy(), expected)


def test_they_are_streamed_opened_lazily_and_loaded_into_a_module(yard: Yard) -> None:
    for name, tensor in yard.stream(REF, ahead_bytes=2 * MIB):
        assert is_same(tensor, TENSORS[name].tensor)
    with yard.safe_open(REF) as weights:
        grid = weights.get_slice("model.grid")[3:8, 10:30]
        assert is_same(grid, TENSORS["model.grid"].tensor[3:8, 10:30])
    module = torch.nn.Module()
    module.model = torch.nn.ParameterDict(
        {name: torch.zeros_like(TENSORS[f"model.{name}"].tensor) for name in ("rows", "columns")}
    )
    yard.load_into(module, REF, tensors="model.[rc]*")
    assert is_same(module.model["columns"].data, TENSORS["model.columns"].tensor)


def test_a_slice_of_it_reads_only_the_boxes_it_meets(yard: Yard) -> None:
    report = yard.load(REF, tensors="model.rows", slices={"*": slice(800, 900)}).report
    assert report.bytes == 100 * 700 * 4
    # The box that holds these rows, and no other: it is shorter than a chunk.
    assert report.read_bytes == 240 * 700 * 4


@pytest.mark.parametrize("compress", [False, True])
def test_slices_across_large_boxes_are_read_in_proportion(tmp_path: Path, compress: bool) -> None:
    tensors = {
        "model.rows": rows(noise(6144, 1024, seed=5), 2000, 4100),
        "model.columns": columns(noise(2048, 4096, dtype=torch.bfloat16, seed=6), 1024),
    }
    wanted = {"model.rows": (slice(1900, 4200), 3), "model.columns": (slice(100, 300), 2)}
    with opened(world_in(tmp_path)) as yard:
        save(yard, 1200, tensors, compress=compress)
        for name, (part, boxes) in wanted.items():
            weights = yard.load(REF, tensors=name, slices={name: part})
            assert is_same(weights[name], tensors[name].tensor[part])
            report = weights.report
            edges_bytes = 2 * MIB * boxes
            assert report.stored_bytes <= 1.1 * report.bytes + edges_bytes
            assert report.bytes <= report.read_bytes <= report.bytes + edges_bytes


def load_by_group(world: World, rank: int) -> tuple[list[str], int]:
    with world.yard(rank) as yard:
        half = {"model.columns": (slice(None), slice(rank * 333, rank * 333 + 333))}
        weights = yard.load(REF, slices=half, group=dist.group.WORLD)
    expected = {name: cut.tensor for name, cut in TENSORS.items()}
    expected["model.columns"] = expected["model.columns"][half["model.columns"]]
    wrong = [name for name, tensor in expected.items() if not is_same(weights[name], tensor)]
    return wrong, weights.report.stored_bytes


def test_a_group_reads_one_copy_of_its_boxes(world: World) -> None:
    came = run_ranks(world, load_by_group, size=3)
    with opened(world) as yard:
        alone = yard.load(REF).report.stored_bytes
    assert [wrong for wrong, _ in came.values()] == [[]] * 3
    assert sum(stored for _, stored in came.values()) <= alone
