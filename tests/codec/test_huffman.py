"""Huffman coding by compiled code: frames that any zstd reads, or none."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightyard.codec import compiled
from weightyard.codec.arena import Bytes
from weightyard.codec.compiled import HuffmanCoder
from weightyard.codec.frames import compress_noise, decompress_into, zstd
from weightyard.format.block import CHUNK_BYTES, KIB

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
    stored, back = bytes(frame), np.zeros_like(data)
    assert len(stored) < data.size
    decompress_into(memoryview(stored), back.data)
    assert np.array_equal(back, data)
    assert zstd.decompress(stored) == data.tobytes()


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
@example(2000, [128, 127], 0.0, 0)
@example(2000, [129, 1], 0.0, 0)
def test_any_zstd_reads_back_what_was_coded(
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


def test_exponents_take_about_what_zstd_itself_makes_of_them() -> None:
    values = np.random.default_rng(8).normal(0, 0.02, CHUNK_BYTES // 2).astype("<f4")
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
