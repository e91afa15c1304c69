"""What the encoder decides by measuring: small where it pays, raw where it does not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from forge import DTYPES, came_back, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from weightyard.codec import Encoded, encode, encode_delta, estimate, worth_a_delta
from weightyard.format.block import CHUNK_BYTES, Codec, SegmentKind, block_id
from weightyard.format.dtypes import DType, codec_hint
from weightyard.format.pack import PackBuilder
from weightyard.names import PackId

BLOCK_BYTES = 2 * CHUNK_BYTES


def kept(encoded: Encoded) -> float:
    return encoded.stored_bytes / encoded.encoding.raw_bytes


def kinds_of_planes(encoded: Encoded) -> list[set[SegmentKind]]:
    planes = encoded.encoding.codec.planes
    kinds = [segment.kind for segment in encoded.encoding.segments]
    return [set(kinds[plane::planes]) for plane in range(planes)]


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (Codec.PLANES_BF16, 0.667),
        (Codec.PLANES_FP16, 0.87),
        (Codec.PLANES_FP32, 0.84),
        (Codec.PLANES_FP64, 0.90),
        (Codec.ZSTD, 0.68),
    ],
)
def test_weights_shrink_to_what_the_documentation_says(codec: Codec, most: float) -> None:
    encoded = encode(weights(codec, BLOCK_BYTES), hint=codec)

    assert encoded.encoding.codec is codec
    assert kept(encoded) <= most


def test_only_the_exponents_are_compressed_and_the_mantissas_stay_as_they_are() -> None:
    encoded = encode(weights(Codec.PLANES_FP32, BLOCK_BYTES), hint=Codec.PLANES_FP32)

    raw, zstd = {SegmentKind.RAW}, {SegmentKind.ZSTD}
    assert kinds_of_planes(encoded) == [zstd, raw, raw, raw]


def test_fp32_that_holds_bf16_values_costs_what_bf16_costs() -> None:
    values = np.frombuffer(weights(Codec.PLANES_BF16, BLOCK_BYTES // 2), ml_dtypes.bfloat16)
    encoded = encode(values.astype("<f4").tobytes(), hint=Codec.PLANES_FP32)

    assert kinds_of_planes(encoded)[2:] == [{SegmentKind.CONSTANT}] * 2
    assert kept(encoded) <= 0.334


@pytest.mark.parametrize("codec", [Codec.PLANES_BF16, Codec.PLANES_FP64, Codec.ZSTD])
def test_a_block_of_one_value_is_a_few_bytes(codec: Codec) -> None:
    encoded = encode(bytes(BLOCK_BYTES), hint=codec)

    assert encoded.stored_bytes == 16 * len(encoded.segments)
    assert came_back(encoded) == bytes(BLOCK_BYTES)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.RAW])
@pytest.mark.parametrize("length", [1 << 16, BLOCK_BYTES, BLOCK_BYTES + 8])
def test_noise_is_left_raw_and_grows_by_less_than_a_thousandth(codec: Codec, length: int) -> None:
    encoded = encode(np.random.default_rng(1).bytes(length), hint=codec)

    assert encoded.encoding.codec is Codec.RAW
    assert kept(encoded) < 1.001


@settings(max_examples=12)
@given(
    st.sampled_from(DType),
    st.sampled_from([1 << 16, 135_000, CHUNK_BYTES, 2 * CHUNK_BYTES]),
    st.integers(-8, 8),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_no_block_of_random_bytes_takes_more_than_the_page_says(
    dtype: DType, near: int, more: int, seed: int, is_delta: bool
) -> None:
    raw, base = (np.random.default_rng(seed + turn).bytes(near + more) for turn in (0, 1))
    hint = codec_hint(dtype)
    encoded = (
        encode_delta(raw, base, block_id(base), hint=hint) if is_delta else encode(raw, hint=hint)
    )
    builder = PackBuilder(PackId.new())
    without = builder.pack_bytes
    builder.add(encoded.encoding)
    taken = builder.pack_bytes - without

    assert encoded.stored_bytes <= len(raw) + 15 <= 1.001 * len(raw)
    assert taken <= len(raw) + 15 + 104 + 16 * encoded.encoding.chunks
    assert taken <= 1.001 * len(raw) or len(raw) < 135_000


def test_a_block_of_one_byte_takes_sixteen() -> None:
    for codec in Codec:
        assert encode(b"x", hint=codec).stored_bytes == 16


def test_a_block_that_would_hardly_shrink_is_left_raw() -> None:
    values = np.random.default_rng(2).integers(0, 246, BLOCK_BYTES, np.uint8)  # about 0.993 of it
    nearly = np.random.default_rng(2).normal(0, 50, BLOCK_BYTES).astype(np.int8)  # about 0.96

    assert encode(values, hint=Codec.ZSTD).encoding.codec is Codec.RAW
    assert encode(nearly, hint=Codec.ZSTD).encoding.codec is Codec.RAW


def test_one_plane_that_shrinks_does_not_make_a_block_worth_encoding() -> None:
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, BLOCK_BYTES, np.uint8)
    raw[1::2] = rng.normal(128, 38, BLOCK_BYTES // 2).astype(np.uint8)  # 0.92, the block 0.96
    assert encode(raw, hint=Codec.PLANES_FP16).encoding.codec is Codec.RAW

    raw[1::2] = rng.normal(128, 10, BLOCK_BYTES // 2).astype(np.uint8)
    assert encode(raw, hint=Codec.PLANES_FP16).encoding.codec is Codec.PLANES_FP16


def test_a_compressible_half_is_seen_wherever_it_lies() -> None:
    noise = np.random.default_rng(3).bytes(BLOCK_BYTES)
    soft = weights(Codec.PLANES_BF16, BLOCK_BYTES)

    for raw in (noise + soft, soft + noise):
        encoded = encode(raw, hint=Codec.PLANES_BF16)
        assert encoded.encoding.codec is Codec.PLANES_BF16
        assert kept(encoded) < 0.84


def test_a_hint_whose_width_does_not_divide_the_length_is_not_used() -> None:
    raw = weights(Codec.ZSTD, BLOCK_BYTES - 1)

    for hint in (Codec.PLANES_BF16, Codec.PLANES_FP32, Codec.PLANES_FP64):
        assert encode(raw, hint=hint).encoding.codec is Codec.ZSTD


def test_two_values_in_random_order_take_a_bit_each() -> None:
    values = np.random.default_rng(1).choice(np.array([0x3F80, 0x4000], "<u2"), BLOCK_BYTES // 2)
    encoded = encode(values.tobytes(), hint=Codec.PLANES_BF16)

    half_of_the_bytes, a_bit = 0.5, 1 / 8
    assert kept(encoded) <= 1.01 * half_of_the_bytes * a_bit
    assert came_back(encoded) == values.tobytes()


def test_text_and_numbers_each_get_what_suits_them() -> None:
    ids = np.random.default_rng(4).integers(0, 50_000, BLOCK_BYTES // 8).astype("<i8").tobytes()
    letters = np.random.default_rng(5).integers(97, 123, (500, 7), np.uint8)
    words = [bytes(word) for word in letters]
    text = b" ".join(words[pick] for pick in np.random.default_rng(6).integers(0, 500, 200_000))

    assert kept(encode(ids)) < 0.26
    assert kept(encode(text)) < 0.33


def changed(raw: bytes, codec: Codec, how: str) -> bytes:
    values = np.frombuffer(raw, DTYPES[codec]).astype(np.float64)
    rng = np.random.default_rng(7)
    match how:
        case "all values a little":
            values *= 1 + rng.normal(0, 1e-3, values.size)
        case "some rows":
            rows = values.reshape(-1, 1024)
            picked = rng.choice(len(rows), len(rows) // 100, replace=False)
            rows[picked] += rng.normal(0, 0.01, (len(picked), 1024))
    return values.astype(DTYPES[codec]).tobytes()


@pytest.mark.parametrize(
    ("codec", "how", "most"),
    [
        (Codec.PLANES_BF16, "all values a little", 0.02),
        (Codec.PLANES_BF16, "some rows", 0.01),
        (Codec.PLANES_FP32, "all values a little", 0.60),
        (Codec.PLANES_FP32, "some rows", 0.012),
    ],
)
def test_a_delta_of_a_small_change_is_small(codec: Codec, how: str, most: float) -> None:
    base = weights(codec, BLOCK_BYTES)
    raw = changed(base, codec, how)
    delta = encode_delta(raw, base, block_id(base), hint=codec)

    assert kept(delta) <= most
    assert worth_a_delta(delta.stored_bytes, encode(raw, hint=codec).stored_bytes)
    assert came_back(delta, base) == raw


@pytest.mark.parametrize("codec", [Codec.PLANES_BF16, Codec.PLANES_FP32, Codec.PLANES_FP64])
@pytest.mark.parametrize("how", ["all values a little", "some rows"])
def test_what_a_block_will_take_can_be_told_before_it_is_encoded(codec: Codec, how: str) -> None:
    base = weights(codec, BLOCK_BYTES)
    raw = changed(base, codec, how)
    whole = encode(raw, hint=codec).stored_bytes
    delta = encode_delta(raw, base, block_id(base), hint=codec).stored_bytes
    told = estimate(raw, hint=codec), estimate(raw, hint=codec, base=base)

    assert told[0] == pytest.approx(whole, rel=0.02)
    assert told[1] == pytest.approx(delta, abs=0.2 * len(raw))  # of a few rows it sees fewer still
    assert worth_a_delta(told[1], told[0]) == worth_a_delta(delta, whole)
    assert estimate(raw, hint=Codec.RAW, base=base) == len(raw)
    assert estimate(b"", hint=codec) == 0


def test_a_delta_to_something_else_altogether_is_not_worth_it() -> None:
    raw, base = (weights(Codec.PLANES_BF16, BLOCK_BYTES, seed) for seed in (1, 2))
    delta = encode_delta(raw, base, block_id(base), hint=Codec.PLANES_BF16)

    whole = encode(raw, hint=Codec.PLANES_BF16)
    assert not worth_a_delta(delta.stored_bytes, whole.stored_bytes)
    assert kept(delta) < 1.001
