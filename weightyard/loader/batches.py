"""Batches: a load cut into parts that are read one after the other, within a byte budget. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from weightyard.format.block import CHUNK_BYTES, DEFAULT_BLOCK_BYTES, MIB, aligned
from weightyard.loader.plan import Fetch, Pick, TensorPlan

FIRST_BYTES = 8 * MIB
"""A first batch is small, so that the first tensor comes soon; each next one is twice as large."""

BATCH_BYTES = 64 * MIB
"""What later batches have: enough to keep a link busy, and a few of them fit any host."""

AHEAD_BYTES = 256 * MIB
"""How much is read ahead of the caller, unless that says how much may be."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run to fetch for one tensor."""

    tensor: int
    """Its number among the tensors planned."""
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Batch:
    """What is read together."""

    parts: tuple[Part, ...]
    done: tuple[int, ...]
    """The tensors that are whole once this batch and those before it are filled."""
    bytes: int
    """What it counts against the budget."""


def all_at_once(
    tensors: Sequence[TensorPlan],
    batch_bytes: int = BATCH_BYTES,
    piece_bytes: int = DEFAULT_BLOCK_BYTES,
    converted: Collection[int] = (),
) -> Iterator[Batch]:
    """One batch of all tensors that are received in place, then batches of `batch_bytes` at most.

    For tensors on the host. Receiving them in place takes no memory beside the result, so all are
    read at once. The others do take some: those of which bytes are picked, and those that are
    converted on the way.
    """
    beside = {number for number, tensor in enumerate(tensors) if tensor.is_picked} | set(converted)
    straight = [number for number in range(len(tensors)) if number not in beside]
    parts = [Part(number, fetch) for number in straight for fetch in tensors[number].fetches]
    if straight:
        yield Batch(tuple(parts), tuple(straight), 0)
    yield from _cut(tensors, sorted(beside), batch_bytes, piece_bytes)


def one_by_one(
    tensors: Sequence[TensorPlan],
    batch_bytes: int = BATCH_BYTES,
    piece_bytes: int = DEFAULT_BLOCK_BYTES,
) -> Iterator[Batch]:
    """Batches of at most `batch_bytes`, in order; a run longer than a piece may be in several.

    Only a single run that cannot be cut makes a batch longer.
    """
    yield from _cut(tensors, range(len(tensors)), batch_bytes, piece_bytes)


def _cut(
    tensors: Sequence[TensorPlan],
    numbers: Iterable[int],
    batch_bytes: int,
    piece_bytes: int,
) -> Iterator[Batch]:
    limit = min(FIRST_BYTES, batch_bytes)
    parts: list[Part] = []
    done: list[int] = []
    used = 0
    for number in numbers:
        for fetch in _pieces(tensors[number].fetches, min(piece_bytes, batch_bytes)):
            if parts and used + aligned(fetch.length) > limit:
                yield Batch(tuple(parts), tuple(done), used)
                parts, done, used = [], [], 0
                limit = min(2 * limit, batch_bytes)
            parts.append(Part(number, fetch))
            used += aligned(fetch.length)
        done.append(number)
    if parts or done:
        yield Batch(tuple(parts), tuple(done), used)


def _pieces(fetches: Iterable[Fetch], longest: int) -> Iterator[Fetch]:
    """Cut long runs where chunks end: a chunk that lay in two pieces would be read twice."""
    step = max(CHUNK_BYTES, longest // CHUNK_BYTES * CHUNK_BYTES)
    for fetch in fetches:
        if isinstance(fetch.goes, Pick) or fetch.length <= step:
            yield fetch
            continue
        start, end = 0, step - fetch.extents[0].offset % CHUNK_BYTES
        while start < fetch.length:
            yield fetch.part(start, min(end, fetch.length) - start)
            start, end = end, end + step
