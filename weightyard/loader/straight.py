"""Straight: what a rank reads for itself alone is received where it belongs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from weightyard.format.block import CHUNK_BYTES
from weightyard.format.manifest import Extent
from weightyard.loader.batches import Part
from weightyard.loader.plan import Fetch, Pick, TensorPlan
from weightyard.loader.sharing import Portion, Wants, chunk_run, chunks_of, merged


def straight_parts(
    plans: Sequence[TensorPlan], own: Iterable[Portion], but: Collection[int] = ()
) -> tuple[list[Part], list[Portion]]:
    """Runs that go straight into tensors, and what is left of a rank's own portions.

    Left are the chunks of which some is picked or belongs to one of the tensors `but`. Each chunk
    of the portions is in one of the two, so that it is read once.
    """
    own = list(own)
    elsewhere = chunks_of(
        extent
        for number, plan in enumerate(plans)
        for fetch in plan.fetches
        if number in but or isinstance(fetch.goes, Pick)
        for extent in fetch.extents
    )
    mine = chunks_of(extent for portion in own for extent in portion.extents)
    direct = {block: _without(runs, elsewhere.get(block, ())) for block, runs in mine.items()}
    parts = [
        Part(number, part)
        for number, plan in enumerate(plans)
        for fetch in plan.fetches
        if number not in but and not isinstance(fetch.goes, Pick)
        for part in _within(fetch, direct)
    ]
    return parts, list(_left(own, direct))


def _within(fetch: Fetch, chunks: Wants) -> Iterator[Fetch]:
    """The parts of a run that lie in some chunks."""
    found: list[tuple[int, int]] = []
    at = 0
    for extent in fetch.extents:
        for first, end in chunks.get(extent.block, ()):
            begin = max(first * CHUNK_BYTES, extent.offset)
            stop = min(end * CHUNK_BYTES, extent.offset + extent.length)
            if begin < stop:
                found.append((at + begin - extent.offset, at + stop - extent.offset))
        at += extent.length
    for begin, stop in merged(found):
        yield fetch.part(begin, stop - begin)


def _left(portions: Iterable[Portion], chunks: Wants) -> Iterator[Portion]:
    """Portions without some chunks."""
    for portion in portions:
        extents = tuple(
            Extent(extent.block, begin, stop - begin)
            for extent in portion.extents
            for begin, stop in _bytes_without(extent, chunks.get(extent.block, ()))
        )
        if extents:
            yield Portion(portion.reader, portion.wanting, extents)


def _bytes_without(extent: Extent, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The bytes of an extent of whole chunks that are in none of the runs."""
    end = extent.offset + extent.length
    for first, last in _without([chunk_run(extent)], runs):
        yield first * CHUNK_BYTES, min(last * CHUNK_BYTES, end)


def _without(
    runs: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Runs without what `taken` covers; both are in order."""
    left: list[tuple[int, int]] = []
    for first, end in runs:
        at = first
        for begin, stop in taken:
            if stop <= at or begin >= end:
                continue
            if at < begin:
                left.append((at, begin))
            at = max(at, stop)
        if at < end:
            left.append((at, end))
    return left
