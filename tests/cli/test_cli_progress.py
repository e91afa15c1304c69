from __future__ import annotations

from itertools import count

from weightyard.cli.progress import plain_steps
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
