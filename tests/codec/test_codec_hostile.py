"""Bytes from a stranger: a typed error or the right length, and nothing else is touched."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from forge import PLANE_CODECS, decoded, forged, laid_out, planes_of, weights

from weightyard.codec import Encoded, check_encoding, encode, encode_delta
from weightyard.codec.arena import arena
from weightyard.codec.planes import split
from weightyard.errors import BlockCorrupt, YardError
from weightyard.format.block import (
    CHUNK_BYTES,
    MAX_BLOCK_BYTES,
    Codec,
    Encoding,
    Fold,
    Segment,
    SegmentKind,
    block_id,
)

MUTATIONS = 10_000
ALL_CODECS = [*PLANE_CODECS, Codec.ZSTD, Codec.RAW]

Forgery = tuple[Encoding, bytes]


def small_blocks(codec: Codec, with_base: bool) -> list[tuple[Encoded, bytes | None]]:
    blocks: list[tuple[Encoded, bytes | None]] = []
    for turn, length in enumerate((64, 512, 2048, 6000, 16384)):
        raw, base = (weights(codec, length // 8 * 8, seed) for seed in (turn, turn + 50))
        base = base[: length // 2] + raw[length // 2 : length // 8 * 8]
        if with_base:
            blocks.append((encode_delta(raw, base, block_id(base), hint=codec), base))
        else:
            blocks.append((encode(raw, hint=codec), None))
    return blocks


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        # Headers are where a decoder decides: hit them often.
        at = rng.randrange(min(len(changed), 24) if rng.random() < 0.5 else len(changed))
        changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def mutated(rng: random.Random, encoded: Encoded) -> Forgery:
    """A forged block: mostly with checksums that agree, so that the decoders themselves are hit."""
    encoding = encoded.encoding
    kinds = [segment.kind for segment in encoding.segments]
    stored = [bytes(data) for data in encoded.segments]
    index = rng.randrange(len(stored))
    match rng.randrange(12):
        case 0 | 1 | 2 | 3:
            stored[index] = flip(rng, stored[index])
        case 4:
            stored[index] = stored[index][: rng.randrange(len(stored[index]) + 1)]
        case 5:
            stored[index] += rng.randbytes(rng.randrange(1, 40))
        case 6:
            kinds[index] = rng.choice(list(SegmentKind))
        case 7:
            stored[index] = zstandard.compress(rng.randbytes(4) * rng.randrange(1, 5000))
            kinds[index] = SegmentKind.ZSTD
        case 8:
            other = rng.choice((0, 1, 8, encoding.raw_bytes - 8, encoding.raw_bytes + 8, 1 << 40))
            encoding = replace(encoding, raw_bytes=other)
        case 9:
            encoding = replace(encoding, codec=rng.choice(list(Codec)))
        case 10:
            other_index = rng.randrange(len(stored))
            stored[index], stored[other_index] = stored[other_index], stored[index]
        case 11:
            data = flip(rng, laid_out(stored))
            return encoding, data[: len(data) - rng.choice((0, 0, 1, 16, 17))]
    return forged(encoding, kinds, stored), laid_out(stored)


@pytest.mark.parametrize("codec", ALL_CODECS, ids=lambda codec: codec.name)
def test_ten_thousand_forgeries_give_typed_errors_only(codec: Codec) -> None:
    rng = random.Random(codec)
    blocks = small_blocks(codec, with_base=False) + small_blocks(codec, with_base=True)
    assert sum(encoded.encoding.codec is codec for encoded, _ in blocks) >= 6
    decoders_reached = 0
    for _ in range(MUTATIONS):
        encoded, base = rng.choice(blocks)
        encoding, stored = mutated(rng, encoded)
        try:
            check_encoding(encoding)
            if base is not None:
                base = base.ljust(encoding.raw_bytes, b"\0")[: encoding.raw_bytes]
            decoders_reached += 1
            decoded(encoding, stored, base=base)
        except YardError:
            continue
    assert decoders_reached > MUTATIONS // 4
    for encoded, base in blocks:
        decoded(encoded.encoding, laid_out(encoded.segments), base=base)


def test_ten_thousand_forgeries_are_refused_or_left_as_the_planes_of_what_they_decode_to() -> None:
    rng = random.Random(10)
    blocks = [
        encoded
        for codec in ALL_CODECS
        for with_base in (False, True)
        for encoded, _ in small_blocks(codec, with_base)
    ]
    left = 0
    for _ in range(MUTATIONS):
        encoding, stored = mutated(rng, rng.choice(blocks))
        try:
            check_encoding(encoding)
            found = planes_of(encoding, stored)
        except BlockCorrupt:
            found = None
        else:
            left += 1
        # Without its base a delta is decoded to the difference, whose planes are asked for.
        assert found == expected_planes(replace(encoding, base=None), stored)
    assert MUTATIONS // 20 < left < MUTATIONS // 2


def expected_planes(encoding: Encoding, stored: bytes) -> bytes | None:
    """None where `decode` refuses the block, which has one chunk at most."""
    try:
        check_encoding(encoding)
        raw = np.frombuffer(decoded(encoding, stored), np.uint8)
    except BlockCorrupt:
        return None
    if encoding.codec.planes == 1:
        return raw.tobytes()
    planes = np.empty((encoding.codec.planes, raw.size // encoding.codec.planes), np.uint8)
    arena.clear()
    split(encoding.codec, raw, list(planes), arena)
    return planes.tobytes()


CONTENT = b"weights " * 64


def frame(
    blocks: list[tuple[int, int, bytes]],
    *,
    content_bytes: int | None = len(CONTENT),
    window: int | None = None,
    dictionary: int = 0,
    checksum: bytes = b"",
) -> bytes:
    """A zstd frame by hand. Blocks are (type, size, payload), the last is marked as such."""
    single = window is None
    descriptor = (0xC0 if content_bytes is not None else 0) | single << 5
    descriptor |= bool(checksum) << 2 | (3 if dictionary else 0)
    head = b"\x28\xb5\x2f\xfd" + bytes([descriptor])
    head += b"" if window is None else bytes([window])
    head += struct.pack("<I", dictionary) if dictionary else b""
    head += b"" if content_bytes is None else struct.pack("<Q", content_bytes)
    body = b"".join(
        (size << 3 | kind << 1 | (at == len(blocks) - 1)).to_bytes(3, "little") + payload
        for at, (kind, size, payload) in enumerate(blocks)
    )
    return head + body + checksum


RAW_BLOCK = (0, len(CONTENT), CONTENT)
RIGHT_CHECKSUM = struct.pack("<I", xxhash.xxh64_intdigest(CONTENT) & 0xFFFFFFFF)
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
HONEST = zstandard.compress(CONTENT)


def as_only_segment(data: bytes) -> Forgery:
    """A block whose content a liar put into one zstd segment; long enough that any frame fits."""
    raw_bytes = len(CONTENT)
    segment = Segment(SegmentKind.ZSTD, len(data), 0)
    encoding = Encoding(block_id(CONTENT), raw_bytes, Codec.ZSTD, None, Fold(0, 0), (segment,))
    return forged(encoding, [SegmentKind.ZSTD], [data]), laid_out([data])


BOMB, BOMBS = (1, 1 << 17, b"x"), 120
"""A block of four bytes that becomes 128 KiB, and how many: 15 MiB, from less than CONTENT has."""

HOSTILE_FRAMES = {
    "a bomb that says so": frame([BOMB] * BOMBS, content_bytes=BOMBS << 17),
    "a bomb that says 2^60": frame([(1, 1 << 17, b"x")], content_bytes=1 << 60),
    "a bomb that says the right size": frame([BOMB] * BOMBS),
    "one byte too many": frame([(1, len(CONTENT) + 1, b"x")]),
    "one byte too few": frame([(1, len(CONTENT) - 1, b"x")]),
    "nothing in it": frame([(0, 0, b"")]),
    "no content size": frame([(1, len(CONTENT), b"x")], content_bytes=None, window=0),
    "a window of 2 GiB": frame([(1, len(CONTENT), b"x")], window=21 << 3),
    "a window of 2 MiB": frame([(1, len(CONTENT), b"x")], window=11 << 3),
    "a dictionary": frame([(1, len(CONTENT), b"x")], dictionary=7),
    "a wrong checksum": frame([(1, len(CONTENT), b"x")], checksum=b"\1\2\3\4"),
    "a checksum cut off": frame([(1, len(CONTENT), b"x")], checksum=b"\1\2"),
    "a reserved block": frame([(3, len(CONTENT), b"x")]),
    "a block past the end": frame([(2, 1 << 20, b"x")]),
    "a block header cut off": frame([(1, len(CONTENT), b"x")])[:-3],
    "no last block": frame([(1, 1, b"x"), (1, 1, b"x")])[:-4],
    "trailing bytes": HONEST + b"\0",
    "a second frame": HONEST + zstandard.compress(b""),
    "a skippable frame before": SKIPPABLE + HONEST,
    "a skippable frame after": HONEST + SKIPPABLE,
    "only a skippable frame": SKIPPABLE,
    "a skippable frame of the right size": SKIPPABLE[:4] + b"\0\2\0\0" + bytes(3) + bytes(200),
    "a header alone": HONEST[:6],
    "the magic alone": HONEST[:4],
    "a legacy magic": b"\x27" + HONEST[1:],
    "not zstd": b"PK\3\4" + bytes(40),
    "one byte": b"\x28",
}


@pytest.mark.parametrize("why", HOSTILE_FRAMES)
def test_a_hostile_frame_is_block_corrupt(why: str) -> None:
    with pytest.raises(BlockCorrupt):
        decoded(*as_only_segment(HOSTILE_FRAMES[why]))


@pytest.mark.parametrize(
    "data",
    [
        HONEST,
        frame([(1, 200, b"x"), (1, len(CONTENT) - 200, b"x")]),
        frame([(1, 1, b"x"), (0, 0, b""), (1, len(CONTENT) - 1, b"x")], window=10 << 3),
        zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT),
    ],
    ids=["plain", "two blocks", "an empty block", "a checksum"],
)
def test_a_frame_by_another_hand_is_read(data: bytes) -> None:
    assert decoded(*as_only_segment(data)) == zstandard.decompress(data)


def high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) * 1024


def test_hostile_frames_take_no_memory() -> None:
    forgeries = [as_only_segment(data) for data in HOSTILE_FRAMES.values()]
    rng = random.Random(9)
    blocks = [block for codec in PLANE_CODECS for block in small_blocks(codec, False)]
    forgeries += [mutated(rng, rng.choice(blocks)[0]) for _ in range(500)]

    def try_all() -> None:
        for encoding, stored in forgeries:
            try:
                check_encoding(encoding)
                decoded(encoding, stored)
            except YardError:
                continue

    try_all()
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    before = high_water_bytes()
    try_all()
    # The kernel counts pages for each core apart, and large ones at once.
    assert high_water_bytes() - before < (BOMBS << 17) / 2


def two_chunks(seed: int) -> Encoded:
    return encode(weights(Codec.PLANES_BF16, CHUNK_BYTES + 65536, seed), hint=Codec.PLANES_BF16)


def test_a_segment_is_accepted_only_in_its_own_place() -> None:
    same = bytes(range(256)) * (CHUNK_BYTES // 256)
    encoded = encode(same * 2, hint=Codec.RAW)
    first, second = encoded.encoding.segments
    assert encoded.segments[0] == encoded.segments[1]

    swapped = replace(encoded.encoding, segments=(second, first))
    with pytest.raises(BlockCorrupt):
        decoded(swapped, laid_out(encoded.segments))


def test_chunks_that_changed_places_are_refused() -> None:
    encoded = two_chunks(1)
    order = (2, 3, 0, 1)
    segments = tuple(encoded.encoding.segments[index] for index in order)
    stored = laid_out([encoded.segments[index] for index in order])

    with pytest.raises(BlockCorrupt):
        decoded(replace(encoded.encoding, segments=segments), stored)


def test_a_segment_of_another_block_is_refused() -> None:
    ours, theirs = two_chunks(1), two_chunks(2)
    for index in range(len(ours.segments)):
        segments, stored = list(ours.encoding.segments), list(ours.segments)
        segments[index], stored[index] = theirs.encoding.segments[index], theirs.segments[index]
        with pytest.raises(BlockCorrupt):
            decoded(replace(ours.encoding, segments=tuple(segments)), laid_out(stored))


def test_one_wrong_bit_anywhere_in_a_segment_is_found() -> None:
    for codec in ALL_CODECS:
        encoded = encode(weights(codec, 4096), hint=codec)
        stored = laid_out(encoded.segments)
        rng = random.Random(codec)
        for offset, segment in zip(
            encoded.encoding.offsets, encoded.encoding.segments, strict=False
        ):
            for at in {0, segment.stored_bytes - 1, rng.randrange(segment.stored_bytes)}:
                wrong = bytearray(stored)
                wrong[offset + at] ^= 1 << rng.randrange(8)
                with pytest.raises(BlockCorrupt):
                    decoded(encoded.encoding, bytes(wrong))


def edited(index: int, **changes: object) -> Callable[[Encoding], Encoding]:
    def edit(encoding: Encoding) -> Encoding:
        segments = list(encoding.segments)
        segments[index] = replace(segments[index], **changes)  # type: ignore[arg-type]
        return replace(encoding, segments=tuple(segments))

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        lambda e: replace(e, raw_bytes=-2),
        lambda e: replace(e, raw_bytes=MAX_BLOCK_BYTES + 2),
        lambda e: replace(e, raw_bytes=1 << 70),
        lambda e: replace(e, raw_bytes=0),
        lambda e: replace(e, raw_bytes=e.raw_bytes - 1),
        lambda e: replace(e, raw_bytes=e.raw_bytes + CHUNK_BYTES),
        lambda e: replace(e, codec=Codec.PLANES_FP32),
        lambda e: replace(e, codec=Codec.RAW),
        lambda e: replace(e, base=e.block),
        lambda e: replace(e, fold=Fold(1 << 64, 0)),
        lambda e: replace(e, fold=Fold(0, -1)),
        lambda e: replace(e, segments=e.segments[:-1]),
        lambda e: replace(e, segments=e.segments * 2),
        lambda e: replace(e, segments=()),
        edited(0, stored_bytes=0),
        edited(0, stored_bytes=-5),
        edited(0, stored_bytes=1 << 62),
        edited(0, stored_bytes=CHUNK_BYTES // 2),
        edited(0, kind=SegmentKind.CONSTANT),
        edited(0, kind=SegmentKind.RAW),
        edited(1, kind=SegmentKind.ZSTD),
        edited(1, stored_bytes=CHUNK_BYTES // 2 + 1),
        edited(3, stored_bytes=CHUNK_BYTES // 2),
        edited(3, checksum=1 << 64),
        edited(3, checksum=-1),
    ],
)
def test_an_encoding_that_contradicts_itself_is_refused_before_a_byte_is_read(
    edit: Callable[[Encoding], Encoding],
) -> None:
    encoded = two_chunks(3)
    check_encoding(encoded.encoding)
    wrong = edit(encoded.encoding)

    with pytest.raises(BlockCorrupt, match="its encoding has"):
        check_encoding(wrong)
    with pytest.raises(BlockCorrupt):
        decoded(wrong, laid_out(encoded.segments), out_bytes=encoded.encoding.raw_bytes)


def test_no_block_is_larger_than_the_format_allows() -> None:
    chunks = MAX_BLOCK_BYTES // CHUNK_BYTES
    segment = Segment(SegmentKind.RAW, CHUNK_BYTES, 0)
    name = block_id(b"large")
    largest = Encoding(name, MAX_BLOCK_BYTES, Codec.RAW, None, Fold(0, 0), (segment,) * chunks)
    one_more = replace(
        largest, raw_bytes=MAX_BLOCK_BYTES + CHUNK_BYTES, segments=(segment,) * (chunks + 1)
    )

    check_encoding(largest)
    with pytest.raises(BlockCorrupt, match="raw length"):
        check_encoding(one_more)


@pytest.mark.parametrize("codec", ALL_CODECS, ids=lambda codec: codec.name)
def test_stored_bytes_of_another_length_are_refused(codec: Codec) -> None:
    encoded = encode(weights(codec, CHUNK_BYTES + 8000), hint=codec)
    stored = laid_out(encoded.segments)
    padding = len(stored) - encoded.encoding.offsets[-2] - len(encoded.segments[-1])

    for wrong in (b"", stored[: len(stored) - padding - 1], stored + b"\0", stored[:-4096]):
        with pytest.raises(BlockCorrupt):
            decoded(encoded.encoding, wrong)
    decoded(encoded.encoding, stored[: len(stored) - padding])
