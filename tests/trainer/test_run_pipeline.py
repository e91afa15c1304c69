"""Runs of a pipeline: each rank trains layers of its own, and all of them are one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from trainer_world import World, run_ranks
from training import RUN, as_bytes

from weightyard.trainer.run import TrainRun
from weightyard.yard import Yard

LAYERS, STAGES, WIDTH = 4, 2, 32


class Layers(nn.Module):
    """Some layers of a network, by the names they have in all of it; the same whenever made."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__()
        torch.manual_seed(5)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.layers = nn.ModuleDict({str(number): every[number] for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


Trained = tuple[int | None, dict[str, bytes]]


def train(yard: Yard, rank: int, run_name: str, until: int) -> Trained:
    """Resume, train to a step and save that; the step resumed from, and this rank's weights."""
    each = LAYERS // STAGES
    net = Layers(range(rank * each, (rank + 1) * each))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    stage = PipelineStage(net, rank, STAGES, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    with TrainRun(yard, run_name, {"model": net, "optim": optimizer}, interval=None) as run:
        resumed = run.resume()
        while run.steps < until:
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(run.steps))
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch)
            optimizer.step()
            optimizer.zero_grad()
            run.step()
        run.save()
    return resumed, as_bytes(net.state_dict())


def interrupted_and_whole(world: World, rank: int) -> tuple[Trained, Trained, Trained]:
    with world.yard(rank) as yard:
        begun = train(yard, rank, RUN, 2)
        resumed = train(yard, rank, RUN, 4)
        return begun, resumed, train(yard, rank, "team/whole", 4)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, str(tmp_path / "store"))


def test_stages_of_a_pipeline_resume_bit_for_bit_and_one_process_has_all_layers(
    world: World,
) -> None:
    found = run_ranks(world, interrupted_and_whole, size=STAGES)
    weights: dict[str, bytes] = {}
    for begun, resumed, whole in found.values():
        assert (begun[0], resumed[0], whole[0]) == (None, 2, None)
        assert begun[1] != resumed[1] == whole[1]
        weights |= resumed[1]
    assert len(weights) == 2 * LAYERS
    with world.yard(99) as yard:
        loaded = yard.load(f"{RUN}@step-4", tensors="model.*")
        assert as_bytes(loaded) == {f"model.{name}": one for name, one in weights.items()}
        alone = Layers(range(LAYERS))
        optimizer = torch.optim.AdamW(alone.parameters(), foreach=False)
        with TrainRun(yard, RUN, {"model": alone, "optim": optimizer}) as run:
            assert run.resume() == 4
    assert as_bytes(alone.state_dict()) == weights
    assert {int(one["step"]) for one in optimizer.state.values()} == {4}
