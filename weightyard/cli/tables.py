"""Tables and lists for people. A terminal never acts on text that others wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 120
"""From this many columns on there is room. What is no terminal counts as wider."""

_RIGHT = ("size", "new", "bytes", "stored", "versions", "step", "generation")


def clean(text: str, *, longest: int | None = None) -> str:
    """Text on one line, without what a terminal would act on."""
    shown = "".join(ch if ch.isprintable() else " " for ch in text).strip()
    return shown if longest is None or len(shown) <= longest else shown[: longest - 1] + "…"


def table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns under their names."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for column in columns:
        is_number = column in _RIGHT
        justify: Literal["right", "left"] = "right" if is_number else "left"
        # Folded if too long, never cut: people copy names and digests from here.
        shown.add_column(column, justify=justify, no_wrap=is_number, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(clean(cell)) for cell in row))
    console.print(shown)


def moment(console: Console, at: datetime | None) -> str:
    """A time in a table: how long ago, and the exact time only where there is room."""
    from weightyard.cli.wording import ago, when

    return when(at) if at is None or console.width >= _WIDE else ago(at)


def exact_moment(console: Console, at: datetime) -> str:
    """A time in a table, to the minute; how long ago that is only where there is room."""
    from weightyard.cli.wording import minute, when

    return when(at) if console.width >= _WIDE else minute(at)


def facts(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Names and values, one pair on each line. Those without a value are left out."""
    from rich.table import Table
    from rich.text import Text

    shown = Table.grid(padding=(0, 2))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            shown.add_row(name, Text(clean(value)))
    console.print(shown)
