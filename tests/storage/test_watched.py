"""Threads for calls that may hang: no more than needed, bounded, and ended with who has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from weightyard.errors import StoreUnavailable
from weightyard.storage.watched import Watched

LIMIT_S = 60.0
LINGER_S = 0.01
MOST = 3
CALLS = 10


class Lingering(Future[Any]):
    """Whoever gives the answer does not go on for a while: so it may be on a busy machine."""

    def set_result(self, result: Any) -> None:
        super().set_result(result)
        time.sleep(LINGER_S)

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        time.sleep(LINGER_S)


@pytest.fixture(autouse=True)
def answers_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightyard.storage.watched.Future", Lingering)


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched(most=MOST)
    yield one
    one.close()


def call(watched: Watched) -> threading.Thread:
    return watched.call("asking", LIMIT_S, threading.current_thread)


def held(watched: Watched, until: threading.Event) -> threading.Thread:
    """A call under way in a thread of its own, whose own caller is given here."""
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        assert until.wait(LIMIT_S)

    caller = threading.Thread(target=watched.call, args=("hanging", LIMIT_S, hang))
    caller.start()
    assert begun.wait(LIMIT_S)
    return caller


def test_calls_one_after_another_are_made_in_one_thread(watched: Watched) -> None:
    assert len({call(watched) for _ in range(CALLS)}) == 1


def test_one_whose_call_failed_is_used_again(watched: Watched) -> None:
    def fail() -> None:
        raise ValueError("no")

    first = call(watched)
    for _ in range(CALLS):
        with pytest.raises(ValueError, match="no"):
            watched.call("asking", LIMIT_S, fail)
    assert call(watched) is first


def test_calls_at_once_have_a_thread_each_and_no_more_than_there_are_places(
    watched: Watched,
) -> None:
    until = threading.Event()
    callers = [held(watched, until) for _ in range(MOST - 1)]
    last = call(watched)
    assert {call(watched) for _ in range(CALLS)} == {last}
    callers.append(held(watched, until))
    with pytest.raises(StoreUnavailable, match="too many calls hang"):
        watched.call("asking", 0.01, threading.current_thread)
    until.set()
    for caller in callers:
        caller.join(LIMIT_S)
    assert not any(caller.is_alive() for caller in callers)
    assert call(watched).is_alive()


def test_closing_ends_idle_threads_now_and_the_others_when_their_call_returns() -> None:
    watched = Watched(most=MOST)
    until = threading.Event()
    begun = threading.Event()
    busy: list[threading.Thread] = []

    def hang() -> None:
        busy.append(threading.current_thread())
        begun.set()
        assert until.wait(LIMIT_S)

    with pytest.raises(StoreUnavailable, match="no answer"):
        watched.call("hanging", 0.1, hang)
    assert begun.wait(LIMIT_S)
    idle = call(watched)
    watched.close()
    idle.join(LIMIT_S)
    assert not idle.is_alive()
    assert busy[0].is_alive()
    until.set()
    busy[0].join(LIMIT_S)
    assert not busy[0].is_alive()


def test_a_place_is_free_again_when_no_thread_can_be_begun(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(MOST):
            with pytest.raises(RuntimeError, match="new thread"):
                watched.call("asking", LIMIT_S, threading.current_thread)
    assert watched.call("asking", 0.5, threading.current_thread).is_alive()
