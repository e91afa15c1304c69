"""Calls that may hang, made in other threads so that the caller does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Any, TypeVar

from weightyard.errors import StoreUnavailable

_T = TypeVar("_T")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class Watched:
    """Runs calls in threads of its own and gives up on those that take too long.

    A call given up on keeps its thread until it returns, and takes one of `most` places; when
    none is free, callers wait, no longer than they would for an answer. The threads do not keep
    the process alive, as those of an executor would.
    """

    def __init__(self, most: int = 32) -> None:
        self._places = threading.Semaphore(most)
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def call(self, doing: str, limit_s: float, function: Callable[[], _T]) -> _T:
        """What the function returns or raises. Raises StoreUnavailable if it takes too long."""
        if not self._places.acquire(timeout=limit_s):
            raise StoreUnavailable(f"{doing}: too many calls hang")
        outcome: Future[_T] = Future()
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(
                target=self._work, args=(inbox,), name="weightyard-hdfs", daemon=True
            ).start()
        inbox.put((function, outcome))
        try:
            return outcome.result(limit_s)
        except FutureTimeout:
            if outcome.done():
                raise
            raise StoreUnavailable(f"{doing}: no answer for {limit_s:.1f} s") from None

    def close(self) -> None:
        """End the threads: those with nothing to do now, the others when their call returns."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _work(self, inbox: SimpleQueue[_Job | None]) -> None:
        while (job := inbox.get()) is not None:
            function, outcome = job
            try:
                outcome.set_result(function())
            except BaseException as why:  # noqa: BLE001  a Rust panic too is the caller's to see
                outcome.set_exception(why)
            del job, function, outcome
            self._places.release()
            with self._lock:
                if self._is_closed:
                    return
                self._idle.append(inbox)
