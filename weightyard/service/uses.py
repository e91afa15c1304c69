"""Uses: which uses this process noted lately, so that a crowd does not write each of its own."""

from __future__ import annotations

import time

_NOTED_EVERY_S = 60.0
_MOST = 10_000


class Uses:
    """Names of tokens and versions. Used from the event loop only."""

    def __init__(self) -> None:
        self._noted_at: dict[str, float] = {}

    def is_new(self, name: str) -> bool:
        """Whether a use should be noted now. If so, it is False for the next ones, for a while."""
        now = time.monotonic()
        noted_at = self._noted_at.get(name)
        if noted_at is not None and now - noted_at < _NOTED_EVERY_S:
            return False
        if len(self._noted_at) >= _MOST:
            self._noted_at.clear()
        self._noted_at[name] = now
        return True
