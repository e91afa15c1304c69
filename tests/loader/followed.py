"""What tests follow: a module, and versions of what it holds."""

from __future__ import annotations

import torch
from loader_world import BERT
from torch import nn
from waiting import SOON_S

from weightyard.loader.follower import Follower

PROD = f"{BERT}@prod"


class Net(nn.Module):
    """A module with a tied parameter, a buffer, and one tensor of several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(4200, 1024))
        self.head = self.embed
        self.norm = nn.Parameter(torch.zeros(64))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))


def state(number: int) -> dict[str, torch.Tensor]:
    """What `Net` has in a version whose values are all its number."""
    embed = torch.full((4200, 1024), float(number))
    return {
        "embed": embed,
        "head": embed,
        "norm": torch.full((64,), float(number)),
        "steps": torch.tensor([number]),
    }


def holds(net: nn.Module, number: int) -> bool:
    return all(bool((one == number).all()) for one in net.state_dict().values())


def ready(follower: Follower, number: int) -> None:
    found = follower.wait(SOON_S)
    assert found is not None, follower.failure
    assert found.number == number
