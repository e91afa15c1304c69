from __future__ import annotations

import io
import re
import time
from itertools import count

import pytest
from rich.console import Console

from weightyard.cli import progress
from weightyard.cli.progress import bar, plain_bytes, plain_steps, seconds_left
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


@pytest.mark.parametrize(
    ("done_bytes", "total_bytes", "bytes_per_s", "told"),
    [
        (1_400, 4 << 30, 60_000.0, None),  # config.json came first: 19 hours, by its rate
        (0, 4 << 30, None, None),
        (31 << 20, 4 << 30, 1e9, None),
        (32 << 20, 1056 << 20, 2.0**20, 1024.0),
        (10, 100, 1.0, 90.0),  # all of it is small
        (1, 100, 1.0, None),
        (100, 100, 1.0, 0.0),
        (110, 100, 1.0, 0.0),
        (50, None, 1.0, None),
        (0, 0, 1.0, None),
    ],
)
def test_a_time_left_is_told_once_enough_is_done_to_know_it(
    done_bytes: int, total_bytes: int | None, bytes_per_s: float | None, told: float | None
) -> None:
    assert seconds_left(done_bytes, total_bytes, bytes_per_s) == told


def test_without_a_terminal_too_a_tiny_first_file_tells_no_time_left() -> None:
    said: list[str] = []
    seconds = count(step=10)
    advance = plain_bytes(said.append, "Pushing", 4 << 30, lambda: float(next(seconds)))
    advance(1_400)
    advance(64 << 20)
    assert said[0] == "Pushing: 1.4 KiB of 4.0 GiB (0%), 140 B/s"
    assert said[1].endswith(" s left")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal is sent."""
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    return out


def test_a_bar_of_unknown_length_shows_what_came_and_no_question_mark_for_the_rest(
    shown: io.StringIO,
) -> None:
    with bar("Fetching", None) as advance:
        advance(3 << 20)
    lines = re.findall(r"Fetching .*", shown.getvalue())
    assert "3.0 MiB" in lines[-1]
    assert not [line for line in lines if "/?" in line or "--" in line]


def test_a_bar_tells_no_time_left_by_a_tiny_first_file(shown: io.StringIO) -> None:
    with bar("Pushing", 4 << 30) as advance:
        advance(700)
        time.sleep(0.01)  # of which a rate can be made
        advance(700)
    assert "-:--:--" in shown.getvalue()
    assert not re.search(r"\d+:\d\d:\d\d", shown.getvalue())
