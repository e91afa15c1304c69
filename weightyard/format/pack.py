"""A pack: one immutable file of encoded blocks with its own index (docs/format.md §5).

Layout only: which byte goes where. The bytes of blocks pass through the writer and the codec.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import xxhash
from typing_extensions import Buffer

from weightyard.errors import Bug, PackInvalid, TooLarge, UnknownFormat
from weightyard.format.block import (
    ALIGNMENT,
    CHUNK_BYTES,
    KIB,
    MIB,
    Codec,
    Encoding,
    Fold,
    Segment,
    SegmentKind,
    aligned,
)
from weightyard.names import BlockId, PackId

PACK_FORMAT = 1
"""The version written, and the newest one read."""

PACK_LIMIT_BYTES = 128 * MIB
"""Of a whole pack, unless told otherwise: the usual HDFS block."""

MAX_PACK_BYTES = 1024 * MIB
"""No pack is longer."""

MAX_FOOTER_BYTES = 16 * MIB

TAIL_BYTES = 64 * KIB
"""One read of this much from the end normally has trailer and footer."""

_MAGIC = b"\x89WYPACK\n"
_HEADER = struct.Struct("<8sII")
_FOOTER = struct.Struct("<16sIIQ")
_TRAILER = struct.Struct("<QQQII8s")
_ENTRY = np.dtype(
    [
        ("block", "V32"),
        ("base", "V32"),
        ("offset", "<u8"),
        ("fold_total", "<u8"),
        ("fold_weighted", "<u8"),
        ("raw_bytes", "<u4"),
        ("segments", "<u4"),
        ("codec", "u1"),
        ("has_base", "u1"),
        ("zero", "V6"),
    ]
)
_SEGMENT = np.dtype([("checksum", "<u8"), ("stored_bytes", "<u4"), ("kind", "u1"), ("zero", "V3")])

HEADER_BYTES = _HEADER.size
TRAILER_BYTES = _TRAILER.size

PACK_HEADER = _HEADER.pack(_MAGIC, PACK_FORMAT, 0)
"""The first bytes of every pack."""

_CODECS = tuple(Codec)
_KINDS = tuple(SegmentKind)
_MOST_PLANES = max(codec.planes for codec in Codec)
_NO_BASE = bytes(32)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a block lies, and all that is needed to get it back from there."""

    pack: PackId
    offset: int
    encoding: Encoding

    @property
    def end(self) -> int:
        return self.offset + self.encoding.stored_bytes


@dataclass(frozen=True, slots=True)
class FooterSpan:
    """Where a pack's footer lies, and what it must add up to."""

    offset: int
    length: int
    checksum: int

    def within(self, tail: Buffer, pack_bytes: int) -> memoryview | None:
        """The footer, if these last bytes of the pack have all of it."""
        view = memoryview(tail)
        start = self.offset - (pack_bytes - view.nbytes)
        return view[start : start + self.length] if start >= 0 else None


class PackBuilder:
    """Lays blocks out in a new pack.

    Call order: PACK_HEADER is written → for each block `fits`, `add`, then its stored bytes, each
    segment followed by its `padding` → `finish`, whose bytes end the file.
    """

    def __init__(self, pack: PackId, limit_bytes: int = PACK_LIMIT_BYTES) -> None:
        if limit_bytes > MAX_PACK_BYTES:
            raise TooLarge(f"pack limit {limit_bytes}; at most {MAX_PACK_BYTES}")
        self.pack = pack
        self.limit_bytes = limit_bytes
        self._placements: list[Placement] = []
        self._end = HEADER_BYTES
        self._segments = 0

    @property
    def pack_bytes(self) -> int:
        """How long the pack is, finished as it stands."""
        return self._end + _footer_bytes(len(self._placements), self._segments) + TRAILER_BYTES

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(self._placements)

    def fits(self, encoding: Encoding) -> bool:
        """Whether the block can be added within the limit."""
        footer_bytes = _footer_bytes(
            len(self._placements) + 1, self._segments + len(encoding.segments)
        )
        end = self._end + encoding.stored_bytes
        return (
            footer_bytes <= MAX_FOOTER_BYTES
            and end + footer_bytes + TRAILER_BYTES <= self.limit_bytes
        )

    def add(self, encoding: Encoding) -> Placement:
        """Give a block the next place. Raises TooLarge if it does not fit."""
        if not self.fits(encoding):
            raise TooLarge(
                f"block {encoding.block} takes {encoding.stored_bytes} bytes; pack {self.pack} has "
                f"{self.pack_bytes} of at most {self.limit_bytes}: begin another"
            )
        placement = Placement(self.pack, self._end, encoding)
        self._placements.append(placement)
        self._end = placement.end
        self._segments += len(encoding.segments)
        return placement

    def finish(self) -> bytes:
        """Footer and trailer. Raises Bug if what was added could not be read back."""
        footer = _footer(self.pack, self._placements, self._segments)
        checksum = xxhash.xxh3_64_intdigest(footer)
        span = FooterSpan(self._end, len(footer), checksum)
        try:
            same = read_footer(footer, span, self.pack) == self.placements
        except PackInvalid as why:
            raise Bug(f"pack {self.pack} was laid out wrongly: {why}") from why
        if not same:
            raise Bug(f"pack {self.pack}: its footer does not say what was added")
        return footer + _TRAILER.pack(self._end, len(footer), checksum, PACK_FORMAT, 0, _MAGIC)


