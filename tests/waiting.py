"""Waiting for what happens soon, in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_S = 60.0
"""Long enough on any machine, however busy; no test that passes waits for it."""


def eventually(is_so: Callable[[], object], within_s: float = SOON_S) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {within_s:.0f} s"
        time.sleep(0.01)
