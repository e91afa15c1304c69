"""What goes into a codec comes out, bit for bit, in any run of chunks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from forge import PLANE_CODECS, came_back, decoded, laid_out, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from weightyard.codec import (
    decode,
    encode,
    encode_delta,
    fold,
    prove,
    room_for,
    verify,
    verify_whole,
)
from weightyard.errors import BlockCorrupt, Bug, Refused, TooLarge
from weightyard.format.block import (
    CHUNK_BYTES,
    MAX_BLOCK_BYTES,
    MIB,
    Codec,
    block_id,
)

LENGTHS = st.one_of(
    st.integers(0, 300),
    st.integers(0, 5000),
    st.integers(64 * 1024 - 9, 64 * 1024 + 9),
    st.integers(CHUNK_BYTES - 9, CHUNK_BYTES + 9),
    st.sampled_from([2 * CHUNK_BYTES - 8, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 24]),
)

SPECIAL_WORDS = {
    2: [0x0000, 0x8000, 0x0001, 0x007F, 0x7F80, 0xFF80, 0x7FC1, 0x7FFF, 0xFFFF, 0x3C00],
    4: [0x0, 0x80000000, 0x1, 0x7FFFFF, 0x7F800000, 0xFF800001, 0x7FC12345, 0xFFFFFFFF],
    8: [0x0, 1 << 63, 0x1, (1 << 52) - 1, 0x7FF << 52, (0xFFF << 52) | 1, (1 << 64) - 1],
}


@st.composite
def raw_blocks(draw: st.DrawFn) -> bytes:
    length, seed = draw(LENGTHS), draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    match draw(st.sampled_from(["bytes", "noise", "constant", "weights", "special", "halves"])):
        case "bytes":
            return draw(st.binary(max_size=400))
        case "noise":
            return rng.bytes(length)
        case "constant":
            return bytes([draw(st.integers(0, 255))]) * length
        case "weights":
            whole = weights(draw(st.sampled_from(PLANE_CODECS)), length + 8, seed)
            return whole[:length]
        case "special":
            width = draw(st.sampled_from([2, 4, 8]))
            words = np.array(SPECIAL_WORDS[width], f"<u{width}")
            return rng.choice(words, length // width + 1).tobytes()[:length]
        case _:
            return bytes(length // 2) + rng.bytes(length - length // 2)


@settings(max_examples=200, deadline=None)
@given(raw_blocks(), st.sampled_from(Codec))
def test_a_block_comes_back_bit_for_bit_under_every_hint(raw: bytes, hint: Codec) -> None:
    encoded = encode(raw, hint=hint)

    assert came_back(encoded) == raw
    assert encoded.encoding.block == block_id(raw)
    assert encoded.encoding.fold == fold(raw)
    assert encoded.stored_bytes == len(laid_out(encoded.segments)) <= len(raw) + 15
    verify(encoded.encoding, laid_out(encoded.segments))
    verify_whole(encoded.encoding, raw)
    prove(encoded, raw)


@settings(max_examples=100, deadline=None)
@given(raw_blocks(), st.integers(0, 2**32), st.floats(0, 1), st.sampled_from(Codec))
def test_a_delta_comes_back_bit_for_bit_under_every_hint(
    raw: bytes, seed: int, share: float, hint: Codec
) -> None:
    rng = np.random.default_rng(seed)
    change = rng.integers(0, 256, len(raw), np.uint8) * (rng.random(len(raw)) < share)
    base = (np.frombuffer(raw, np.uint8) ^ change.astype(np.uint8)).tobytes()
    if base == raw:
        return
    encoded = encode_delta(raw, base, block_id(base), hint=hint)

    assert came_back(encoded, base) == raw
    prove(encoded, raw, base=base)


@pytest.mark.parametrize("codec", [*PLANE_CODECS, Codec.ZSTD, Codec.RAW])
@pytest.mark.parametrize("with_base", [False, True])
def test_any_run_of_chunks_decodes_alone(codec: Codec, with_base: bool) -> None:
    raw, base = weights(codec, 3 * CHUNK_BYTES + 4096, 1), weights(codec, 3 * CHUNK_BYTES + 4096, 2)
    encoded = (
        encode_delta(raw, base, block_id(base), hint=codec)
        if with_base
        else encode(raw, hint=codec)
    )
    encoding, stored = encoded.encoding, laid_out(encoded.segments)

    for first in range(encoding.chunks + 1):
        for last in range(first, encoding.chunks + 1):
            start, length = encoding.chunk_span(first, last)
            piece = slice(first * CHUNK_BYTES, last * CHUNK_BYTES)
            run = decoded(
                encoding,
                stored[start : start + length],
                first=first,
                last=last,
                base=base[piece] if with_base else None,
                out_bytes=len(raw[piece]),
            )
            assert run == raw[piece]


def test_segments_of_a_raw_block_are_the_callers_memory() -> None:
    raw = np.frombuffer(np.random.default_rng(5).bytes(CHUNK_BYTES + 100), np.uint8)
    encoded = encode(raw, hint=Codec.PLANES_BF16)

    assert encoded.encoding.codec is Codec.RAW
    assert all(np.shares_memory(np.frombuffer(data, np.uint8), raw) for data in encoded.segments)


@pytest.mark.parametrize("codec", [Codec.PLANES_BF16, Codec.ZSTD])
def test_a_block_is_encoded_into_the_memory_given_unless_it_stays_raw(codec: Codec) -> None:
    for raw in (bytes(3 * MIB), os.urandom(3 * MIB)):
        room = np.full(room_for(len(raw), codec), 0xFF, np.uint8)
        inside, fresh = encode(raw, hint=codec, into=room), encode(raw, hint=codec)
        assert inside.encoding == fresh.encoding
        assert inside.stored == fresh.stored
        is_raw = inside.encoding.codec is Codec.RAW
        assert np.shares_memory(np.frombuffer(inside.stored, np.uint8), room) != is_raw


def test_a_raw_block_received_in_place_needs_only_its_check() -> None:
    raw = bytearray(np.random.default_rng(6).bytes(CHUNK_BYTES + 100))
    encoding = encode(bytes(raw), hint=Codec.RAW).encoding

    verify(encoding, raw)
    verify(encoding, memoryview(raw)[CHUNK_BYTES:], first_chunk=1)
    raw[CHUNK_BYTES + 3] ^= 1
    verify(encoding, memoryview(raw)[:CHUNK_BYTES], last_chunk=1)
    with pytest.raises(BlockCorrupt):
        verify(encoding, raw)


def test_threads_do_not_disturb_each_other() -> None:
    codecs = [*PLANE_CODECS, Codec.ZSTD] * 4

    def there_and_back(turn: int) -> bool:
        raw = weights(codecs[turn], 300_000, turn)
        base = weights(codecs[turn], 300_000, turn + 100)
        alone = encode(raw, hint=codecs[turn])
        delta = encode_delta(raw, base, block_id(base), hint=codecs[turn])
        return came_back(alone) == raw == came_back(delta, base)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, range(len(codecs))))


def test_a_change_made_by_the_codec_is_found_before_it_is_stored() -> None:
    raw, other = weights(Codec.PLANES_BF16, 8192, 1), weights(Codec.PLANES_BF16, 8192, 2)

    with pytest.raises(Bug):
        prove(encode(raw, hint=Codec.PLANES_BF16), other)


def test_arguments_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    raw = weights(Codec.PLANES_BF16, 8192)
    base = weights(Codec.PLANES_BF16, 8192, 1)
    alone = encode(raw, hint=Codec.PLANES_BF16)
    delta = encode_delta(raw, base, block_id(base), hint=Codec.PLANES_BF16)
    stored, stored_delta = laid_out(alone.segments), laid_out(delta.segments)
    out = bytearray(8192)

    for bad in (bytearray(8191), bytearray(8193), bytes(8192)):
        with pytest.raises(Refused):
            decode(alone.encoding, stored, bad)
    for chunks in ((0, 2), (-1, 1), (1, 0)):
        with pytest.raises(Refused):
            decode(alone.encoding, stored, out, first_chunk=chunks[0], last_chunk=chunks[1])
    with pytest.raises(Refused, match="give its base"):
        decode(delta.encoding, stored_delta, out)
    with pytest.raises(Refused, match="no base"):
        decode(alone.encoding, stored, out, base=base)
    with pytest.raises(Refused):
        decode(delta.encoding, stored_delta, out, base=base[:-2])
    with pytest.raises(Refused, match="in the output"):
        decode(delta.encoding, stored_delta, out, base=out)
    assert out == bytes(8192)
    with pytest.raises(Refused, match="same length"):
        encode_delta(raw, base[:-2], block_id(base[:-2]))
    with pytest.raises(Refused, match="own base"):
        encode_delta(raw, raw, block_id(raw))
    with pytest.raises(TooLarge):
        encode(bytes(MAX_BLOCK_BYTES + 1))


def test_a_chunk_of_a_delta_read_alone_is_accepted_only_as_itself() -> None:
    raw, base = weights(Codec.RAW, 2 * CHUNK_BYTES, 1), weights(Codec.RAW, 2 * CHUNK_BYTES, 2)
    encoded = encode_delta(raw, base, block_id(base), hint=Codec.RAW)
    stored, behind = laid_out(encoded.segments), base[CHUNK_BYTES:]

    def second(chunk: bytes) -> bytes:
        return decoded(encoded.encoding, chunk, first=1, base=behind, out_bytes=CHUNK_BYTES)

    assert second(stored[CHUNK_BYTES:]) == raw[CHUNK_BYTES:]
    with pytest.raises(BlockCorrupt):
        second(stored[:CHUNK_BYTES])


def test_a_delta_over_the_wrong_base_is_never_handed_out() -> None:
    raw, base = (
        weights(Codec.PLANES_FP32, 65536, 1),
        bytearray(weights(Codec.PLANES_FP32, 65536, 2)),
    )
    delta = encode_delta(raw, base, block_id(base), hint=Codec.PLANES_FP32)
    base[777] ^= 4

    with pytest.raises(BlockCorrupt):
        came_back(delta, bytes(base))
