"""Jobs of several ranks that save and load checkpoints, for the tests of the trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rank_world import RANKS, World, run_ranks
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from weightyard.storage.store import Store
from weightyard.yard import Yard

__all__ = [
    "RANKS",
    "RUN",
    "Net",
    "Outcome",
    "World",
    "as_torchrun",
    "attempt",
    "on_store",
    "run_ranks",
    "train",
]

RUN = "team/run42"


@dataclass(frozen=True)
class Outcome:
    """What an attempt came to on a rank."""

    value: Any = None
    error: str = ""
    """The class of what it raised."""
    message: str = ""
    failures: dict[int, str] = field(default_factory=dict)
    """Of a save or load that failed: the class of what each rank raised."""


def attempt(action: Callable[[], Any]) -> Outcome:
    """Do it, and say what came of it."""
    try:
        return Outcome(action())
    except CheckpointException as why:
        failures = {rank: type(error).__name__ for rank, (error, _) in why.failures.items()}
        return Outcome(None, type(why).__name__, str(why), failures)
    except Exception as why:  # noqa: BLE001  what it is, is what the test asks
        return Outcome(None, type(why).__name__, str(why))


def as_torchrun(rank: int, size: int) -> None:
    """Tell a rank on this host what torchrun would, by which libraries know that they are one."""
    os.environ |= {
        "GROUP_RANK": "0",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "test",
    }


@contextmanager
def on_store(yard: Yard, store: Store) -> Iterator[Yard]:
    """The same yard on another view of its store.

    It is not closed, for catalogue and store are the other's; but what it writes behind its caller
    is written when this ends, so that nothing goes on in a yard that is closed and removed.
    """
    other = Yard(store, yard.catalogue, block_bytes=yard.block_bytes)
    try:
        yield other
    finally:
        assert other._settling.wait()


class Net(nn.Module):
    """A small network with large and small tensors, the same whenever it is made."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(0, len(self.layers), 2):
            x = x + self.layers[number + 1](torch.relu(self.layers[number](x)))
        return self.norm(x)  # type: ignore[no-any-return]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, width: int = 256) -> None:
    """A few steps, the same whenever they are taken."""
    for step in range(steps):
        batch = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
