"""Progress: what a long run does now, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Step:
    """What a run is doing, and how much of that is done."""

    doing: str
    """In a few words: `deleting packs`."""
    done: int = 0
    total: int | None = None
    """None where it is not known beforehand."""


Progress: TypeAlias = Callable[[Step], None]
"""Called often, from the thread that does the work: it must be quick."""


def silent(step: Step) -> None:
    """For those who do not want to know."""
