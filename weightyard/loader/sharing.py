"""Sharing: which rank of a group reads what, so that together they read it once. Pure.

Every rank knows what every rank wants, where the blocks lie and where the ranks are, and comes to
the same answer by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from weightyard.errors import Refused
from weightyard.format.block import CHUNK_BYTES, MIB
from weightyard.format.manifest import BlockEntry, Extent
from weightyard.loader.plan import TensorPlan
from weightyard.storage.store import Replica
from weightyard.transfer.plan import RUN_BYTES
from weightyard.transfer.replicas import Place

ROUND_BYTES = 64 * MIB
"""What a group reads and exchanges at a time; more only if that is under a chunk for each rank."""

_PARTS = 4
"""A rank reads at least so many portions, if there is enough to read: so the shares are even."""

_MOST_SHARES = 2
"""Nearness gives no rank more than this many times its even share."""

Wants: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]
"""What a rank wants: by the number of a block, runs of its chunks, as first and end."""


@dataclass(frozen=True, slots=True)
class PackReplicas:
    """Where a block lies."""

    pack: str = ""
    replicas: tuple[Replica, ...] = ()


@dataclass(frozen=True, slots=True)
class Portion:
    """Neighbouring bytes that one rank reads, for itself and others."""

    reader: int
    wanting: tuple[int, ...]
    """The ranks that want it; the reader is one of them."""
    extents: tuple[Extent, ...]

    @property
    def length(self) -> int:
        return sum(extent.length for extent in self.extents)

    @property
    def is_shared(self) -> bool:
        return len(self.wanting) > 1


@dataclass(frozen=True, slots=True)
class Split:
    """Who reads what. What several want is read in rounds, each exchanged before the next."""

    rounds: tuple[tuple[Portion, ...], ...]
    own: tuple[tuple[Portion, ...], ...]
    """By rank: what only that one wants."""

    @property
    def bytes(self) -> int:
        """What all ranks together read."""
        return sum(portion.length for portions in self.own + self.rounds for portion in portions)


def wants_of(plans: Iterable[TensorPlan]) -> Wants:
    """What plans need: whole chunks, the least that can be read and checked."""
    return chunks_of(extent for plan in plans for fetch in plan.fetches for extent in fetch.extents)


def chunks_of(extents: Iterable[Extent]) -> Wants:
    """The chunks that extents touch."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for extent in extents:
        runs.setdefault(extent.block, []).append(chunk_run(extent))
    return {block: merged(runs[block]) for block in sorted(runs)}


def chunk_run(extent: Extent) -> tuple[int, int]:
    return extent.offset // CHUNK_BYTES, -(-(extent.offset + extent.length) // CHUNK_BYTES)


def encode_wants(wants: Wants) -> bytes:
    rows = [(block, *run) for block, runs in wants.items() for run in runs]
    return np.array(rows, "<i8").tobytes()


def decode_wants(data: bytes, blocks: Sequence[BlockEntry], *, whole: bool = False) -> Wants:
    """What another rank wants; if `whole`, widened to whole blocks. Raises Refused."""
    if len(data) % 24:
        raise Refused("what another rank wants cannot be read: is its weightyard the same?")
    wants: dict[int, list[tuple[int, int]]] = {}
    for block, first, end in np.frombuffer(data, "<i8").reshape(-1, 3).tolist():
        if not 0 <= block < len(blocks) or not 0 <= first < end <= _chunks(blocks[block]):
            raise Refused("another rank wants what the version does not have: is it the same?")
        wants.setdefault(block, []).append((0, _chunks(blocks[block])) if whole else (first, end))
    return {block: merged(runs) for block, runs in wants.items()}


