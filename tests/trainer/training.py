"""A small training job that a kill and a resume must not change, for the tests of runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from weightyard.trainer.run import TrainRun
from weightyard.trainer.sampler import GlobalOffsetSampler
from weightyard.yard import Yard

RUN = "team/run42"
SAMPLES = 36
HIDDEN = 1200
_WIDTH = 16


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return number, torch.randn(_WIDTH, generator=generator)


class Net(nn.Module):
    """Draws random numbers of all three kinds in each step."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.wide = nn.Linear(_WIDTH, hidden)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * random.random() + 0.1 * float(np.random.random())  # noqa: TID251
        return self.out(self.drop(torch.relu(self.wide(x))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Trained:
    """What a job came to on a rank."""

    resumed: int | None
    losses: dict[int, float] = field(default_factory=dict)
    """By step."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    weights: dict[str, bytes] = field(default_factory=dict)


def as_bytes(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name.removeprefix("module."): one.contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for name, one in state.items()
    }


@dataclass
class Setting:
    """The objects of a job, as a program makes them."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: GlobalOffsetSampler
    loader: DataLoader[tuple[int, torch.Tensor]]

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.net,
            "optim": self.optimizer,
            "sched": self.scheduler,
            "data": self.sampler,
        }


def setting(batch: int = 2, hidden: int = HIDDEN, *, own_generator: bool = True) -> Setting:
    """The same whenever it is made, but for what each rank draws.

    `own_generator`: of the loader, which otherwise draws on torch's random numbers.
    """
    net: nn.Module = Net(hidden)
    if dist.is_initialized():
        net = DistributedDataParallel(net)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    sampler = GlobalOffsetSampler(SAMPLES, seed=5)
    generator = torch.Generator().manual_seed(1) if own_generator else None
    loader = DataLoader(Numbered(), batch_size=batch, sampler=sampler, generator=generator)
    return Setting(net, optimizer, scheduler, sampler, loader)


def steps_of(made: Setting, run: TrainRun, until: int) -> Iterator[tuple[float, list[int]]]:
    """Train to a step. What each step came to is given before the run is told of it."""
    while run.steps < until:
        for numbers, batch in made.sampler.batches(made.loader):
            loss = made.net(batch).square().mean()
            loss.backward()
            made.optimizer.step()
            made.optimizer.zero_grad()
            made.scheduler.step()
            yield loss.item(), numbers.tolist()
            run.step({"loss": loss.item()})
            if run.steps >= until:
                return


def train(
    yard: Yard,
    until: int,
    *,
    hidden: int = HIDDEN,
    own_generator: bool = True,
    on_step: Callable[[int, TrainRun], None] = lambda step, run: None,
    on_result: Callable[[int, float, list[int]], None] = lambda step, loss, samples: None,
    **options: Any,
) -> Trained:
    """Resume, and train to a step."""
    made = setting(hidden=hidden, own_generator=own_generator)
    with TrainRun(yard, RUN, made.state, **options) as run:
        trained = Trained(run.resume())
        for loss, numbers in steps_of(made, run, until):
            step = run.steps + 1
            trained.losses[step], trained.samples[step] = loss, numbers
            on_result(step, loss, numbers)
            on_step(step, run)
    trained.weights.update(as_bytes(made.net.state_dict()))
    return trained


def packs(yard: Yard) -> set[Path]:
    """Those of a yard in a folder."""
    return set(Path(yard.store.url.removeprefix("file://")).glob("packs/*/*"))


def spoil(pack: Path) -> None:
    """Change bytes all over a pack."""
    content = bytearray(pack.read_bytes())
    content[64::97] = bytes(one ^ 0xFF for one in content[64::97])
    pack.chmod(0o644)
    pack.write_bytes(content)


class Counter:
    """Something with a state of its own."""

    def __init__(self, state: Any = None) -> None:
        self.state = {"n": 0} if state is None else state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]
