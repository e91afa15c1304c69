"""LimitedStore: bounds rate and concurrency, and finds the concurrency the network rewards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import Buffer

from weightyard.errors import DeadlineExceeded, Retryable, StaleLocation
from weightyard.storage.cancel import Cancel, ended_by
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.storage.store import (
    Again,
    FileOptions,
    FileStat,
    Location,
    Ownership,
    Read,
    Replica,
    Served,
    Stage,
    StagedFile,
    Store,
    StorePath,
)


def _sleep(seconds: float, cancel: Cancel | None, doing: str) -> None:
    """Raises Cancelled as soon as it is."""
    is_over = threading.Event()
    with ended_by(cancel, is_over.set, doing):
        is_over.wait(seconds)
    if cancel is not None:
        cancel.check(doing)


class Rate:
    """At most so many bytes a second, over any longer while. Thread-safe."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float, Cancel | None, str], None] = _sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def spend(self, amount: int, deadline: Deadline = NEVER) -> None:
        """Wait until the rate allows for all bytes spent so far, and count these as spent too.

        So a call waits for the bytes of those before it, never for its own. Raises
        DeadlineExceeded, at once if the wait is longer than the time left, and Cancelled; then
        nothing was spent.
        """
        doing = f"waiting for a share of {self._bytes_per_s:.0f} bytes a second"
        left_s = deadline.left(doing)
        cost_s = amount / self._bytes_per_s
        with self._lock:
            now = self._clock()
            wait_s = self._free_at - now
            if wait_s > left_s:
                raise DeadlineExceeded(f"{wait_s:.1f} s of {doing}, and {left_s:.1f} s are left")
            self._free_at = max(now, self._free_at) + cost_s
        if wait_s <= 0:
            return
        try:
            self._sleep(wait_s, deadline.cancel, doing)
        except BaseException:
            with self._lock:
                self._free_at -= cost_s
            raise


