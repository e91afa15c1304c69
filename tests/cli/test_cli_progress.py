from __future__ import annotations

from itertools import count

from weightyard.cli.progress import plain_bytes, plain_steps
from weightyard.registry.progress import Step


def test_without_a_terminal_a_long_run_says_where_it_is_now_and_then() -> None:
    said: list[str] = []
    seconds = count()
    tell = plain_steps(said.append, lambda: float(next(seconds)))
    for done in range(30):
        tell(Step("deleting packs", done, 30))
    assert 1 <= len(said) <= 4
    assert said[0].startswith("deleting packs (")


def test_without_a_terminal_a_short_run_says_nothing() -> None:
    said: list[str] = []
    tell = plain_steps(said.append)
    for step in (Step("expiring uploads", 0, 0), Step("deleting packs")):
        tell(step)
    assert said == []


def test_without_a_terminal_a_long_transfer_tells_rate_and_time_left_now_and_then() -> None:
    said: list[str] = []
    seconds = count()
    advance = plain_bytes(said.append, "Pushing", 60 << 20, lambda: float(next(seconds)))
    for _ in range(60):
        advance(1 << 20)
    assert said[0] == "Pushing: 10.0 MiB of 60.0 MiB (17%), 1.0 MiB/s, 50 s left"
    assert len(said) == 6
    assert said[-1] == "Pushing: 60.0 MiB of 60.0 MiB (100%), 1.0 MiB/s"


def test_a_transfer_of_which_nothing_is_known_yet_is_told_too() -> None:
    said: list[str] = []
    seconds = count(step=20)
    advance = plain_bytes(said.append, "Pulling", None, lambda: float(next(seconds)))
    advance(0)
    assert said == ["Pulling: 0 B, 0 B/s"]
    plain_bytes(said.append, "Pulling", 1 << 20, lambda: float(next(seconds)))(0)
    assert said[1:] == ["Pulling: 0 B of 1.0 MiB (0%), 0 B/s"]
