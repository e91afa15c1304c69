from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightyard.storage.hdfs import wire
from weightyard.storage.hdfs.protobuf import Malformed, parse_varint, varint
from weightyard.storage.hdfs.wire import BlockAccess, BlockToken, Packet

_TOKEN = BlockToken(b"who may" * 20, b"secret" * 4, "HDFS_BLOCK_TOKEN", "")
_UINT64 = st.integers(0, 2**64 - 1)
_FIELDS = st.binary(max_size=300)


def field(number: int, value: int | bytes) -> bytes:
    """A protobuf field, written a second time so that the parser meets bytes it did not make."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def response(
    status: int, first_offset: int = 0, text: bytes = b"", bad_datanode: bytes = b""
) -> bytes:
    checksum = field(1, 0) + field(2, 512)
    info = field(1, checksum) + field(2, first_offset)
    return field(1, status) + field(2, bad_datanode) + field(4, info) + field(5, text)


@given(_FIELDS, _FIELDS, st.text(max_size=200), st.text(max_size=200))
def test_a_token_survives_its_url_string(
    identifier: bytes, password: bytes, kind: str, service: str
) -> None:
    token = BlockToken(identifier, password, kind, service)
    assert BlockToken.from_url_string(token.to_url_string()) == token


def test_the_empty_token_of_a_cluster_without_tokens_is_understood() -> None:
    assert BlockToken.from_url_string("AAAAAA") == BlockToken()


def test_a_token_never_shows_in_logs() -> None:
    shown = (
        repr(_TOKEN)
        + repr(BlockAccess("BP-1", 1, 1, 1, _TOKEN))
        + str(BlockAccess("BP-1", 1, 1, 1, _TOKEN))
    )
    assert "secret" not in shown
    assert "who may" not in shown


@given(_UINT64)
def test_a_number_survives_its_encoding(value: int) -> None:
    encoded = varint(value)
    assert parse_varint(encoded + b"\xff", 0) == (value, len(encoded))


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(1, 2**24 - 4))
def test_a_packet_header_survives_its_encoding(offset: int, sequence: int, length: int) -> None:
    for packet in (Packet(offset, sequence, False, length), Packet(offset, sequence, True, 0)):
        header = wire.packet_header(packet)
        assert len(header) == wire.PACKET_HEADER_BYTES
        assert wire.parse_packet_lengths(header) == 0
        assert wire.parse_packet(header) == packet


@given(st.integers(0, 13), st.integers(0, 2**62), st.text(max_size=200), st.text(max_size=50))
def test_a_response_is_understood(status: int, first_offset: int, text: str, bad: str) -> None:
    parsed = wire.parse_response(response(status, first_offset, text.encode(), bad.encode()))
    assert parsed == wire.Response(status, text, bad, first_offset, 0)


def test_a_negative_block_id_goes_out_as_its_64_bits() -> None:
    request = wire.read_request(BlockAccess("BP-1", -1, 7, 10), "me", 0, 10)
    assert field(2, 2**64 - 1) in request


@pytest.mark.parametrize(
    ("sample", "parse"),
    [
        (response(1, 512, b"opReadBlock received exception"), wire.parse_response),
        (
            wire.packet_header(Packet(65536, 3, False, 65536)),
            lambda raw: (wire.parse_packet_lengths(raw), wire.parse_packet(raw)),
        ),
        (
            _TOKEN.to_url_string().encode(),
            lambda raw: BlockToken.from_url_string(raw.decode("latin-1")),
        ),
    ],
    ids=["response", "packet", "token"],
)
def test_ten_thousand_damaged_messages_give_nothing_but_malformed(
    sample: bytes, parse: Callable[[bytes], object]
) -> None:
    chance = random.Random(1)
    refused = 0
    for _ in range(10_000):
        raw = bytearray(sample)
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        if chance.random() < 0.3 and sample[:1] != b"\0":
            raw = raw[: chance.randrange(len(raw))] + chance.randbytes(wire.PACKET_HEADER_BYTES)
        try:
            parse(bytes(raw))
        except Malformed:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    "identifier",
    [
        field(1, 1_700_000_000_000) + field(2, 7) + field(3, b"me") + field(4, b"BP-1"),
        bytes((256 - 112 - 6,)) + (1_700_000_000_000).to_bytes(6, "big") + b"\x07\x02me",
    ],
    ids=["protobuf", "old"],
)
def test_ten_thousand_damaged_tokens_end_at_some_time_or_do_not_say(identifier: bytes) -> None:
    assert BlockToken(identifier).expires_s == 1_700_000_000
    chance = random.Random(1)
    said = 0
    for _ in range(10_000):
        raw = bytearray(identifier)
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        if chance.random() < 0.3:
            raw = raw[: chance.randrange(len(raw))]
        expires_s = BlockToken(bytes(raw)).expires_s
        assert expires_s is None or 0 <= expires_s < 2**64
        said += expires_s is not None
    assert 1000 < said < 10_000