def most_pack_bytes(blocks: int, raw_bytes: int) -> int:
    """The greatest length of a pack of so many blocks that have so many raw bytes in all."""
    segments = _MOST_PLANES * (blocks + raw_bytes // CHUNK_BYTES)
    stored_bytes = raw_bytes + ALIGNMENT * segments
    return HEADER_BYTES + stored_bytes + _footer_bytes(blocks, segments) + TRAILER_BYTES


def padding(stored_bytes: int) -> bytes:
    """The zeros that follow a segment of this length."""
    return bytes(aligned(stored_bytes) - stored_bytes)


def check_header(head: Buffer) -> None:
    """Whether a file begins as a pack does. Raises PackInvalid, UnknownFormat."""
    first = bytes(memoryview(head)[:HEADER_BYTES])
    if len(first) != HEADER_BYTES:
        raise PackInvalid("pack is shorter than its header")
    magic, version, zero = _HEADER.unpack(first)
    _check_magic(magic, version, zero, "header")


def read_trailer(tail: Buffer, pack_bytes: int) -> FooterSpan:
    """Where the footer lies, by the last bytes of a pack (TAIL_BYTES of them, or what there is).

    Raises PackInvalid, UnknownFormat.
    """
    view = memoryview(tail)
    if not TRAILER_BYTES <= view.nbytes <= pack_bytes or pack_bytes > MAX_PACK_BYTES:
        raise PackInvalid(f"pack of {pack_bytes} bytes, of which the last {view.nbytes} are given")
    offset, length, checksum, version, zero, magic = _TRAILER.unpack(view[-TRAILER_BYTES:])
    _check_magic(magic, version, zero, "trailer")
    if offset < HEADER_BYTES or offset % ALIGNMENT or length > MAX_FOOTER_BYTES:
        raise PackInvalid(f"pack trailer: footer of {length} bytes at {offset}")
    if offset + length + TRAILER_BYTES != pack_bytes:
        raise PackInvalid("pack trailer: footer does not end where the trailer begins")
    return FooterSpan(offset, length, checksum)


def read_footer(footer: Buffer, span: FooterSpan, pack: PackId) -> tuple[Placement, ...]:
    """The placements in a pack, every rule of the format checked. Raises PackInvalid."""
    view = memoryview(footer)
    if view.nbytes != span.length or span.length < _FOOTER.size:
        raise PackInvalid(f"pack {pack}: footer of {view.nbytes} bytes")
    if xxhash.xxh3_64_intdigest(view) != span.checksum:
        raise PackInvalid(f"pack {pack}: footer does not match its checksum")
    found, entry_count, segment_count, zero = _FOOTER.unpack(view[: _FOOTER.size])
    if found != pack.raw:
        raise PackInvalid(f"pack {pack}: footer is of pack {found.hex()}")
    if zero or _footer_bytes(entry_count, segment_count) != span.length:
        raise PackInvalid(f"pack {pack}: footer has not the length its counts give")
    entries = np.frombuffer(view, _ENTRY, entry_count, _FOOTER.size)
    segments = np.frombuffer(
        view, _SEGMENT, segment_count, _FOOTER.size + entry_count * _ENTRY.itemsize
    )
    try:
        return _placements(entries, segments, span, pack)
    except _Wrong as why:
        raise PackInvalid(f"pack {pack}: {why}") from None


def entry_bytes(placement: Placement) -> bytes:
    """One placement alone, in the form a footer gives it: its entry, then its chunk table."""
    return _tables([placement])


def read_entry(entry: Buffer, pack: PackId) -> Placement:
    """The placement in these bytes, every rule for a block checked. Raises PackInvalid."""
    view = memoryview(entry)
    rest = view.nbytes - _ENTRY.itemsize
    if rest < 0 or rest % _SEGMENT.itemsize or view.nbytes > MAX_FOOTER_BYTES:
        raise PackInvalid(f"pack {pack}: entry of {view.nbytes} bytes")
    entries = np.frombuffer(view, _ENTRY, 1)
    segments = np.frombuffer(view, _SEGMENT, rest // _SEGMENT.itemsize, _ENTRY.itemsize)
    try:
        ((offset, encoding),) = _encodings(entries, segments)
    except _Wrong as why:
        raise PackInvalid(f"pack {pack}: {why}") from None
    return Placement(pack, offset, encoding)


def read_entries(entries: Sequence[tuple[Buffer, PackId]]) -> list[Placement]:
    """The same for many at once, which is quicker than one after the other. Raises PackInvalid."""
    views = [memoryview(entry) for entry, _ in entries]
    table = b"".join([view[: _ENTRY.itemsize] for view in views])
    chunks = b"".join([view[_ENTRY.itemsize :] for view in views])
    lengths = [view.nbytes - _ENTRY.itemsize for view in views]
    if all(0 <= length <= MAX_FOOTER_BYTES - _ENTRY.itemsize for length in lengths):
        with suppress(_Wrong, ValueError):
            found = list(_encodings(np.frombuffer(table, _ENTRY), np.frombuffer(chunks, _SEGMENT)))
            counts = [len(encoding.segments) * _SEGMENT.itemsize for _, encoding in found]
            if counts == lengths:
                return [
                    Placement(pack, offset, encoding)
                    for (offset, encoding), (_, pack) in zip(found, entries, strict=True)
                ]
    return [read_entry(entry, pack) for entry, pack in entries]  # tells which one is wrong


class _Wrong(Exception):
    """A rule that a footer's tables break; the caller knows of which pack."""


def _placements(
    entries: np.ndarray, segments: np.ndarray, span: FooterSpan, pack: PackId
) -> tuple[Placement, ...]:
    placements: list[Placement] = []
    seen: set[tuple[BlockId, BlockId | None]] = set()
    end = HEADER_BYTES
    for offset, encoding in _encodings(entries, segments):
        if (encoding.block, encoding.base) in seen:
            raise _Wrong(f"block {encoding.block} is there twice")
        seen.add((encoding.block, encoding.base))
        if offset != end:
            raise _Wrong(f"block {encoding.block} is at {offset}, the one before ends at {end}")
        placements.append(Placement(pack, offset, encoding))
        end = placements[-1].end
    if end != span.offset:
        raise _Wrong("blocks do not end where the footer begins")
    return tuple(placements)


def _encodings(entries: np.ndarray, segments: np.ndarray) -> Iterator[tuple[int, Encoding]]:
    """Offset and encoding of each entry, whose chunk tables follow each other."""
    if (segments["kind"] >= len(_KINDS)).any() or (entries["codec"] >= len(_CODECS)).any():
        raise _Wrong("a codec or segment kind that is not known")
    if any(segments["zero"].tobytes()) or any(entries["zero"].tobytes()):
        raise _Wrong("a reserved field that is not zero")
    table = [
        Segment(_KINDS[kind], stored_bytes, checksum)
        for checksum, stored_bytes, kind, _ in segments.tolist()
    ]
    first = 0
    for (
        block,
        base,
        offset,
        total,
        weighted,
        raw_bytes,
        count,
        codec,
        has_base,
        _,
    ) in entries.tolist():
        if has_base != (base != _NO_BASE):
            raise _Wrong(f"block {block.hex()} has half a base")
        encoding = Encoding(
            block=BlockId.of(block),
            raw_bytes=raw_bytes,
            codec=_CODECS[codec],
            base=BlockId.of(base) if has_base else None,
            fold=Fold(total, weighted),
            segments=tuple(table[first : first + count]),
        )
        if not raw_bytes or encoding.flaw:
            raise _Wrong(f"block {block.hex()} has {encoding.flaw or 'no bytes'}")
        yield offset, encoding
        first += count
    if first != len(table):
        raise _Wrong("blocks do not use up the segments")


def _footer(pack: PackId, placements: Sequence[Placement], segment_count: int) -> bytes:
    return _FOOTER.pack(pack.raw, len(placements), segment_count, 0) + _tables(placements)


def _tables(placements: Sequence[Placement]) -> bytes:
    """The entries, then the chunk tables."""
    entries = np.array(
        [
            (
                placement.encoding.block.raw,
                placement.encoding.base.raw if placement.encoding.base else _NO_BASE,
                placement.offset,
                placement.encoding.fold.total,
                placement.encoding.fold.weighted,
                placement.encoding.raw_bytes,
                len(placement.encoding.segments),
                placement.encoding.codec,
                placement.encoding.base is not None,
                bytes(6),
            )
            for placement in placements
        ],
        _ENTRY,
    )
    segments = np.array(
        [
            (segment.checksum, segment.stored_bytes, segment.kind, bytes(3))
            for placement in placements
            for segment in placement.encoding.segments
        ],
        _SEGMENT,
    )
    return entries.tobytes() + segments.tobytes()


def _footer_bytes(entries: int, segments: int) -> int:
    return _FOOTER.size + entries * _ENTRY.itemsize + segments * _SEGMENT.itemsize


def _check_magic(magic: bytes, version: int, zero: int, where: str) -> None:
    if magic != _MAGIC:
        raise PackInvalid(f"pack {where}: not a pack")
    if version > PACK_FORMAT:
        raise UnknownFormat("pack", version, PACK_FORMAT)
    if version < 1 or zero:
        raise PackInvalid(f"pack {where}: version {version}, reserved {zero}")
