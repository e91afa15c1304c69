"""Wording: amounts and times as people write and read them."""

from __future__ import annotations

import re
from datetime import datetime

from weightyard.amounts import size as size

_STEPS = (("year", 365 * 86400), ("month", 30 * 86400), ("day", 86400), ("hour", 3600))
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smhdw])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def count(amount: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{amount:,} {what}" if amount == 1 else f"{amount:,} {what}s"


def ago(moment: datetime, now: datetime | None = None) -> str:
    """How long ago: `3 hours ago`."""
    seconds = ((now or datetime.now(moment.tzinfo)) - moment).total_seconds()
    for what, long in (*_STEPS, ("minute", 60)):
        if seconds >= long:
            return f"{count(int(seconds // long), what)} ago"
    return "just now"


def when(moment: datetime | None) -> str:
    """A time, relative and absolute, in the reader's zone."""
    if moment is None:
        return "never"
    return f"{ago(moment)} ({minute(moment)})"


def minute(moment: datetime) -> str:
    """A time, to the minute, in the reader's zone."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M %Z}"


def span(seconds: float) -> str:
    """A length of time as `7d`, in the largest unit that fits."""
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    return f"{seconds:g}s"


def parse_span(text: str) -> float:
    """Seconds of `7d`, `36h`, `90m`, `2w` or `30s`. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no length of time: write 7d, 36h, 90m, 2w or 30s")
    return float(found[1]) * _SECONDS[found[2]]