def wanted_by_any(wants: Iterable[Wants]) -> Wants:
    """What at least one rank wants."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for one in wants:
        for block, some in one.items():
            runs.setdefault(block, []).extend(some)
    return {block: merged(runs[block]) for block in sorted(runs)}


def split_reads(
    wants: Sequence[Wants],
    blocks: Sequence[BlockEntry],
    lying: Mapping[int, PackReplicas],
    places: Sequence[Place],
    *,
    whole: bool = False,
    round_bytes: int = ROUND_BYTES,
) -> Split:
    """Every chunk that is wanted is read once, by a rank that wants it.

    That is the one nearest to a replica of it, within bounds; among equally near ones the one that
    has the least to read. `whole`: no block is cut.
    """
    pieces = list(_pieces(wants, blocks))
    total = sum(piece.bytes for piece in pieces)
    each = max(CHUNK_BYTES, min(RUN_BYTES, round_bytes // len(wants)))
    longest = max(CHUNK_BYTES, min(each, total // (_PARTS * len(wants))))
    portions = list(_joined(pieces, lying, longest // CHUNK_BYTES * CHUNK_BYTES, whole))
    own: list[list[Portion]] = [[] for _ in wants]
    for portion in portions:
        if not portion.is_shared:
            own[portion.reader].append(portion)
    taken = [sum(portion.length for portion in some) for some in own]
    most = _MOST_SHARES * total // len(wants)
    hops: dict[str, list[int]] = {}
    queues: list[list[Portion]] = [[] for _ in wants]
    for portion in (one for one in portions if one.is_shared):
        where = lying.get(portion.extents[0].block, _NOWHERE)
        if where.pack not in hops:
            hops[where.pack] = [_nearest(place, where.replicas) for place in places]
        far, length = hops[where.pack], portion.length
        reader = min(
            portion.wanting,
            key=lambda rank: (taken[rank] + length > most, far[rank], taken[rank], rank),
        )
        taken[reader] += length
        queues[reader].append(Portion(reader, portion.wanting, portion.extents))
    return Split(tuple(_rounds(queues, each)), tuple(map(tuple, own)))


@dataclass(slots=True)
class _Piece:
    """A run of a block's bytes that the same ranks want."""

    block: int
    start: int
    end: int
    wanting: tuple[int, ...] = field(default=())

    @property
    def bytes(self) -> int:
        return self.end - self.start


def _pieces(wants: Sequence[Wants], blocks: Sequence[BlockEntry]) -> Iterator[_Piece]:
    """What anybody wants, in the order of the manifest."""
    alike: dict[bytes, tuple[Wants, list[int]]] = {}
    for rank, one in enumerate(wants):  # often all want the same
        alike.setdefault(encode_wants(one), (one, []))[1].append(rank)
    for block in sorted({block for one, _ in alike.values() for block in one}):
        runs = [
            (first, end, ranks)
            for one, ranks in alike.values()
            for first, end in one.get(block, ())
        ]
        cuts = sorted({first for first, _, _ in runs} | {end for _, end, _ in runs})
        for begin, stop in pairwise(cuts):
            wanting = [rank for first, end, ranks in runs if first <= begin < end for rank in ranks]
            if wanting:
                end_byte = min(stop * CHUNK_BYTES, blocks[block].raw_bytes)
                yield _Piece(block, begin * CHUNK_BYTES, end_byte, tuple(sorted(wanting)))


def _joined(
    pieces: Iterable[_Piece], lying: Mapping[int, PackReplicas], longest: int, whole: bool
) -> Iterator[Portion]:
    """Portions of at most so many bytes, each of one pack; for now the first wanting rank reads."""
    members: list[Extent] = []
    used, last = 0, None
    for piece in pieces:
        kind = piece.wanting, lying.get(piece.block, _NOWHERE).pack
        step = piece.bytes if whole else longest
        for start in range(piece.start, piece.end, step):
            extent = Extent(piece.block, start, min(step, piece.end - start))
            if last is not None and (kind != last or used + extent.length > longest):
                yield Portion(last[0][0], last[0], tuple(members))
                members, used = [], 0
            members.append(extent)
            used += extent.length
            last = kind
    if last is not None:
        yield Portion(last[0][0], last[0], tuple(members))


def _rounds(queues: Sequence[Sequence[Portion]], each: int) -> Iterator[tuple[Portion, ...]]:
    """Each takes so many bytes of every rank's queue, at least a portion: so all ranks read."""
    numbered: dict[int, list[Portion]] = {}
    for queue in queues:
        number = used = 0
        for portion in queue:
            if used and used + portion.length > each:
                number, used = number + 1, 0
            used += portion.length
            numbered.setdefault(number, []).append(portion)
    yield from (tuple(numbered[number]) for number in sorted(numbered))


def _nearest(place: Place, replicas: Sequence[Replica]) -> int:
    sound = [replica for replica in replicas if replica.state == "normal"] or replicas
    return min((place.hops(replica) for replica in sound), default=0)


def merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs in order, those that touch made one."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(runs):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged


def _chunks(block: BlockEntry) -> int:
    return -(-block.raw_bytes // CHUNK_BYTES)


def offsets(portion: Portion) -> list[int]:
    """Where each extent begins in the bytes of a portion."""
    return [*accumulate((extent.length for extent in portion.extents), initial=0)][:-1]


_NOWHERE = PackReplicas()
