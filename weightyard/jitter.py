"""Jitter: waits of random length, so that many who wait do not come back together."""

from __future__ import annotations

import random

_own = random.SystemRandom()
"""Not Python's shared generator: a wait must not change what a training draws from that."""


def up_to(seconds: float) -> float:
    """A random time between zero and this."""
    return _own.uniform(0.0, seconds)


def about(seconds: float) -> float:
    """A random time, at most a fifth shorter or longer than this."""
    return _own.uniform(0.8, 1.2) * seconds
