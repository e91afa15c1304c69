"""Waits of random length: within their bounds, and different for each who waits."""

from __future__ import annotations

import random

import pytest

from weightyard import jitter

WAITS = 1000


@pytest.mark.parametrize("seconds", [0.001, 1.0, 600.0])
def test_waits_stay_within_their_bounds_and_fill_them(seconds: float) -> None:
    up_to = [jitter.up_to(seconds) for _ in range(WAITS)]
    about = [jitter.about(seconds) for _ in range(WAITS)]
    assert all(0 <= wait <= seconds for wait in up_to)
    assert all(0.8 * seconds <= wait <= 1.2 * seconds for wait in about)
    # A thousand that all miss a tenth of their range are one in 10^45.
    assert min(up_to) < 0.1 * seconds < 0.9 * seconds < max(up_to)
    assert min(about) < 0.84 * seconds < 1.16 * seconds < max(about)


def test_waits_differ_whoever_seeds_pythons_own_generator_and_leave_it_as_it_is() -> None:
    waits = []
    for _ in range(WAITS):
        random.seed(7)
        before = random.getstate()
        waits += [jitter.up_to(1.0), jitter.about(1.0)]
        assert random.getstate() == before
    assert len(set(waits)) == len(waits)


def test_no_time_is_no_wait() -> None:
    assert jitter.up_to(0.0) == jitter.about(0.0) == 0.0
