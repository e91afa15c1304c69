"""Wake: one query tells all event streams of a process that something new happened."""

from __future__ import annotations

import asyncio


class Wake:
    """The newest event's id, as far as this process knows; streams wait for it to change."""

    def __init__(self) -> None:
        self._newest = 0
        self._changed: asyncio.Event | None = None
        self.is_over = False
        """Whether the process ends, and its streams should, too."""

    @property
    def newest(self) -> int:
        return self._newest

    def tell(self, newest: int) -> None:
        """Say which event is the newest. Only from the event loop."""
        if newest > self._newest:
            self._newest = newest
            self._wake()

    def end(self) -> None:
        """Let all streams end. Only from the event loop."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def later_than(self, event: int, timeout_s: float) -> bool:
        """Wait until there is an event after this one; False if there is none in time."""
        if self._newest > event:
            return True
        if self._changed is None:
            self._changed = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return self._newest > event
