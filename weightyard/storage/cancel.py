"""Cancel: ends a call that is under way, from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from weightyard.errors import Cancelled


class Cancel:
    """Ends the calls it was given to, from any thread and at any time. Thread-safe.

    A cancelled call raises Cancelled. Until it has returned it may still write into the memory it
    was given: whoever cancels waits for that before using the memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._ends: dict[object, Callable[[], None]] = {}

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        """End what is under way, and whatever begins later. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            ends, self._ends = self._ends, {}
            # Under the lock, so that what an end acts on, such as a socket, is not closed
            # meanwhile: its number could by then be that of another socket.
            for end in ends.values():
                end()

    def check(self, doing: str) -> None:
        """Raises Cancelled if it was, saying what was being done."""
        if self._is_cancelled:
            raise Cancelled(f"cancelled while {doing}")

    @contextmanager
    def ending(self, end: Callable[[], None], doing: str) -> Iterator[None]:
        """Inside, `end` is called once if it is cancelled. It must neither block nor raise.

        Raises Cancelled at once if it was cancelled before.
        """
        key = object()
        with self._lock:
            self.check(doing)
            self._ends[key] = end
        try:
            yield
        finally:
            with self._lock:
                self._ends.pop(key, None)


def ended_by(
    cancel: Cancel | None, end: Callable[[], None], doing: str
) -> AbstractContextManager[None]:
    """As `cancel.ending`; without a Cancel nothing ends it."""
    return nullcontext() if cancel is None else cancel.ending(end, doing)
