"""The bar long commands show on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bar(doing: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Shows bytes done, rate and time left, and is gone afterwards. Takes bytes from any thread."""
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with shown:
        task = shown.add_task(doing, total=total_bytes)
        yield lambda done_bytes: shown.advance(task, done_bytes)
