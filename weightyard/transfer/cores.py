"""Cores: how many this process may use."""

from __future__ import annotations

import os
import sys


def cores() -> int:
    """Those that its affinity allows, as in a container with cores of its own, or else all."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
