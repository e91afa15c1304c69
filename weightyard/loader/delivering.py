"""Delivering: batches are filled in the background, and tensors handed over as they are whole."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, TypeVar

from weightyard.errors import DeadlineExceeded
from weightyard.loader.batches import Batch
from weightyard.loader.budget import READS_AT_ONCE
from weightyard.loader.placing import Placer
from weightyard.storage.deadline import Deadline

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


def deliver(
    batches: Iterable[Batch],
    placer: Placer,
    fill: Callable[[Batch], None],
    *,
    ahead_bytes: int,
    deadline: Deadline,
    stop: Callable[[], None] = lambda: None,
) -> Generator[tuple[int, torch.Tensor]]:
    """Tensors by number as they are whole, with at most so many bytes on their way.

    `fill` fills a batch, in another thread; `stop` makes all that are under way end. When the
    iterator ends or is closed they have ended, and the placer is closed. Raises what `fill` raises,
    DeadlineExceeded.
    """
    pool = ThreadPoolExecutor(READS_AT_ONCE, "weightyard-load")
    running: deque[tuple[Batch, Future[None]]] = deque()
    begun: set[int] = set()
    ahead = 0
    try:
        upcoming = iter(batches)
        batch = next(upcoming, None)
        while batch is not None or running:
            while batch is not None and (not running or ahead + batch.bytes <= ahead_bytes):
                for number in (*(part.tensor for part in batch.parts), *batch.done):
                    if number not in begun:
                        begun.add(number)
                        placer.begin(number)
                running.append((batch, pool.submit(fill, batch)))
                ahead += batch.bytes
                batch = next(upcoming, None)
            done, future = running.popleft()
            wait_for(future, deadline)
            for number in done.done:
                yield number, placer.finish(number)
            ahead -= done.bytes
    finally:
        stop()
        pool.shutdown(wait=True, cancel_futures=True)
        placer.close()


def wait_for(future: Future[_T], deadline: Deadline) -> _T:
    """The result of work in a thread. Raises what that raises, DeadlineExceeded."""
    left_s = deadline.left("loading")
    try:
        return future.result(None if math.isinf(left_s) else left_s)
    except FutureTimeout:
        raise DeadlineExceeded("no time left while loading") from None
