"""A point in time by which a call must be done, handed down instead of many time-outs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Self

from weightyard.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """Made once at the top of a call; everything below asks it what is left."""

    at: float
    """On time.monotonic's clock."""

    @classmethod
    def after(cls, seconds: float | None) -> Self:
        """None: never."""
        return cls(math.inf if seconds is None else time.monotonic() + seconds)

    def left(self, doing: str) -> float:
        """Seconds left, more than 0. Raises DeadlineExceeded, saying what was being done."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"no time left while {doing}")
        return left

    def left_at_most(self, seconds: float, doing: str) -> float:
        """The shorter of what is left and a limit of its own."""
        return min(seconds, self.left(doing))
