"""Running many calls together, all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait


def run_together(
    threads: int,
    name: str,
    calls: Iterable[Callable[[], object]],
    stop: threading.Event | None = None,
) -> None:
    """Run all calls, at most `threads` at once, begun in the order given.

    On the first failure (or Ctrl-C) `stop` is set, calls not yet begun are dropped, those running
    are waited for, and the failure is raised: no thread is left behind.
    """
    with ThreadPoolExecutor(threads, name) as pool:
        running: list[Future[object]] = [pool.submit(call) for call in calls]
        done = False
        try:
            done = not wait(running, return_when=FIRST_EXCEPTION).not_done
        finally:
            if stop is not None and not done:
                stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    for call in running:
        if not call.cancelled():
            call.result()
