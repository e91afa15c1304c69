"""Floats as planes, by compiled code and by NumPy: the same bits either way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zstandard
from forge import PLANE_CODECS, laid_out, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from weightyard.codec import compiled, decode, encode
from weightyard.codec.arena import Bytes, arena
from weightyard.codec.planes import merge, split
from weightyard.format.block import Codec, SegmentKind


@pytest.fixture(params=["compiled", "numpy"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(compiled, "_functions", {})


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("codec", PLANE_CODECS)
def test_every_bit_pattern_survives_split_and_merge(codec: Codec) -> None:
    width = codec.planes
    tops = np.arange(1 << 16, dtype="<u8")
    low = np.random.default_rng(3).integers(0, 1 << 48, tops.size, dtype="<u8")
    raw = ((tops << 48 | low) >> (64 - 8 * width)).astype(f"<u{width}").view(np.uint8)
    planes = [np.empty(raw.size // width, np.uint8) for _ in range(width)]
    back = np.empty_like(raw)

    arena.clear()
    split(codec, raw, planes, arena)
    arena.clear()
    merge(codec, planes, back, arena)

    assert np.array_equal(back, raw)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("codec", PLANE_CODECS)
def test_constant_planes_merge_as_if_they_were_stored(codec: Codec) -> None:
    rng = np.random.default_rng(4)
    for constants in range(1 << codec.planes):
        values = [int(value) for value in rng.integers(0, 256, codec.planes)]
        full = [rng.integers(0, 256, 64, np.uint8) for _ in values]
        for plane, value in enumerate(values):
            if constants >> plane & 1:
                full[plane][:] = value
        short = [values[p] if constants >> p & 1 else full[p] for p in range(codec.planes)]
        expected, found = (np.empty(64 * codec.planes, np.uint8) for _ in range(2))
        for planes, out in ((full, expected), (short, found)):
            arena.clear()
            merge(codec, planes, out, arena)
        assert np.array_equal(found, expected)


def planes_by_the_book(codec: Codec, raw: bytes) -> list[bytes]:
    """docs/format.md §3, one element at a time."""
    width = codec.planes
    exponent_bits = {Codec.PLANES_BF16: 8, Codec.PLANES_FP32: 8, Codec.PLANES_FP64: 11}.get(codec)
    rows = []
    for at in range(0, len(raw), width):
        word = int.from_bytes(raw[at : at + width], "little")
        if exponent_bits is not None:
            low_bits = 8 * width - 1 - exponent_bits
            sign, rest = word >> (8 * width - 1), word & ((1 << (8 * width - 1)) - 1)
            exponent, mantissa = rest >> low_bits, rest & ((1 << low_bits) - 1)
            word = exponent << (low_bits + 1) | sign << low_bits | mantissa
        rows.append(word.to_bytes(width, "big"))
    return [bytes(column) for column in zip(*rows, strict=True)]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("codec", PLANE_CODECS)
def test_stored_segments_are_standard_frames_of_the_documented_planes(codec: Codec) -> None:
    raw = weights(codec, 48 * 1024)
    encoded = encode(raw, hint=codec)
    assert encoded.encoding.codec is codec

    kinds = [segment.kind for segment in encoded.encoding.segments]
    for kind, data, plane in zip(
        kinds, encoded.segments, planes_by_the_book(codec, raw), strict=True
    ):
        stored = bytes(data)
        assert plane == (zstandard.decompress(stored) if kind is SegmentKind.ZSTD else stored)
    assert SegmentKind.ZSTD in kinds


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("codec", [*PLANE_CODECS, Codec.ZSTD, Codec.RAW])
def test_memory_that_is_not_aligned_is_as_good(codec: Codec) -> None:
    raw = weights(codec, 96 * 1024)
    shifted = memoryview(b"\0" + raw)[1:]
    encoded = encode(shifted, hint=codec)
    stored = memoryview(b"\0\0\0" + laid_out(encoded.segments))[3:]
    memory = bytearray(len(raw) + 1)

    decode(encoded.encoding, stored, memoryview(memory)[1:])

    assert memory[1:] == raw


def both_ways(codec: Codec, raw: Bytes) -> Iterator[tuple[list[Bytes], Bytes]]:
    """The planes of these elements, and what they give back."""
    for is_compiled in (True, False):
        planes = [np.full(raw.size // codec.planes, 0xEE, np.uint8) for _ in range(codec.planes)]
        back = np.full(raw.size + 1, 0xEE, np.uint8)[1:]
        with pytest.MonkeyPatch.context() as patch:
            if not is_compiled:
                patch.setattr(compiled, "_functions", {})
            arena.clear()
            split(codec, raw, planes, arena)
            merge(codec, planes, back, arena)
        yield planes, back


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(PLANE_CODECS),
    st.one_of(st.integers(0, 200), st.integers(4000, 4200)),
    st.integers(0, 7),
    st.integers(0, 2**32),
)
def test_compiled_code_and_numpy_agree_wherever_the_elements_lie(
    codec: Codec, elements: int, shift: int, seed: int
) -> None:
    memory = np.frombuffer(np.random.default_rng(seed).bytes(elements * codec.planes + 8), np.uint8)
    raw = memory[shift : shift + elements * codec.planes]

    (planes, back), (expected, also_back) = both_ways(codec, raw)

    assert all(np.array_equal(*pair) for pair in zip(planes, expected, strict=True))
    assert np.array_equal(back, raw)
    assert np.array_equal(also_back, raw)


def test_compiled_code_is_not_let_near_memory_that_is_too_short_or_has_gaps() -> None:
    raw = np.zeros(64, np.uint8)
    fits, short = np.zeros(32, np.uint8), np.zeros(31, np.uint8)
    gaps = np.zeros(64, np.uint8)[::2]

    assert compiled.split(Codec.PLANES_BF16, raw, [fits, fits]) is compiled.is_there()
    assert not compiled.split(Codec.PLANES_BF16, raw, [fits, short])
    assert not compiled.split(Codec.PLANES_BF16, raw, [fits, gaps])
    assert not compiled.split(Codec.PLANES_BF16, raw, [fits])
    assert not compiled.merge(Codec.PLANES_BF16, [fits, fits], raw[:63])
    assert not compiled.split(Codec.RAW, raw, [raw])