@dataclass(frozen=True, slots=True)
class Course:
    """Which limit to try next. Pure: made anew after each round of transfers.

    Clearly more bytes per second than in the last round, and the limit goes on in its direction;
    clearly less, and it turns round; about the same, and it shrinks, because equal work with fewer
    transfers is better for everyone. A failure halves the limit. It stays within `lowest` and
    `highest`.
    """

    limit: int
    lowest: int
    highest: int
    direction: int = 1
    rate: float = 0.0
    """Bytes per second of the last round; 0: nobody knows."""

    CLEARLY: ClassVar[float] = 1.05

    def after_round(self, rate: float) -> Course:
        """So many bytes per second came with this limit."""
        if rate > self.rate * self.CLEARLY:
            direction = self.direction
        elif rate * self.CLEARLY < self.rate:
            direction = -self.direction
        else:
            direction = -1
        limit = self._within(self.limit + direction * max(1, self.limit // 4))
        return replace(self, limit=limit, direction=direction, rate=rate)

    def after_failure(self) -> Course:
        """What was learned before says nothing about a network that is in trouble."""
        return replace(self, limit=self._within(self.limit // 2), direction=1, rate=0.0)

    def _within(self, limit: int) -> int:
        return min(max(limit, self.lowest), self.highest)


class AdaptiveLimit:
    """How many transfers may run at once, learned from what they achieve: see `Course`.

    A round is twice as many transfers as the limit allows. One that never used all its places says
    nothing about the network and changes nothing. Transfers that were under way together and fail
    are one failure. Thread-safe.
    """

    def __init__(
        self,
        *,
        first: int = 8,
        lowest: int = 2,
        highest: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._course = Course(min(max(first, lowest), highest), lowest, highest)
        self._clock = clock
        self._changed = threading.Condition()
        self._running = 0
        self._failures = 0
        self._begin_round()

    @property
    def limit(self) -> int:
        return self._course.limit

    @contextmanager
    def transfer(
        self, amount: int, timeout_s: float | None = None, cancel: Cancel | None = None
    ) -> Iterator[None]:
        """Wait for a place, run one transfer of so many bytes, and learn from it.

        Raises DeadlineExceeded when no place is free in time, Cancelled while it waits.
        """
        failures_before = self._take_place(timeout_s, cancel)
        is_done = has_failed = False
        try:
            yield
            is_done = True
        except Retryable as why:
            has_failed = not isinstance(why, StaleLocation)  # which is an answer
            raise
        finally:
            with self._changed:
                self._running -= 1
                if is_done:
                    self._learn(amount)
                elif has_failed and self._failures == failures_before:
                    self._failures += 1
                    self._course = self._course.after_failure()
                    self._begin_round()
                self._changed.notify_all()

    def _take_place(self, timeout_s: float | None, cancel: Cancel | None) -> int:
        """Wait for a place; returns how many failures there were until then."""
        doing = "waiting for another transfer to end"
        # The condition inside: cancelling holds the lock of `cancel`, then takes that of this.
        with ended_by(cancel, self._wake, doing), self._changed:
            is_free = self._changed.wait_for(
                lambda: self._running < self.limit or (cancel is not None and cancel.is_cancelled),
                timeout_s,
            )
            if cancel is not None:
                cancel.check(doing)
            if not is_free:
                raise DeadlineExceeded(f"none of {self.limit} transfers ended in {timeout_s} s")
            self._running += 1
            self._was_full |= self._running >= self.limit
            return self._failures

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _learn(self, amount: int) -> None:
        self._round_bytes += amount
        self._round_left -= 1
        if self._round_left > 0:
            return
        if self._was_full:
            took_s = max(self._clock() - self._round_began, 1e-9)
            self._course = self._course.after_round(self._round_bytes / took_s)
        self._begin_round()

    def _begin_round(self) -> None:
        self._round_began = self._clock()
        self._round_bytes = 0
        self._was_full = False
        # Twice the limit, so that transfers begun under the old limit do not decide alone.
        self._round_left = 2 * self.limit


class LimitedStore(Store):
    """A store that moves bytes within a rate and a concurrency; other calls pass unchanged.

    How long a read waits for its share of the rate is no part of its `timeout_s`, which is for a
    store that is slow: many reads that begin together would fail for no other reason than that the
    last of them has to wait for the others. `cancel` ends the wait. How long it waits for a place,
    and then reads, is bounded by `timeout_s` together.
    """

    def __init__(
        self,
        store: Store,
        *,
        reads: AdaptiveLimit | None = None,
        writes: AdaptiveLimit | None = None,
        rate: Rate | None = None,
    ) -> None:
        self.store = store
        """The one that is limited."""
        self._reads = reads or AdaptiveLimit()
        self._writes = writes or AdaptiveLimit()
        self._rate = rate
        self.url = store.url
        self.replicates = store.replicates

    def init(self, ownership: Ownership | None = None) -> None:
        self.store.init(ownership)

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        return _LimitedStage(self.store.stage(path, options), self._writes, self._rate)

    def publish(self, staged: StagedFile, path: StorePath) -> None:
        self.store.publish(staged, path)

    def stat(self, path: StorePath) -> FileStat:
        return self.store.stat(path)

    def list(self, folder: StorePath) -> Iterator[FileStat]:
        return self.store.list(folder)

    def top(self) -> Sequence[StorePath]:
        return self.store.top()

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        return self.store.locate(path, timeout_s=timeout_s)

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        amount = sum(len(wanted.into) for wanted in reads)
        with _moving(amount, self._reads, self._rate, timeout_s, cancel) as deadline:
            left_s = deadline.left(f"reading {location.path}")
            return self.store.read(
                location,
                reads,
                replica=replica,
                timeout_s=None if timeout_s is None else left_s,
                cancel=cancel,
            )

    def delete(self, path: StorePath) -> bool:
        return self.store.delete(path)

    def adjust(self, path: StorePath, options: FileOptions) -> None:
        self.store.adjust(path, options)

    def close(self) -> None:
        self.store.close()


class _LimitedStage(Stage):
    def __init__(self, stage: Stage, limit: AdaptiveLimit, rate: Rate | None) -> None:
        self._stage = stage
        self._limit = limit
        self._rate = rate

    def write(self, data: Buffer, again: Again | None = None) -> None:
        with _moving(memoryview(data).nbytes, self._limit, self._rate):
            self._stage.write(data, again)

    def close(self) -> StagedFile:
        return self._stage.close()

    def abort(self) -> None:
        self._stage.abort()


@contextmanager
def _moving(
    amount: int,
    limit: AdaptiveLimit,
    rate: Rate | None,
    timeout_s: float | None = None,
    cancel: Cancel | None = None,
) -> Iterator[Deadline]:
    """Wait until so many bytes may be moved; inside, they are, by the deadline it gives.

    For the rate first: who waits for that must not hold a place that others could use.
    """
    if rate is not None:
        rate.spend(amount, Deadline.after(None, cancel))
    deadline = Deadline.after(timeout_s, cancel)
    with limit.transfer(amount, timeout_s, cancel):
        yield deadline
