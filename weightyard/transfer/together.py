"""Running many calls together, all or nothing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


def run_together(
    threads: int,
    name: str,
    calls: Iterable[Callable[[], object]],
    stop: threading.Event | None = None,
) -> None:
    """Run all calls, at most `threads` at once, begun in the order given.

    `calls` may make them while others run: one is asked for when a thread is free. On the first
    failure (or Ctrl-C) `stop` is set, calls not yet begun are dropped, those running are waited
    for, and the failure is raised: no thread is left behind.
    """
    together = _Together(stop or threading.Event())
    workers: list[threading.Thread] = []
    try:
        for call in calls:
            together.add(call)
            if len(workers) < threads:
                # Not an executor's: that starts no threads while the interpreter ends, when the
                # last records are still being written.
                worker = threading.Thread(target=together.work, name=f"{name}_{len(workers)}")
                worker.start()
                workers.append(worker)
            together.wait(threads)
        together.wait(0)
    finally:
        together.end()
        for worker in workers:
            worker.join()


class _Together:
    """Calls that wait for a thread, and how many have not ended."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], object]] = deque()
        self._under_way = 0
        self._failure: BaseException | None = None
        self._is_over = False

    def add(self, call: Callable[[], object]) -> None:
        with self._changed:
            self._calls.append(call)
            self._under_way += 1
            self._changed.notify_all()

    def wait(self, most: int) -> None:
        """Wait until at most so many calls have not ended. Raises the first failure of one."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way <= most or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def end(self) -> None:
        """Begin no more calls; if some have not ended, tell them to."""
        with self._changed:
            self._is_over = True
            if self._under_way:
                self._stop.set()
            self._calls.clear()
            self._changed.notify_all()

    def work(self) -> None:
        """What each thread does."""
        while (call := self._next()) is not None:
            failure: BaseException | None = None
            try:
                call()
            except BaseException as why:  # noqa: BLE001 - told to who waits
                self._stop.set()
                failure = why
            with self._changed:
                self._under_way -= 1
                self._failure = self._failure or failure
                self._changed.notify_all()
            del call, failure  # and with them what they hold

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._is_over)
            return None if self._is_over else self._calls.popleft()
