"""Planning reads: which stored bytes to fetch, and where they go. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from weightyard.errors import FileMissing, Refused
from weightyard.format.block import ALIGNMENT, CHUNK_BYTES, KIB, MIB, Codec, Encoding
from weightyard.format.manifest import Extent, Manifest
from weightyard.format.pack import Placement
from weightyard.names import BlockId, PackId
from weightyard.storage.store import Read

RUN_BYTES = 16 * MIB
"""Neighbouring blocks are fetched together up to this length; a single block may be longer."""

GAP_BYTES = 64 * KIB
"""A gap up to this length is fetched and thrown away rather than asking twice."""

HOST_BYTES = 64 * MIB
"""What one run may need of memory besides its destination."""

LEAST_HOST_BYTES = 5 * MIB
"""The most one chunk needs: its stored bytes, its base, the base's stored bytes, its raw bytes."""

_BASE_FACTOR, _OTHER_FACTOR = 4, 2


OnChunks: TypeAlias = Callable[[Codec | None, range], None]
"""Is told how chunks of a block lie where they were wanted: as planes of a codec, or decoded."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run of a block's raw bytes, and where they should go."""

    block: BlockId
    offset: int
    into: memoryview
    """Writable bytes, as many as wanted."""
    on_chunks: OnChunks | None = None
    """Set by a caller that merges planes itself: chunks wanted whole may then be left as planes. It
    is told from any thread how they lie; what it is told last holds."""

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
        """Length of the stored chunks, with the padding between them."""
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
        """The buffer that takes all raw bytes of the chunks, if one does."""
        if len(self.wanted) == 1 and self.wanted[0].into.nbytes == self.raw_bytes:
            return self.wanted[0].into
        return None

    @property
    def in_place(self) -> memoryview | None:
        """The same, if it takes the stored bytes as they come: a raw block needs no decoding."""
        return self.whole if self.encoding.codec is Codec.RAW and not self.encoding.base else None

    @property
    def base_bytes(self) -> int:
        """Memory for the same chunks of the base."""
        return _fitting(self.raw_bytes) if self.encoding.base is not None else 0

    @property
    def base_scratch_bytes(self) -> int:
        """Memory for the base's stored bytes: no more than its raw bytes and padding.

        A chunk has at most eight segments.
        """
        chunks = self.last_chunk - self.first_chunk
        return self.base_bytes + 8 * ALIGNMENT * chunks if self.base_bytes else 0

    @property
    def raw_scratch_bytes(self) -> int:
        """Memory for the raw chunks, where not all of them go to one place."""
        return _fitting(self.raw_bytes) if self.whole is None else 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring bytes of a run that go to one place."""

    start: int
    length: int
    into: memoryview | None
    """Where they belong, just as they are; None: scratch memory, as they are to be decoded."""


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

    @property
    def raw_bytes(self) -> int:
        """How many raw bytes are wanted of it."""
        return sum(want.into.nbytes for read in self.reads for want in read.wanted)

    @property
    def decoded_bytes(self) -> int:
        """Raw bytes of its chunks, which are read and checked whole."""
        return sum(read.raw_bytes for read in self.reads)

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """What to receive where. Gaps between encoded blocks are received too."""
        made: list[Stretch] = []
        for read in self.reads:
            if (into := read.in_place) is not None:
                made.append(Stretch(read.start, into.nbytes, into))
            elif made and made[-1].into is None:
                start = made.pop().start
                made.append(Stretch(start, read.start + read.stored_bytes - start, None))
            else:
                made.append(Stretch(read.start, read.stored_bytes, None))
        return tuple(made)

    @property
    def scratch_bytes(self) -> int:
        return sum(_fitting(one.length) for one in self.stretches if one.into is None)

    @property
    def host_bytes(self) -> int:
        """All the memory it needs besides its destination."""
        return (
            self.scratch_bytes
            + sum(read.base_bytes for read in self.reads)
            + max(read.base_scratch_bytes for read in self.reads)
            + max(read.raw_scratch_bytes for read in self.reads)
        )

    def lay_out(self, scratch: memoryview) -> tuple[list[Read], list[memoryview]]:
        """What to read, and where each block's stored bytes are then: raw ones in place."""
        reads: list[Read] = []
        at = 0
        for stretch in self.stretches:
            into = stretch.into
            if into is None:
                into = scratch[at : at + stretch.length]
                at += _fitting(stretch.length)
            reads.append(Read(stretch.start, into))
        stored = []
        stretches = iter(reads)
        inside = next(stretches)
        for read in self.reads:
            while read.start >= inside.offset + inside.into.nbytes:
                inside = next(stretches)
            in_place = read.in_place
            begin = read.start - inside.offset
            stored.append(
                inside.into[begin:][: read.stored_bytes] if in_place is None else in_place
            )
        return reads, stored

    def lay_out_apart(self, scratch: memoryview) -> tuple[list[Read], list[memoryview]]:
        """The same with nothing in place: all in scratch memory, which is as long as the run."""
        stored = [scratch[read.start - self.start :][: read.stored_bytes] for read in self.reads]
        return [Read(self.start, scratch[: self.length])], stored


