"""Planning reads: which stored bytes to fetch, and what to make of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from weightyard.errors import FileMissing, Refused
from weightyard.format.block import CHUNK_BYTES, KIB, MIB, Codec, Encoding
from weightyard.format.manifest import Extent, Manifest
from weightyard.format.pack import Placement
from weightyard.names import BlockId, PackId

RUN_BYTES = 16 * MIB
"""Neighbouring blocks are fetched together up to this much; a single block may have more."""

GAP_BYTES = 64 * KIB
"""Fetched and thrown away rather than asking twice."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run of a block's raw bytes, and where they should go."""

    block: BlockId
    offset: int
    into: memoryview
    """Writable bytes, as many as wanted."""

    @property
    def end(self) -> int:
        return self.offset + self.into.nbytes


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A run of chunks of one block, and what is wanted of it."""

    placement: Placement
    first_chunk: int
    last_chunk: int
    wanted: tuple[Wanted, ...]

    @property
    def encoding(self) -> Encoding:
        return self.placement.encoding

    @property
    def start(self) -> int:
        """Where the chunks begin in the pack."""
        return (
            self.placement.offset + self.encoding.chunk_span(self.first_chunk, self.last_chunk)[0]
        )

    @property
    def stored_bytes(self) -> int:
        """Of the chunks, padding between them included."""
        return self._span[1]

    @property
    def _span(self) -> tuple[int, int]:
        return self.encoding.chunk_span(self.first_chunk, self.last_chunk)

    @property
    def raw_start(self) -> int:
        return self.first_chunk * CHUNK_BYTES

    @property
    def raw_bytes(self) -> int:
        return min(self.last_chunk * CHUNK_BYTES, self.encoding.raw_bytes) - self.raw_start

    @property
    def whole(self) -> memoryview | None:
        """The one buffer that takes all the chunks' raw bytes, if that is what is wanted."""
        if len(self.wanted) == 1 and self.wanted[0].into.nbytes == self.raw_bytes:
            return self.wanted[0].into
        return None

    @property
    def in_place(self) -> memoryview | None:
        """The buffer that takes the stored bytes as they come: a raw block needs no decoding."""
        return self.whole if self.encoding.codec is Codec.RAW and not self.encoding.base else None


@dataclass(frozen=True, slots=True)
class Run:
    """One request: neighbouring bytes of a pack, with the chunks that lie in them."""

    pack: PackId
    reads: tuple[BlockRead, ...]

    @property
    def start(self) -> int:
        return self.reads[0].start

    @property
    def length(self) -> int:
        return self.reads[-1].start + self.reads[-1].stored_bytes - self.start


def plan_reads(
    wanted: Iterable[Wanted], placements: Mapping[BlockId, Sequence[Placement]]
) -> tuple[Run, ...]:
    """Every wanted byte fetched once, by few requests.

    Raises FileMissing for a block without placement, Refused for bytes it does not have.
    """
    by_block: dict[BlockId, list[Wanted]] = {}
    for want in wanted:
        if want.into.nbytes:
            by_block.setdefault(want.block, []).append(want)
    reads = [
        read
        for block, wants in by_block.items()
        for read in _chunk_runs(_best(block, placements.get(block, ())), wants)
    ]
    reads.sort(key=lambda read: (read.placement.pack, read.start))
    return tuple(
        run
        for pack, in_pack in groupby(reads, key=lambda read: read.placement.pack)
        for run in _join(pack, in_pack)
    )


def wanted_of(manifest: Manifest, extents: Sequence[Extent], into: memoryview) -> Iterator[Wanted]:
    """What a file or box needs, so that `into` holds its bytes."""
    at = 0
    for extent in extents:
        yield Wanted(manifest.blocks[extent.block].id, extent.offset, into[at : at + extent.length])
        at += extent.length


def _best(block: BlockId, placements: Sequence[Placement]) -> Placement:
    """Standalone before delta (that needs its base too), then the shortest."""
    if not placements:
        raise FileMissing(f"block {block} lies in no pack of this store")
    return min(
        placements,
        key=lambda placement: (
            placement.encoding.base is not None,
            placement.encoding.stored_bytes,
        ),
    )


def _chunk_runs(placement: Placement, wants: list[Wanted]) -> Iterator[BlockRead]:
    """The chunks that hold what is wanted of one block, in runs without holes."""
    wants.sort(key=lambda want: want.offset)
    if wants[0].offset < 0 or max(want.end for want in wants) > placement.encoding.raw_bytes:
        raise Refused(
            f"block {placement.encoding.block} has {placement.encoding.raw_bytes} bytes; "
            f"wanted are bytes up to {max(want.end for want in wants)}"
        )
    members: list[Wanted] = []
    first = last = 0
    for want in wants:
        begin, end = want.offset // CHUNK_BYTES, -(-want.end // CHUNK_BYTES)
        if members and begin > last:
            yield BlockRead(placement, first, last, tuple(members))
            members = []
        if not members:
            first = last = begin
        members.append(want)
        last = max(last, end)
    yield BlockRead(placement, first, last, tuple(members))


def _join(pack: PackId, reads: Iterable[BlockRead]) -> Iterator[Run]:
    members: list[BlockRead] = []
    for read in reads:
        if members:
            end = members[-1].start + members[-1].stored_bytes
            length = read.start + read.stored_bytes - members[0].start
            if read.start - end > GAP_BYTES or length > RUN_BYTES:
                yield Run(pack, tuple(members))
                members = []
        members.append(read)
    if members:
        yield Run(pack, tuple(members))
