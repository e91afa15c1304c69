"""Packs: what was added is found again, and no footer that lies is believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from weightyard.errors import Bug, PackInvalid, TooLarge, UnknownFormat
from weightyard.format import pack as packs
from weightyard.format.block import (
    ALIGNMENT,
    CHUNK_BYTES,
    MIB,
    Codec,
    Encoding,
    Fold,
    Segment,
    SegmentKind,
    block_id,
)
from weightyard.format.pack import (
    HEADER_BYTES,
    PACK_HEADER,
    TAIL_BYTES,
    TRAILER_BYTES,
    FooterSpan,
    PackBuilder,
    Placement,
    check_header,
    padding,
    read_footer,
    read_trailer,
)
from weightyard.names import PackId

PACK = PackId("0123456789abcdef" * 2)
RAW, ZSTD, CONSTANT = SegmentKind


def encoding(
    name: str,
    codec: Codec,
    raw_bytes: int,
    *kinds: tuple[SegmentKind, int],
    base: str | None = None,
) -> Encoding:
    """An encoding whose segments are these (kind, stored length), over and over."""
    count = -(-raw_bytes // CHUNK_BYTES) * codec.planes
    segments = tuple(
        Segment(*kinds[number % len(kinds)], checksum=number + (1 << 63)) for number in range(count)
    )
    base_id = None if base is None else block_id(base.encode())
    return Encoding(block_id(name.encode()), raw_bytes, codec, base_id, Fold(1 << 63, 5), segments)


EXAMPLES = (
    encoding("a", Codec.RAW, 70_001, (RAW, 70_001)),
    encoding("b", Codec.ZSTD, 3 * MIB, (ZSTD, 1001), (CONSTANT, 1), (RAW, MIB)),
    encoding("c", Codec.PLANES_BF16, 2 * MIB, (ZSTD, 170_001), (RAW, MIB // 2)),
    encoding("d", Codec.PLANES_FP64, 16, (CONSTANT, 1)),
    encoding("a", Codec.ZSTD, 70_001, (CONSTANT, 1), base="b"),
)


def built(*encodings: Encoding) -> tuple[bytes, int, tuple[Placement, ...]]:
    """Footer and trailer of a pack, how long it is, and what is in it."""
    builder = PackBuilder(PACK)
    for each in encodings:
        builder.add(each)
    return builder.finish(), builder.pack_bytes, builder.placements


def read(tail: bytes, pack_bytes: int) -> tuple[Placement, ...]:
    span = read_trailer(tail, pack_bytes)
    footer = span.within(tail, pack_bytes)
    assert footer is not None
    return read_footer(footer, span, PACK)


def test_placements_come_back_from_the_tail_of_the_pack() -> None:
    tail, pack_bytes, placements = built(*EXAMPLES)
    assert read(tail, pack_bytes) == placements
    assert [each.encoding for each in placements] == list(EXAMPLES)
    more = bytes(999) + tail
    assert read(more, pack_bytes) == placements


def test_blocks_and_segments_begin_at_multiples_of_16_without_gaps() -> None:
    _, pack_bytes, placements = built(*EXAMPLES)
    at = HEADER_BYTES
    for placement in placements:
        assert placement.offset == at
        for segment in placement.encoding.segments:
            assert at % ALIGNMENT == 0
            at += segment.stored_bytes + len(padding(segment.stored_bytes))
        assert placement.end == at
    assert pack_bytes > at


def test_pack_without_blocks_is_a_pack() -> None:
    tail, pack_bytes, _ = built()
    assert read(tail, pack_bytes) == ()
    assert len(PACK_HEADER) + len(tail) == pack_bytes


def test_footer_that_the_tail_does_not_reach_is_not_made_up() -> None:
    tail, pack_bytes, _ = built(*EXAMPLES)
    span = read_trailer(tail[-TRAILER_BYTES:], pack_bytes)
    assert span.within(tail[-TRAILER_BYTES:], pack_bytes) is None
    assert span.within(tail[1:], pack_bytes) is None


def test_pack_never_passes_its_limit_footer_included() -> None:
    builder = PackBuilder(PACK, limit_bytes=4 * MIB)
    each = encoding("x", Codec.ZSTD, MIB, (ZSTD, 299_500))  # 14 fit, but not their footer
    number = 0
    while builder.fits(one := replace(each, block=block_id(b"%d" % number))):
        builder.add(one)
        number += 1
    assert number == 13
    assert builder.pack_bytes <= 4 * MIB
    with pytest.raises(TooLarge, match="begin another"):
        builder.add(each)
    assert len(read(builder.finish(), builder.pack_bytes)) == 13


def test_footer_never_passes_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "MAX_FOOTER_BYTES", 400)
    builder = PackBuilder(PACK)
    builder.add(EXAMPLES[0])
    builder.add(EXAMPLES[3])
    assert not builder.fits(EXAMPLES[1])


def test_pack_of_raw_blocks_is_listed_by_one_read_of_its_tail() -> None:
    builder = PackBuilder(PACK)
    for number in range(7):
        one = encoding(str(number), Codec.PLANES_FP32, 16 * MIB, (ZSTD, 200_000), (RAW, MIB // 4))
        builder.add(one)
    assert len(builder.finish()) < TAIL_BYTES


@pytest.mark.parametrize(
    "wrong",
    [
        encoding("x", Codec.RAW, 100, (RAW, 99)),
        encoding("x", Codec.RAW, 0),
        encoding("x", Codec.PLANES_FP32, 101, (RAW, 25)),
        replace(EXAMPLES[0], base=EXAMPLES[0].block),
        EXAMPLES[1],
    ],
)
def test_writer_learns_at_once_that_its_pack_could_not_be_read(wrong: Encoding) -> None:
    builder = PackBuilder(PACK)
    builder.add(EXAMPLES[1])
    builder.add(wrong)
    with pytest.raises(Bug, match="laid out wrongly"):
        builder.finish()


def lying(change: Callable[[np.ndarray, np.ndarray], object]) -> tuple[bytes, FooterSpan]:
    """A footer with changed tables and a checksum that fits."""
    tail, pack_bytes, _ = built(*EXAMPLES)
    footer = bytearray(tail[:-TRAILER_BYTES])
    head = packs._FOOTER.size
    entries = np.frombuffer(footer, packs._ENTRY, len(EXAMPLES), head)
    segments = np.frombuffer(footer, packs._SEGMENT, -1, head + entries.nbytes)
    change(entries, segments)
    span = read_trailer(tail, pack_bytes)
    return bytes(footer), replace(span, checksum=xxhash.xxh3_64_intdigest(footer))


def entry(
    number: int, field: str, value: int | bytes
) -> Callable[[np.ndarray, np.ndarray], object]:
    return lambda entries, _: entries[field].__setitem__(number, value)


def segment(
    number: int, field: str, value: int | bytes
) -> Callable[[np.ndarray, np.ndarray], object]:
    return lambda _, segments: segments[field].__setitem__(number, value)


LIES = {
    "unknown codec": (entry(0, "codec", 6), "not known"),
    "unknown kind": (segment(0, "kind", 3), "not known"),
    "reserved of an entry": (entry(1, "zero", b"\0\0\0\0\0\1"), "reserved"),
    "reserved of a segment": (segment(1, "zero", b"\1\0\0"), "reserved"),
    "no bytes": (entry(0, "raw_bytes", 0), "has"),
    "more bytes": (entry(0, "raw_bytes", 70_002), "segment 0 of 70002"),
    "too many bytes": (entry(0, "raw_bytes", (64 << 20) + 1), "raw length"),
    "half an element": (entry(2, "raw_bytes", 2 * MIB - 1), "whole elements"),
    "codec of other planes": (entry(2, "codec", Codec.ZSTD), "segments, not"),
    "too few segments": (entry(1, "segments", 2), "2 segments"),
    "too many segments": (entry(4, "segments", 2), "segments|use up"),
    "very many segments": (entry(0, "segments", (1 << 32) - 1), "segments, not"),
    "raw but shorter": (segment(0, "stored_bytes", 70_000), "segment 0"),
    "zstd and not shorter": (segment(1, "stored_bytes", MIB), "segment 0"),
    "zstd of nothing": (segment(1, "stored_bytes", 0), "segment 0"),
    "constant of two": (segment(2, "stored_bytes", 2), "segment 1"),
    "raw block with another kind": (segment(0, "kind", CONSTANT), "segment 0"),
    "place before the one before": (entry(1, "offset", HEADER_BYTES), "ends at"),
    "place in the header": (entry(0, "offset", 0), "ends at 16"),
    "gap": (entry(1, "offset", 70_048), "ends at 70032"),
    "not at 16": (entry(1, "offset", 70_033), "ends at 70032"),
    "place past 2^63": (entry(1, "offset", (1 << 64) - 16), "ends at 70032"),
    "runs into the footer": (segment(1, "stored_bytes", 1017), "ends at|footer begins"),
    "half a base": (entry(0, "has_base", 1), "half a base"),
    "base without a flag": (entry(4, "has_base", 0), "half a base"),
    "flag of two": (entry(4, "has_base", 2), "half a base"),
    "own base": (entry(4, "base", EXAMPLES[0].block.raw), "its own base"),
    "block twice": (entry(3, "block", EXAMPLES[0].block.raw), "twice"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_footer_is_refused_saying_where(lie: str) -> None:
    change, message = LIES[lie]
    footer, span = lying(change)
    with pytest.raises(PackInvalid, match=message):
        read_footer(footer, span, PACK)


def test_footer_of_another_pack_or_of_changed_bytes_is_refused() -> None:
    tail, pack_bytes, _ = built(*EXAMPLES)
    span = read_trailer(tail, pack_bytes)
    footer = tail[: span.length]
    with pytest.raises(PackInvalid, match="footer is of pack 0123"):
        read_footer(footer, span, PackId("f" * 32))
    with pytest.raises(PackInvalid, match="checksum"):
        read_footer(footer[:-1] + b"\x01", span, PACK)
    with pytest.raises(PackInvalid, match="footer of"):
        read_footer(footer[:-1], span, PACK)
    with pytest.raises(PackInvalid, match="footer begins"):
        read_footer(footer, replace(span, offset=span.offset + ALIGNMENT), PACK)
    for short in (footer[:8], footer + bytes(16), footer[:16] + b"\xff" * 8 + footer[24:]):
        lied = FooterSpan(span.offset, len(short), xxhash.xxh3_64_intdigest(short))
        with pytest.raises(PackInvalid):
            read_footer(short, lied, PACK)


def trailer(**changes: object) -> bytes:
    tail, _, _ = built(*EXAMPLES)
    names = ("offset", "length", "checksum", "version", "zero", "magic")
    fields = dict(zip(names, packs._TRAILER.unpack(tail[-TRAILER_BYTES:]), strict=True))
    return tail[:-TRAILER_BYTES] + packs._TRAILER.pack(*(fields | changes).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"NOTAPACK"}, "not a pack"),
        ({"version": 0}, "version 0"),
        ({"zero": 1}, "reserved 1"),
        ({"offset": 0}, "footer of"),
        ({"offset": 24}, "footer of"),
        ({"offset": 32}, "does not end"),
        ({"offset": (1 << 64) - 16}, "does not end"),
        ({"length": (1 << 64) - 1}, "footer of"),
        ({"length": 1 << 20}, "does not end"),
    ],
)
def test_lying_trailer_is_refused_saying_why(changes: dict[str, object], message: str) -> None:
    _, pack_bytes, _ = built(*EXAMPLES)
    with pytest.raises(PackInvalid, match=message):
        read_trailer(trailer(**changes), pack_bytes)


def test_file_too_short_or_too_long_to_be_a_pack_is_refused() -> None:
    tail, pack_bytes, _ = built(*EXAMPLES)
    for given, length in ((b"", 0), (tail[-8:], pack_bytes), (tail, 40), (tail, 1 << 40)):
        with pytest.raises(PackInvalid):
            read_trailer(given, length)
    for head in (b"", PACK_HEADER[:-1], bytes(16), PACK_HEADER[:12] + b"\1\0\0\0"):
        with pytest.raises(PackInvalid):
            check_header(head)
    check_header(PACK_HEADER + b"more")


def test_newer_pack_is_refused_naming_both_versions() -> None:
    _, pack_bytes, _ = built(*EXAMPLES)
    with pytest.raises(UnknownFormat, match="version 2; this weightyard reads up to 1"):
        read_trailer(trailer(version=2), pack_bytes)
    with pytest.raises(UnknownFormat, match="version 9"):
        check_header(PACK_HEADER[:8] + b"\x09\0\0\0\0\0\0\0")
