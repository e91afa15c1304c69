"""What ranks that load together come to, for the tests of loading by a group."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from loader_world import same
from rank_world import RANKS, World, run_ranks

from weightyard.errors import RankFailed
from weightyard.loader.report import LoadReport
from weightyard.yard import Yard

__all__ = ["RANKS", "Outcome", "World", "outcome", "run_ranks"]


@dataclass(frozen=True)
class Outcome:
    """What a rank's load came to."""

    report: LoadReport | None = None
    is_same: bool = False
    version: int = 0
    error: str = ""
    """The class of what it raised."""
    message: str = ""
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0


def outcome(
    yard: Yard, ref: str, expected: Mapping[str, torch.Tensor] | None = None, **asked: Any
) -> Outcome:
    """Load by the group of all ranks, and say what came of it."""
    began = time.monotonic()
    try:
        weights = yard.load(ref, group=dist.group.WORLD, **asked)
    except Exception as why:  # noqa: BLE001  what it is, is what the test asks
        return Outcome(
            error=type(why).__name__,
            message=str(why),
            ranks=why.ranks if isinstance(why, RankFailed) else (),
            seconds=time.monotonic() - began,
        )
    is_same = expected is not None and same(weights, expected)
    return Outcome(weights.report, is_same, weights.version.number)
