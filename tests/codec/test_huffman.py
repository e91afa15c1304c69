"""Huffman coding by compiled code: frames that any zstd reads, or none; and reading them again."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import zstandard
from forge import guarded, weights
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightyard.codec import compiled, encode, frames
from weightyard.codec.arena import Bytes
from weightyard.codec.compiled import HuffmanCoder, decode_huffman
from weightyard.codec.decoder import prove
from weightyard.codec.frames import compress_noise, compress_noise_by_zstd, zstd
from weightyard.errors import BlockCorrupt
from weightyard.format.block import CHUNK_BYTES, KIB, Codec

BLOCK_BYTES = 128 * KIB
coder = HuffmanCoder()

pytestmark = pytest.mark.skipif(not compiled.is_there(), reason="no compiler, no compiled code")


def drawn(length: int, symbols: list[int], skew: float, seed: int) -> Bytes:
    """Bytes of these symbols, each the rarer the later it stands."""
    rng = np.random.default_rng(seed)
    shares = np.exp(-skew * np.arange(len(symbols)))
    return rng.choice(np.array(symbols, np.uint8), length, p=shares / shares.sum())


def require_whole(data: Bytes) -> None:
    frame = coder.frame(data.data)
    if frame is None:
        return
    stored = bytes(frame)
    assert len(stored) < data.size
    assert zstd.decompress(stored) == data.tobytes()
    with guarded(data.size) as back:
        assert decode_huffman(memoryview(stored), back)
        assert back == data.data


lengths = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([BLOCK_BYTES, 2 * BLOCK_BYTES, CHUNK_BYTES - 1025]).flatmap(
        lambda border: st.integers(border - 1025, border + 1025)
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    lengths,
    st.lists(st.integers(0, 255), min_size=1, max_size=256, unique=True),
    st.floats(0, 3),
    st.integers(0, 2**32),
)
@example(CHUNK_BYTES, list(range(256)), 0.02, 0)
@example(CHUNK_BYTES, list(range(255, -1, -1)), 1.0, 0)
@example(CHUNK_BYTES, [0, 255], 0.0, 0)
@example(CHUNK_BYTES, [*range(130, 90, -1), 0], 0.1, 0)
@example(CHUNK_BYTES, [0, *range(192, 256)], 0.1, 0)
@example(CHUNK_BYTES, [0, *range(191, 256)], 0.1, 0)
@example(2000, [128, 127], 0.0, 0)
@example(2000, [129, 1], 0.0, 0)
def test_any_zstd_reads_back_what_was_coded_and_so_do_we(
    length: int, symbols: list[int], skew: float, seed: int
) -> None:
    require_whole(drawn(length, symbols, skew, seed))


def test_frequencies_as_uneven_as_can_be_still_have_codes_short_enough() -> None:
    counts = [1, 1]
    while sum(counts) < CHUNK_BYTES // 2:  # Fibonacci's make the deepest trees
        counts.append(counts[-1] + counts[-2])
    data = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    np.random.default_rng(6).shuffle(data)
    assert coder.frame(data.data) is not None
    require_whole(data)


@pytest.mark.parametrize("symbol", [0, 60, 200, 255])
def test_a_symbol_that_occurs_once_where_no_sample_looks_is_there_afterwards(symbol: int) -> None:
    data = drawn(CHUNK_BYTES // 2, list(range(110, 125)), 0.5, 7)
    for at in (0, 700, BLOCK_BYTES - 1, data.size - 1):
        one = data.copy()
        one[at] = symbol
        assert coder.frame(one.data) is not None
        require_whole(one)


@pytest.mark.parametrize("zeros", [0, 1e-5, 0.01, 0.3])
def test_exponents_take_about_what_zstd_itself_makes_of_them(zeros: float) -> None:
    rng = np.random.default_rng(8)
    values = rng.normal(0, 0.02, CHUNK_BYTES // 2).astype("<f4")
    values[rng.random(values.size) < zeros] = 0
    exponents = (values.view("<u4") >> 23).astype(np.uint8)
    frame = coder.frame(exponents.data)
    assert frame is not None
    assert len(frame) < 1.005 * len(zstandard.ZstdCompressor(level=1).compress(exponents.data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"ab" * 20,
        bytes(4096),
        np.random.default_rng(9).bytes(CHUNK_BYTES),
        b"ab" * CHUNK_BYTES,
    ],
    ids=["nothing", "too short", "one value", "noise", "more than a chunk"],
)
def test_what_is_not_for_this_coder_is_left_to_zstd(data: bytes) -> None:
    assert coder.frame(memoryview(data)) is None
    assert zstd.decompress(bytes(compress_noise(memoryview(data)))) == data


def test_bytes_that_change_while_they_are_coded_do_no_harm() -> None:
    data = drawn(CHUNK_BYTES, list(range(20)), 0.3, 10)
    done = threading.Event()

    def change() -> None:
        rng = np.random.default_rng(11)
        while not done.is_set():
            data[rng.integers(0, data.size, 4096)] = rng.integers(0, 256, 4096, np.uint8)
            data[:] = drawn(CHUNK_BYTES, list(range(20)), 0.3, 10)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            frame = coder.frame(data.data)
            assert frame is None or len(frame) < data.size
    finally:
        done.set()
        thread.join()
    require_whole(data)


def kinds_of_frames() -> list[bytes]:
    """Trees described plainly and by codes, streams short and long, two blocks."""
    shapes = [
        (64, [1, 2, 3], 1.0),
        (700, list(range(100, 128)), 0.3),
        (3000, list(range(256)), 0.02),
        (5000, [0, 200, 255], 1.0),
        (BLOCK_BYTES + 900, list(range(110, 135)), 0.6),
    ]
    made = []
    for shape in shapes:
        frame = coder.frame(drawn(*shape, seed=12).data)
        assert frame is not None, "the coder overwrites it with the next"
        made.append(bytes(frame))
    return made


def content_bytes(frame: bytes) -> int:
    return int.from_bytes(frame[5:9], "little")


def require_what_zstd_says(frame: bytes, length: int) -> bool:
    """Returns whether the frame was decoded here."""
    with guarded(length) as ours:
        if not decode_huffman(memoryview(frame), ours):
            return False
        theirs = bytearray(length)
        frames.decompress_by_zstd(memoryview(frame), memoryview(theirs))
        assert ours == theirs
    return True


def test_ten_thousand_changed_frames_are_left_to_zstd_or_decoded_as_it_does() -> None:
    rng = np.random.default_rng(13)
    decoded = 0
    honest = kinds_of_frames()
    assert all(require_what_zstd_says(frame, content_bytes(frame)) for frame in honest)
    for turn in range(10_000):
        changed = bytearray(honest[turn % len(honest)])
        length = content_bytes(changed)
        for _ in range(rng.integers(1, 4)):
            reach = min(len(changed), int(rng.choice([20, 150, len(changed)])))
            changed[rng.integers(0, reach)] ^= 1 << rng.integers(0, 8)
        match rng.integers(0, 8):
            case 0:
                del changed[rng.integers(0, len(changed)) :]
            case 1:
                changed += rng.bytes(rng.integers(1, 9))
        decoded += require_what_zstd_says(bytes(changed), length)
    assert 0 < decoded < 5000  # a bit that changed among the codes is for checksums to find


def test_a_frame_that_is_cut_off_anywhere_is_an_error() -> None:
    for frame in kinds_of_frames()[:4]:
        for length in range(len(frame)):
            with guarded(content_bytes(frame)) as out, pytest.raises(BlockCorrupt):
                frames.decompress_into(memoryview(frame)[:length], out)


def test_frames_of_zstd_itself_are_decoded_all_the_same() -> None:
    data = drawn(300_000, list(range(100, 130)), 0.4, 14)
    made = [
        compress_noise_by_zstd(data.data),
        zstandard.compress(data.data, 3),
        zstd.compress(data),
    ]
    for frame in made:
        with guarded(data.size) as out:
            frames.decompress_into(memoryview(frame), out)
            assert out == data.data


def test_output_that_is_too_long_or_may_not_be_written_is_left_alone() -> None:
    frame = kinds_of_frames()[1]
    for length in (content_bytes(frame) - 1, content_bytes(frame) + 1):
        with guarded(length) as out:
            assert not decode_huffman(memoryview(frame), out)
    assert not decode_huffman(memoryview(frame), memoryview(bytes(content_bytes(frame))))


def test_what_is_stored_was_read_by_zstd_and_not_by_ourselves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = weights(Codec.PLANES_BF16, CHUNK_BYTES)
    encoded = encode(raw, hint=Codec.PLANES_BF16)

    def ours(frame: memoryview, out: memoryview) -> bool:
        raise AssertionError("decoded by the code that is to be proved")

    monkeypatch.setattr(frames, "decode_huffman", ours)
    prove(encoded, raw)
