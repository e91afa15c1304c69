"""Jitter: waits of random length, so that many who wait do not come back together."""

from __future__ import annotations

import random

_own = random.SystemRandom()
"""Not Python's common generator: training draws from it, and must draw the same after a wait."""


def up_to(seconds: float) -> float:
    """Anything from no time to as long."""
    return _own.uniform(0.0, seconds)


def about(seconds: float) -> float:
    """About as long."""
    return _own.uniform(0.8, 1.2) * seconds
