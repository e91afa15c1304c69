"""Watching a ref: what it means now, and what it means whenever someone looks again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from weightyard import jitter
from weightyard.errors import Cancelled, YardError
from weightyard.records import Version
from weightyard.storage.cancel import Cancel

Sighting: TypeAlias = Version | YardError
"""The version a ref means, or why that is not known: NoSuchThing if it means none."""


def polled(resolve: Callable[[], Version], poll_s: float, stop: Cancel) -> Iterator[Sighting]:
    """Look again and again, until stopped. The same version may come many times."""
    while not stop.is_cancelled:
        yield sighted(resolve)
        pause(jitter.about(poll_s), stop)


def sighted(resolve: Callable[[], Version]) -> Sighting:
    """The result of one look."""
    try:
        return resolve()
    except YardError as why:
        return why


def pause(seconds: float, stop: Cancel) -> None:
    """Do nothing for so long, or until stopped."""
    over = threading.Event()
    try:
        with stop.ending(over.set, "waiting"):
            over.wait(seconds)
    except Cancelled:
        return
