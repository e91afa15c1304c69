"""How many transfers run at once: within bounds, and as many as the network rewards."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightyard.errors import (
    Cancelled,
    DataNodeFailed,
    FileMissing,
    StaleLocation,
    StoreUnavailable,
    YardError,
)
from weightyard.storage.cancel import Cancel
from weightyard.storage.limit import AdaptiveLimit, Course
from weightyard.transfer.learned import Learned

UP, DOWN = 1, -1
LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("limit", "direction", "before", "now", "next_limit", "next_direction"),
    [
        # Nothing is known yet: whatever came is more.
        (8, UP, 0, 100, 10, UP),
        # Clearly more: on in the same direction.
        (8, UP, 100, 106, 10, UP),
        (8, DOWN, 100, 106, 6, DOWN),
        # Clearly less: the other way.
        (8, UP, 106, 100, 6, DOWN),
        (8, DOWN, 106, 100, 10, UP),
        # About the same: fewer, whichever way it went.
        (8, UP, 100, 104, 6, DOWN),
        (8, UP, 104, 100, 6, DOWN),
        (8, DOWN, 100, 100, 6, DOWN),
        (8, UP, 100, 105, 6, DOWN),
        # By a quarter of the limit, and at least by one.
        (40, UP, 100, 200, 50, UP),
        (3, UP, 100, 200, 4, UP),
        (3, DOWN, 100, 200, 2, DOWN),
        # Not beyond the bounds.
        (2, DOWN, 100, 200, 2, DOWN),
        (60, UP, 100, 200, 64, UP),
        (64, UP, 100, 200, 64, UP),
    ],
)
def test_the_next_limit_follows_from_what_two_rounds_brought(
    limit: int, direction: int, before: float, now: float, next_limit: int, next_direction: int
) -> None:
    found = Course(limit, 2, 64, direction, before).after_round(now)
    assert (found.limit, found.direction, found.rate) == (next_limit, next_direction, now)


@pytest.mark.parametrize(("limit", "halved"), [(64, 32), (9, 4), (3, 2), (2, 2)])
def test_a_failure_halves_the_limit_and_forgets_what_was_learned(limit: int, halved: int) -> None:
    found = Course(limit, 2, 64, DOWN, 1e9).after_failure()
    assert found == Course(halved, 2, 64, UP, 0.0)


ROUNDS = st.lists(st.none() | st.floats(0, 1e12), max_size=200)


@given(ROUNDS, st.integers(1, 8), st.integers(8, 64))
def test_no_network_moves_the_limit_out_of_its_bounds(
    rounds: list[float | None], lowest: int, highest: int
) -> None:
    course = Course(8, lowest, highest)
    for rate in rounds:
        course = course.after_failure() if rate is None else course.after_round(rate)
        assert lowest <= course.limit <= highest


@pytest.mark.parametrize("best_at", [1, 2, 3, 5, 12, 40, 64, 1000])
@pytest.mark.parametrize("first", [2, 8, 64])
def test_wherever_it_begins_the_limit_comes_near_the_best_and_stays(
    best_at: int, first: int
) -> None:
    course = Course(first, 2, 64)
    seen = []
    for _ in range(60):
        seen.append(course.limit)
        course = course.after_round(1e6 * min(course.limit, best_at))
    best = min(max(best_at, 2), 64)
    assert all(best / 2 <= limit <= max(best * 1.5, best + 1) for limit in seen[30:]), seen


def _settle(best_at: int, rounds: int = 400) -> AdaptiveLimit:
    """A simulated network: each transfer adds the same rate up to `best_at`, then they share."""
    now = 0.0
    limit = AdaptiveLimit(first=8, lowest=2, highest=64, clock=lambda: now)
    for _ in range(rounds):
        running = limit.limit
        stack = [limit.transfer(1000, LIMIT_S) for _ in range(running)]
        for transfer in stack:
            transfer.__enter__()
        now += 1.0 if running <= best_at else running / best_at
        for transfer in stack:
            transfer.__exit__(None, None, None)
    return limit


@pytest.mark.parametrize("best_at", [3, 12, 40])
def test_concurrency_settles_near_what_the_network_gives(best_at: int) -> None:
    assert best_at / 2 <= _settle(best_at).limit <= best_at * 2


def test_a_failure_halves_the_concurrency_and_an_idle_store_learns_nothing() -> None:
    limit = AdaptiveLimit(first=16)
    with pytest.raises(StoreUnavailable), limit.transfer(1):
        raise StoreUnavailable("x")
    assert limit.limit == 8
    for _ in range(100):
        with limit.transfer(1):
            pass
    assert limit.limit == 8


def test_transfers_that_fail_together_halve_the_concurrency_once() -> None:
    limit = AdaptiveLimit(first=64)
    for halved in (32, 16):
        together = [limit.transfer(1, LIMIT_S) for _ in range(10)]
        for transfer in together:
            transfer.__enter__()
        for transfer in together:
            transfer.__exit__(DataNodeFailed, DataNodeFailed("dn:1", "gone"), None)
        assert limit.limit == halved


@pytest.mark.parametrize("said", [StaleLocation("x"), FileMissing("x"), Cancelled("x")])
def test_what_says_nothing_of_the_network_teaches_nothing(said: YardError) -> None:
    limit = AdaptiveLimit(first=16)
    with ExitStack() as others:
        for _ in range(15):
            others.enter_context(limit.transfer(1, LIMIT_S))
        for _ in range(100):
            with pytest.raises(type(said)), limit.transfer(1, LIMIT_S):
                raise said
        assert limit.limit == 16


def test_whoever_waits_for_a_place_can_be_cancelled() -> None:
    limit = AdaptiveLimit(first=2, lowest=2, highest=2)
    cancel = Cancel()
    began = time.monotonic()
    with limit.transfer(1), limit.transfer(1):
        later = threading.Timer(0.1, cancel.cancel)
        later.start()
        with pytest.raises(Cancelled), limit.transfer(1, LIMIT_S, cancel):
            raise AssertionError("there was no place")
        assert time.monotonic() - began < LIMIT_S / 2
    later.join()
    with limit.transfer(1, LIMIT_S), limit.transfer(1, LIMIT_S):
        pass


def test_readers_adapt_between_2_and_64() -> None:
    limit = Learned().limit
    for _ in range(10):
        with pytest.raises(StoreUnavailable), limit.transfer(1):
            raise StoreUnavailable("x")
    assert limit.limit == 2
    for power in range(40):  # each round brings more by far than a busy machine can delay it
        _fill(limit, 10 ** (7 * power))
    assert limit.limit == 64


def _fill(limit: AdaptiveLimit, amount: int) -> None:
    """As many transfers at once as may be, and once more: a round."""
    for _ in range(2):
        with ExitStack() as transfers:
            for _ in range(limit.limit):
                transfers.enter_context(limit.transfer(amount, LIMIT_S))
