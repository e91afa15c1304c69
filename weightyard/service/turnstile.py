"""Turnstile: limits how many files are moved at once, in all and for each caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from weightyard.errors import StoreUnavailable


class Turnstile:
    """Counts who is inside. Used from the event loop only."""

    def __init__(self, total: int, each: int) -> None:
        self._total = total
        self._each = each
        self._inside: Counter[str] = Counter()

    @contextmanager
    def passed(self, who: str) -> Iterator[None]:
        """Count a caller as inside. Raises StoreUnavailable, to be tried again, if it is full."""
        if self._inside[who] >= self._each:
            raise StoreUnavailable(f"{who} moves {self._each} files at once already: try again")
        if self._inside.total() >= self._total:
            raise StoreUnavailable(f"{self._total} files are being moved already: try again")
        self._inside[who] += 1
        try:
            yield
        finally:
            self._inside[who] -= 1
            if not self._inside[who]:
                del self._inside[who]
