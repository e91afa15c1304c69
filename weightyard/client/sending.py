"""Sending: a source as the body of a request, sent from its beginning again if need be."""

from __future__ import annotations

import time
from collections.abc import Iterator

from weightyard.transfer.source import Source

_PIECE_BYTES = 1 << 20


class Sending:
    """The body of a request. However often it is sent, each byte counts as progress only once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._furthest = 0
        self.length = source.length
        self.moved_at = time.monotonic()
        """When a byte last went out for the first time."""

    def pieces(self) -> Iterator[bytes]:
        """All of it. Raises Conflict if the source changed meanwhile."""
        for at in range(0, self.length, _PIECE_BYTES):
            piece = self._source.read_at(at, min(_PIECE_BYTES, self.length - at))
            yield piece
            self._went(at + len(piece))

    def _went(self, end: int) -> None:
        if end > self._furthest:
            self._furthest = end
            self.moved_at = time.monotonic()
