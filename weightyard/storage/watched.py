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
    """Runs calls in threads of its own, and stops waiting for those that take too long.

    A thread is started when a call finds none idle, up to `most`. A call given up on keeps its
    thread until it returns; when none is free, callers wait, no longer than they would for an
    answer. The threads do not keep the process alive, as those of an executor would.
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
            inbox = self._begin_thread()
        inbox.put((function, outcome))
        try:
            return outcome.result(limit_s)
        except FutureTimeout:
            if outcome.done():
                raise
            raise StoreUnavailable(f"{doing}: no answer for {limit_s:.1f} s") from None
        finally:
            # Its error refers to this frame, which refers to it: such a cycle would keep the
            # caller's memory until the garbage collector finds it.
            del outcome

    def close(self) -> None:
        """End the threads: those with nothing to do now, the others when their call returns."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _begin_thread(self) -> SimpleQueue[_Job | None]:
        """The inbox of a new thread. If none can be had, the caller's place is free again."""
        inbox: SimpleQueue[_Job | None] = SimpleQueue()
        work = threading.Thread(
            target=self._work, args=(inbox,), name="weightyard-watched", daemon=True
        )
        try:
            work.start()
        except BaseException:
            inbox.put(None)  # it may have begun nevertheless, when this one was interrupted
            self._places.release()
            raise
        return inbox

    def _work(self, inbox: SimpleQueue[_Job | None]) -> None:
        is_kept = True
        while is_kept and (job := inbox.get()) is not None:
            function, outcome = job
            answer: Any = None
            failed: BaseException | None = None
            try:
                answer = function()
            except BaseException as why:  # noqa: BLE001  a Rust panic too is the caller's to see
                failed = why
            # Idle before the answer is given: whoever calls again with it finds this thread.
            is_kept = self._rest(inbox)
            if failed is None:
                outcome.set_result(answer)
            else:
                outcome.set_exception(failed)
            del job, function, outcome, answer, failed

    def _rest(self, inbox: SimpleQueue[_Job | None]) -> bool:
        """A thread has nothing to do now. Returns whether to keep it: not once this is closed."""
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(inbox)
        self._places.release()
        return is_kept
