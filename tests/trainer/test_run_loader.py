"""Runs whose loaders have workers, on more ranks and on fewer: each sample once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_world import World, run_ranks
from training import RUN

from weightyard.trainer.run import TrainRun
from weightyard.trainer.sampler import GlobalOffsetSampler

BATCH = 2
PHASES = ((4, 3), (3, 7), (6, 11))
"""Ranks, and the step up to which they go."""
SAMPLES = BATCH * (4 * 3 + 3 * 4 + 6 * 4)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([float(number)])


def go_on(world: World, rank: int, until: int) -> tuple[int | None, list[int]]:
    """Resume, train to a step and save it; one step more, if there is one, is lost."""
    net = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    sampler = GlobalOffsetSampler(SAMPLES, seed=5)
    loader = StatefulDataLoader(
        Numbers(), BATCH, sampler=sampler, num_workers=1, multiprocessing_context="fork"
    )
    seen: list[int] = []
    state = {"model": net, "optim": optimizer, "data": loader}
    with world.yard(rank) as yard, TrainRun(yard, RUN, state, interval=None) as run:
        resumed = run.resume()
        for batch in loader:
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if run.steps > until:
                break
            seen += map(int, batch.flatten())
            if run.steps == until:
                run.save()
    return resumed, seen


def test_four_ranks_then_three_then_six_with_workers_see_each_sample_once(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    seen: list[int] = []
    before: int | None = None
    for ranks, until in PHASES:
        came = run_ranks(world, partial(go_on, until=until), size=ranks)
        assert {resumed for resumed, _ in came.values()} == {before}
        seen += [number for _, mine in came.values() for number in mine]
        before = until
    assert sorted(seen) == list(range(SAMPLES))
