"""Hedging: a read that takes longer than others of its size is asked of a second replica too."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from typing import Generic, TypeVar

from weightyard.storage.cancel import Cancel

ENOUGH_SAMPLES = 20
LEAST_DELAY_S = 0.1
"""Nothing is hedged sooner than this: such delays happen to any read on a busy machine."""

_FLOOR_S, _FLOOR_BYTES_PER_S = 0.5, 50e6
_SAMPLES = 200

_Answer = TypeVar("_Answer")


class Pace:
    """How long reads of a size take. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._took_s: dict[int, deque[float]] = {}

    def add(self, length: int, took_s: float) -> None:
        with self._lock:
            kind = length.bit_length()
            self._took_s.setdefault(kind, deque(maxlen=_SAMPLES)).append(took_s)

    def patience_s(self, length: int) -> float | None:
        """After how long a read is worth a second one: the p95 of its size.

        A guess while too few reads were seen; None before the first: it is not known yet whether
        DataNodes can be chosen here at all.
        """
        with self._lock:
            if not self._took_s:
                return None
            seen = sorted(self._took_s.get(length.bit_length(), ()))
        if len(seen) < ENOUGH_SAMPLES:
            return _FLOOR_S + length / _FLOOR_BYTES_PER_S
        return max(LEAST_DELAY_S, seen[int(len(seen) * 0.95)])


class HedgeBudget:
    """Bounds hedges to a share of all reads, and a small burst. Thread-safe."""

    def __init__(self, share: float = 0.05, burst: int = 4) -> None:
        self._lock = threading.Lock()
        self._share = share
        self._burst = burst
        self._left = float(burst)

    def count_read(self) -> None:
        with self._lock:
            self._left = min(self._left + self._share, float(self._burst))

    def take(self) -> bool:
        """Whether one more hedge may be made; if so, it is counted."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True


class _Stand(enum.Enum):
    ALONE = enum.auto()
    CHASED = enum.auto()
    OVERTAKEN = enum.auto()
    OVER = enum.auto()


class Race(Generic[_Answer]):
    """One read under way, and perhaps a second of the same bytes from elsewhere.

    The first receives into the caller's memory, the second into memory of its own. Only the thread
    of the first gets the second's answer, after its own read has returned: so the two never write
    at the same time to memory the caller will use. Thread-safe.
    """

    def __init__(self, patience_s: float | None) -> None:
        self.first = Cancel()
        self.second = Cancel()
        self.began_at = time.monotonic()
        self.due_at = None if patience_s is None else self.began_at + patience_s
        """When a second read may begin; None: never."""
        self._changed = threading.Condition()
        self._stand = _Stand.ALONE
        self._answer: _Answer | None = None

    def end(self) -> None:
        """End both reads, from any thread."""
        self.first.cancel()
        self.second.cancel()

    def begin_second(self) -> bool:
        """Whether a second read may begin now. Whoever is told so calls `second_ended` once."""
        with self._changed:
            if self._stand is not _Stand.ALONE:
                return False
            self._stand = _Stand.CHASED
            return True

    def second_ended(self, answer: _Answer | None) -> None:
        """The second read has its bytes, or has failed (None)."""
        with self._changed:
            if self._stand is _Stand.CHASED:
                self._stand = _Stand.OVER if answer is None else _Stand.OVERTAKEN
                self._answer = answer
                if answer is not None:
                    self.first.cancel()
            self._changed.notify_all()

    def first_served(self) -> None:
        """The first read has its bytes: a second one is ended."""
        with self._changed:
            self._stand = _Stand.OVER
        self.second.cancel()

    def first_failed(self, wait_s: float) -> _Answer | None:
        """The first read has failed. Waits for the bytes of a second one; None: it has none."""
        with self._changed:
            self._changed.wait_for(lambda: self._stand is not _Stand.CHASED, wait_s)
            self._stand = _Stand.OVER
            answer, self._answer = self._answer, None
        self.second.cancel()
        return answer
