"""Pieces: the reads of a file, sorted by the HDFS blocks they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightyard.errors import TooLarge
from weightyard.storage.store import Location, Read, Replica, Span


@dataclass(frozen=True, slots=True)
class Piece:
    """The reads that lie in one span."""

    span: Span
    reads: tuple[Read, ...]


def one_of(served: Sequence[Replica]) -> Replica | None:
    """The replica that served all pieces; None if there were several, or none."""
    return served[0] if served and all(one == served[0] for one in served) else None


def split(location: Location, reads: Sequence[Read]) -> Iterator[Piece]:
    """Sort reads by the spans they lie in, cutting those that lie in several."""
    by_span: dict[int, list[Read]] = {}
    for read in reads:
        length = len(read.into)
        if read.offset < 0 or read.offset + length > location.length:
            raise TooLarge(
                f"{location.path}: a read of {length} bytes at {read.offset} is past its "
                f"{location.length} bytes"
            )
        for index, span in enumerate(location.spans):
            start = max(read.offset, span.offset)
            end = min(read.offset + length, span.offset + span.length)
            if start < end:
                part = Read(start, read.into[start - read.offset : end - read.offset])
                by_span.setdefault(index, []).append(part)
    for index, parts in sorted(by_span.items()):
        yield Piece(location.spans[index], tuple(parts))
