"""Deadline: until when a call may go on. Handed down, where each step would need a time-out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Self

from weightyard.errors import DeadlineExceeded
from weightyard.storage.cancel import Cancel


@dataclass(frozen=True, slots=True)
class Deadline:
    """Made once at the top of a call; everything below asks it what is left."""

    at: float
    """On time.monotonic's clock."""
    cancel: Cancel | None = None
    """With which the caller may end it sooner."""

    @classmethod
    def after(cls, seconds: float | None, cancel: Cancel | None = None) -> Self:
        """None: never."""
        return cls(math.inf if seconds is None else time.monotonic() + seconds, cancel)

    def left(self, doing: str) -> float:
        """Seconds left, more than 0. Raises DeadlineExceeded or Cancelled, saying at what."""
        if self.cancel is not None:
            self.cancel.check(doing)
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"no time left while {doing}")
        return left

    def part(self, share: float) -> Deadline:
        """A deadline after this share of what is left, so that some time remains afterwards."""
        now = time.monotonic()
        return Deadline(now + share * (self.at - now), self.cancel)

    def left_at_most(self, seconds: float, doing: str) -> float:
        """The shorter of what is left and a limit of its own."""
        return min(seconds, self.left(doing))


NEVER = Deadline.after(None)
"""For those whom nothing hurries."""
