"""Threads that a test began, and no others: those of tests before it may come and go meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from waiting import SOON_S

_LOCATING = "weightyard-locate"
"""Asking where a pack lies cannot be cancelled: these end by themselves, soon after a read."""


@contextmanager
def begun() -> Iterator[list[threading.Thread]]:
    """Gets every thread that this one begins meanwhile, and those that they begin."""
    me, start = threading.current_thread(), threading.Thread.start
    found: list[threading.Thread] = []

    def noted(thread: threading.Thread) -> None:
        if threading.current_thread() in (me, *found):
            found.append(thread)
        start(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", noted)
        yield found


def left(threads: Sequence[threading.Thread]) -> list[str]:
    """Names of those that have not ended; who only asks where packs lie is waited for."""
    alive = [one for one in threads if one.is_alive()]
    for one in alive:
        if one.name.startswith(_LOCATING):
            one.join(SOON_S)
    return [one.name for one in alive if one.is_alive() or not one.name.startswith(_LOCATING)]
