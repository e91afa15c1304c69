"""When a read is hedged, how often, and who wins: no I/O."""

from __future__ import annotations

import threading
import time

import pytest

from weightyard.transfer.hedging import ENOUGH_SAMPLES, LEAST_DELAY_S, HedgeBudget, Pace, Race

MIB = 1 << 20
LONG_S = 60.0


def test_nothing_is_hedged_before_anything_was_measured() -> None:
    assert Pace().patience_s(MIB) is None


def test_with_few_samples_patience_is_a_sane_floor() -> None:
    pace = Pace()
    pace.add(16 * MIB, 0.01)
    assert pace.patience_s(16 * MIB) == pytest.approx(0.5 + 16 * MIB / 50e6)


def test_with_enough_samples_patience_is_the_p95_of_its_size() -> None:
    pace = Pace()
    for i in range(100):
        pace.add(16 * MIB, (i + 1) / 100)
        pace.add(4096, 0.001)
    assert pace.patience_s(16 * MIB) == pytest.approx(0.96)
    assert pace.patience_s(4096) == LEAST_DELAY_S, "no read is hedged sooner"


def test_patience_follows_a_cluster_that_became_slow() -> None:
    pace = Pace()
    for _ in range(ENOUGH_SAMPLES):
        pace.add(MIB, 0.01)
    for _ in range(2 * ENOUGH_SAMPLES):
        pace.add(MIB, 3.0)
    assert pace.patience_s(MIB) == 3.0


def test_hedges_are_at_most_a_twentieth_of_all_reads_and_a_small_burst() -> None:
    budget = HedgeBudget()
    made = 0
    for _ in range(10_000):
        budget.count_read()
        made += budget.take()
    assert 0.04 * 10_000 <= made <= 0.05 * 10_000 + 4


def test_hedges_not_made_are_not_saved_up() -> None:
    budget = HedgeBudget()
    for _ in range(100_000):
        budget.count_read()
    assert [budget.take() for _ in range(6)] == [True] * 4 + [False] * 2


def test_a_second_read_that_is_done_ends_the_first() -> None:
    race: Race[str] = Race(0.0)
    assert race.begin_second()
    assert not race.begin_second(), "there is one second read"
    race.second_ended("theirs")
    assert race.first.is_cancelled
    assert race.first_failed(0) == "theirs"


def test_a_first_read_that_is_done_ends_the_second_and_its_answer_is_dropped() -> None:
    race: Race[str] = Race(0.0)
    race.begin_second()
    race.first_served()
    assert race.second.is_cancelled
    race.second_ended("late")
    assert not race.first.is_cancelled
    assert race.first_failed(0) is None


def test_a_first_read_that_failed_waits_for_the_second() -> None:
    race: Race[str] = Race(0.0)
    race.begin_second()
    later = threading.Timer(0.1, race.second_ended, ("theirs",))
    later.start()
    assert race.first_failed(LONG_S) == "theirs"
    later.join()


def test_a_first_read_does_not_wait_for_a_second_that_failed_or_never_was() -> None:
    alone: Race[str] = Race(None)
    began = time.monotonic()
    assert alone.first_failed(LONG_S) is None
    assert not alone.begin_second(), "it is over"
    chased: Race[str] = Race(0.0)
    chased.begin_second()
    chased.second_ended(None)
    assert chased.first_failed(LONG_S) is None
    assert time.monotonic() - began < LONG_S / 2