def plan_reads(
    wanted: Iterable[Wanted],
    placements: Mapping[BlockId, Sequence[Placement]],
    *,
    host_bytes: int = HOST_BYTES,
    avoid: Collection[PackId] = (),
    gap_bytes: int = GAP_BYTES,
) -> tuple[Run, ...]:
    """Fetch every wanted byte once, by few requests, which may include gaps.

    No run needs more than `host_bytes` of memory besides its destination, so blocks may be read in
    parts. Packs to avoid are used only for what lies nowhere else. Raises FileMissing for a block
    without placement, Refused for bytes it does not have.
    """
    by_block: dict[BlockId, list[Wanted]] = {}
    for want in wanted:
        if want.into.nbytes:
            by_block.setdefault(want.block, []).append(want)
    reads = [
        read
        for block, wants in by_block.items()
        for read in _chunk_runs(_best(block, placements.get(block, ()), avoid), wants, host_bytes)
    ]
    reads.sort(key=lambda read: (read.placement.pack, read.start))
    return tuple(
        run
        for pack, in_pack in groupby(reads, key=lambda read: read.placement.pack)
        for run in _join(pack, in_pack, host_bytes, gap_bytes)
    )


def wanted_of(manifest: Manifest, extents: Sequence[Extent], into: memoryview) -> Iterator[Wanted]:
    """What a file or box needs, so that `into` holds its bytes."""
    at = 0
    for extent in extents:
        yield Wanted(manifest.blocks[extent.block].id, extent.offset, into[at : at + extent.length])
        at += extent.length


def standalone(placements: Sequence[Placement]) -> list[Placement]:
    """Those that need no base; a block that is a base always has one."""
    return [placement for placement in placements if placement.encoding.base is None]


def _best(block: BlockId, placements: Sequence[Placement], avoid: Collection[PackId]) -> Placement:
    """Standalone before delta, which needs its base too; then the shortest."""
    if not placements:
        raise FileMissing(f"block {block} lies in no pack of this store")
    return min(
        placements,
        key=lambda placement: (
            placement.pack in avoid,
            placement.encoding.base is not None,
            placement.encoding.stored_bytes,
        ),
    )


def _chunk_runs(placement: Placement, wants: list[Wanted], host_bytes: int) -> Iterator[BlockRead]:
    """The chunks that hold what is wanted of one block, in runs without holes."""
    encoding = placement.encoding
    if min(want.offset for want in wants) < 0 or max(want.end for want in wants) > (
        encoding.raw_bytes
    ):
        raise Refused(
            f"block {encoding.block} has {encoding.raw_bytes} bytes; "
            f"wanted are bytes up to {max(want.end for want in wants)}"
        )
    factor = _OTHER_FACTOR if encoding.base is None else _BASE_FACTOR
    most_chunks = max(1, host_bytes // (factor * CHUNK_BYTES))
    cut = [part for want in wants for part in _parts(want, most_chunks * CHUNK_BYTES)]
    cut.sort(key=lambda want: want.offset)
    members: list[Wanted] = []
    first = last = 0
    for want in cut:
        begin, end = want.offset // CHUNK_BYTES, -(-want.end // CHUNK_BYTES)
        if members and (begin > last or begin // most_chunks != first // most_chunks):
            yield BlockRead(placement, first, last, tuple(members))
            members = []
        if not members:
            first = last = begin
        members.append(want)
        last = max(last, end)
    yield BlockRead(placement, first, last, tuple(members))


def _parts(want: Wanted, part_bytes: int) -> Iterator[Wanted]:
    """What is wanted, cut at every multiple of `part_bytes` in the block."""
    if want.offset // part_bytes == (want.end - 1) // part_bytes:
        yield want
        return
    at = want.offset
    while at < want.end:
        end = min(want.end, (at // part_bytes + 1) * part_bytes)
        into = want.into[at - want.offset : end - want.offset]
        yield Wanted(want.block, at, into, want.on_chunks)
        at = end


def _join(
    pack: PackId, reads: Iterable[BlockRead], host_bytes: int, gap_bytes: int
) -> Iterator[Run]:
    members: list[BlockRead] = []
    needed = end = 0
    for read in reads:
        needs = Run(pack, (read,)).host_bytes
        gap = read.start - end
        length = read.start + read.stored_bytes - members[0].start if members else 0
        if gap > gap_bytes or length > RUN_BYTES or needed + gap + needs > host_bytes:
            if members:
                yield Run(pack, tuple(members))
            members, needed, gap = [], 0, 0
        members.append(read)
        needed += gap + needs
        end = read.start + read.stored_bytes
    if members:
        yield Run(pack, tuple(members))


def _fitting(length: int) -> int:
    """Rounded up, so that what follows begins at a multiple of 64, as suits vector instructions."""
    return -(-length // 64) * 64
