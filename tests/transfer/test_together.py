"""Calls that run side by side, by a few threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from waiting import SOON_S, eventually

from weightyard.errors import (
    StoreUnavailable,
)
from weightyard.transfer.together import run_together


def test_calls_are_asked_for_only_when_a_thread_is_free() -> None:
    gate, asked = threading.Event(), []

    def calls() -> Iterator[object]:
        for number in range(6):
            asked.append(number)
            if number == 3:
                # Two run and wait for the gate, one waits for a thread.
                raise AssertionError("asked for too early")
            yield gate.wait

    def open_gate() -> None:
        eventually(lambda: len(asked) == 3)
        time.sleep(0.3)  # so that one that is asked for too early would be seen
        asked.append(-1)
        gate.set()

    opening = threading.Thread(target=open_gate)
    opening.start()
    with pytest.raises(AssertionError):
        run_together(2, "test", calls())  # type: ignore[arg-type]
    opening.join()
    assert asked == [0, 1, 2, -1, 3]


def test_the_first_failure_tells_the_others_to_stop() -> None:
    stop, ended = threading.Event(), []

    def fail() -> None:
        raise StoreUnavailable("one")

    def calls() -> Iterator[Callable[[], None]]:
        yield lambda: ended.append(stop.wait(SOON_S))
        yield fail
        assert stop.wait(SOON_S), "who makes the calls is told while making the next one"

    with pytest.raises(StoreUnavailable):
        run_together(3, "test", calls(), stop)
    assert ended == [True]
