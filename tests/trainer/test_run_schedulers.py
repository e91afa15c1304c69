"""Schedulers of torch: each goes on as if its training had not been interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from training import RUN

from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.trainer.run import TrainRun
from weightyard.yard import Yard


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "store"), settings=settings) as opened:
        yield opened


def milestones(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.MultiStepLR(optimizer, [2, 4, 4])


def one_after_the_other(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warm_up, then = schedulers.LinearLR(optimizer), schedulers.MultiStepLR(optimizer, [1, 2])
    return schedulers.SequentialLR(optimizer, [warm_up, then], [2])


def both_at_once(optimizer: torch.optim.Optimizer) -> LRScheduler:
    both = [schedulers.ConstantLR(optimizer, total_iters=4), milestones(optimizer)]
    return schedulers.ChainedScheduler(both, optimizer)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.OneCycleLR(optimizer, 0.5, total_steps=8)


def cyclic(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.CyclicLR(optimizer, 0.1, 0.9, step_size_up=2, mode="exp_range")


def by_function(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch)


def restarting(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.CosineAnnealingWarmRestarts(optimizer, 3)


@pytest.mark.parametrize(
    "make",
    [milestones, one_after_the_other, both_at_once, one_cycle, cyclic, by_function, restarting],
)
def test_a_scheduler_goes_on_as_if_it_had_not_been_interrupted(
    yard: Yard, make: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    def rates(until: int, run_name: str) -> list[float]:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
        scheduler = make(optimizer)
        state = {"model": net, "optim": optimizer, "sched": scheduler}
        found = []
        with TrainRun(yard, run_name, state, interval=3) as run:
            run.resume()
            while run.steps < until:
                optimizer.step()
                scheduler.step()
                found.append(optimizer.param_groups[0]["lr"])
                run.step()
        return found

    whole = rates(6, "team/other")
    assert rates(3, RUN) + rates(6, RUN) == whole
