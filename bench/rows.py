"""Measuring planned rows, one repetition of each after the other, so that noise hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.samples import Row
from bench.site import ChildFailed, Site


@dataclass(frozen=True, slots=True)
class Planned:
    """A row still to be measured, and the task that does it."""

    row: Row
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None
    """Called in this process before each repetition, untimed."""
    here: bool = False
    """It takes the short circuit."""


def measure(
    site: Site, planned: Sequence[Planned], repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """All rows with their samples. A row that fails is not repeated; it says why."""
    rows = [one.row for one in planned]
    for repetition in range(repeat):
        order = list(enumerate(planned))
        for at, one in reversed(order) if repetition % 2 else order:
            if rows[at].failed is not None:
                continue
            one.before()
            try:
                sample = site.run_child(one.task, one.options, here=one.here)
                rows[at] = rows[at].with_sample(sample)
            except ChildFailed as why:
                rows[at] = msgspec.structs.replace(rows[at], failed=str(why), samples=())
            done(rows[at])
    return tuple(rows)
