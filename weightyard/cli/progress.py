"""Progress of long commands: bars on a terminal, elsewhere plain lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from weightyard.cli.wording import size

if TYPE_CHECKING:
    from weightyard.registry.progress import Step

PLAIN_EVERY_S = 10.0
"""How often a line is printed without a terminal: a short run prints none."""

_TELLING_BYTES = 32 << 20
_TELLING_SHARE = 0.05
"""So much is done, or such a share of it all, before a time left is told: a tiny file takes as long
as a thousand times as much of a large one."""


def seconds_left(
    done_bytes: float, total_bytes: float | None, bytes_per_s: float | None
) -> float | None:
    """How long it will take yet; None while that cannot be told."""
    if not total_bytes or not bytes_per_s:
        return None
    if done_bytes < min(_TELLING_BYTES, total_bytes * _TELLING_SHARE):
        return None
    return max(0.0, total_bytes - done_bytes) / bytes_per_s


class _BytesDone(DownloadColumn):
    """`1.2/4.0 GiB`; where nobody knows of how many, `1.2 GiB`."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(size(int(task.completed)), style="progress.download")
        return super().render(task)


class _Rate(ProgressColumn):
    """`1.2 GiB/s`, in the units of the bytes beside it, which rich's own column does not have."""

    def render(self, task: Task) -> Text:
        shown = "?" if task.speed is None else f"{size(int(task.speed))}/s"
        return Text(shown, style="progress.data.speed")


class _TimeLeft(ProgressColumn):
    """`0:01:30`, as soon as it can be told."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left_s = seconds_left(task.completed, task.total, task.speed)
        shown = "-:--:--" if left_s is None else str(timedelta(seconds=ceil(left_s)))
        return Text("" if task.total is None else shown, style="progress.remaining")


@contextmanager
def bar(doing: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Shows bytes done, rate and time left, until it is left. Takes bytes from any thread."""
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _BytesDone(binary_units=True),
        _Rate(),
        _TimeLeft(),
        console=Console(stderr=True),
        transient=True,
    )
    with shown:
        task = shown.add_task(doing, total=total_bytes)
        yield lambda done_bytes: shown.advance(task, done_bytes)


def plain_bytes(
    say: Callable[[str], None],
    doing: str,
    total_bytes: int | None,
    now: Callable[[], float] = time.monotonic,
) -> Callable[[int], None]:
    """Prints a line now and then: bytes done, rate and time left. Takes bytes from any thread."""
    began = said_at = now()
    so_far = 0
    lock = threading.Lock()

    def advance(done_bytes: int) -> None:
        nonlocal said_at, so_far
        with lock:
            so_far += done_bytes
            if (at := now()) - said_at < PLAIN_EVERY_S:
                return
            said_at = at
            say(_far(doing, so_far, total_bytes, at - began))

    return advance


def _far(doing: str, done_bytes: int, total_bytes: int | None, seconds: float) -> str:
    rate = done_bytes / seconds
    if not total_bytes:
        return f"{doing}: {size(done_bytes)}, {size(int(rate))}/s"
    left_s = seconds_left(done_bytes, total_bytes, rate)
    left = f", {left_s:.0f} s left" if left_s else ""
    share = f"{size(done_bytes)} of {size(total_bytes)} ({done_bytes / total_bytes:.0%})"
    return f"{doing}: {share}, {size(int(rate))}/s{left}"


@contextmanager
def steps() -> Iterator[Callable[[Step], None]]:
    """Shows which step a run is at, and how much of it is done, until it is left."""
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with shown:
        task = shown.add_task("", total=None)
        yield lambda step: shown.update(
            task, description=step.doing.capitalize(), completed=step.done, total=step.total
        )


def plain_steps(
    say: Callable[[str], None], now: Callable[[], float] = time.monotonic
) -> Callable[[Step], None]:
    """Prints a line now and then."""
    said_at = now()

    def tell(step: Step) -> None:
        nonlocal said_at
        if now() - said_at < PLAIN_EVERY_S:
            return
        said_at = now()
        far = f" ({min(1, step.done / step.total):.0%})" if step.total else ""
        say(f"{step.doing}{far}")

    return tell
