"""Locations as a service tells them: the same on the other side, whatever is sent instead."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from typing import Any

import pytest
from hostile import ROUNDS, changed_json, growing_at_most
from hypothesis import given
from hypothesis import strategies as st

from weightyard.errors import RegistryUnavailable
from weightyard.storage.hdfs import located
from weightyard.storage.hdfs.located import from_json, to_json
from weightyard.storage.hdfs.protobuf import varint
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.hdfs.wire import BlockAccess, BlockToken
from weightyard.storage.store import Location, Replica, Span, StorePath

TOKEN = BlockToken(b"\x8a" + bytes(6) + b"rest", b"password", "HDFS_BLOCK_TOKEN", "")
ACCESS = BlockAccess("BP-1", 2**62, 1001, 70, TOKEN)
REPLICAS = (
    Replica("10.0.0.1:9866", "dn1.example", "/hall/a"),
    Replica("[::1]:9866", "dn2.example", "/hall/b", "decommissioning"),
)
PACK = Location(StorePath("packs/0a/0a0a"), 70, (Span(0, 70, REPLICAS, ACCESS),))
EMPTY = Location(StorePath("yard.json"), 0, ())
CODED = Location(StorePath("packs/0b/0b0b"), 7, (Span(0, 3, REPLICAS), Span(3, 4, ())))


def test_what_is_told_is_what_was_known() -> None:
    found = from_json(to_json("5f", [PACK, EMPTY, CODED]))
    assert found.stamp == "5f"
    assert found.locations == {one.path: one for one in (PACK, EMPTY, CODED)}
    told = [span.access for span in found.locations[PACK.path].spans]
    assert told == [ACCESS]
    assert [span.access for span in found.locations[CODED.path].spans] == [None, None]


def test_a_reader_that_goes_by_host_names_is_told_them() -> None:
    found = from_json(to_json("5f", [PACK]), uses_hostname=True)
    (span,) = found.locations[PACK.path].spans
    assert [one.datanode for one in span.replicas] == ["dn1.example:9866", "dn2.example:9866"]


def _changed(where: str, value: Any) -> bytes:
    answer = json.loads(to_json("5f", [PACK]))
    *path, last = where.split(".")
    inner = answer
    for step in path:
        inner = inner[int(step) if step.isdecimal() else step]
    inner[last] = value
    return json.dumps(answer).encode()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("stamp", "../x"),
        ("stamp", ""),
        ("files", {}),
        ("files.0.path", "../../etc/passwd"),
        ("files.0.path", "/packs/0a/0a0a"),
        ("files.0.bytes", 71),
        ("files.0.bytes", -1),
        ("files.0.spans.0.offset", 1),
        ("files.0.spans.0.length", 2**70),
        ("files.0.spans.0.block.id", -5),
        ("files.0.spans.0.block.token", "A" * 40_000),
        ("files.0.spans.0.block.token", "!"),
        ("files.0.spans.0.block.pool", "two words"),
        ("files.0.spans.0.replicas.0.datanode", "no-port"),
        ("files.0.spans.0.replicas.0.host", ""),
        ("files.0.spans.0.replicas", [None]),
    ],
)
def test_what_no_service_would_say_is_refused_and_no_token_repeated(
    where: str, value: object
) -> None:
    with pytest.raises(RegistryUnavailable, match="locations from the service") as caught:
        from_json(_changed(where, value))
    assert TOKEN.to_url_string() not in str(caught.value)


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(RegistryUnavailable):
        from_json(noise)


def test_changed_locations_are_refused_or_followed_from_begin_to_end() -> None:
    chance = random.Random(5)
    text = to_json("5f", [PACK, EMPTY, CODED])
    refusals = []
    with growing_at_most(kib=64 * 1024):
        for _ in range(ROUNDS):
            try:
                found = from_json(changed_json(text, chance))
            except RegistryUnavailable as why:
                refusals.append(str(why))
                continue
            for one in found.locations.values():
                *begins, end = accumulate((span.length for span in one.spans), initial=0)
                assert [span.offset for span in one.spans] == begins
                assert one.length == end
            assert from_json(to_json(found.stamp, found.locations.values())) == found
    assert ROUNDS / 2 < len(refusals) < ROUNDS
    assert not any(TOKEN.to_url_string() in said for said in refusals)


def test_the_schema_names_every_field() -> None:
    answer = json.loads(to_json("5f", [PACK]))
    schema = located.schema()
    assert set(answer) == set(schema["required"])
    file = schema["properties"]["files"]["items"]
    assert set(answer["files"][0]) == set(file["required"])
    span = file["properties"]["spans"]["items"]
    assert set(answer["files"][0]["spans"][0]) == set(span["required"])
    block = span["properties"]["block"]["anyOf"][0]
    assert set(answer["files"][0]["spans"][0]["block"]) == set(block["required"])


@pytest.mark.parametrize(
    ("identifier", "expires_s"),
    [
        (b"\x8a" + (1_800_000_000_123).to_bytes(6, "big") + b"\x05bob", 1_800_000_000.123),
        (b"\x08" + varint(1_800_000_000_123) + b"\x10\x05", 1_800_000_000.123),
        (b"", None),
        (b"\x00", None),
        (b"\x8a\x01", None),
        (b"\x90abc", None),
        (b"\x10\x05", None),
        (b"\x08", None),
        (b"\x0a\xff\xff", None),
    ],
)
def test_a_token_says_when_it_ends_in_either_encoding(
    identifier: bytes, expires_s: float | None
) -> None:
    assert BlockToken(identifier).expires_s == expires_s


def test_a_store_with_a_locator_opens_where_there_is_no_namenode_and_no_kerberos() -> None:
    class Told:
        def locate(self, path: StorePath, deadline: object) -> Location:
            return PACK

    with HdfsStore("hdfs://nobody-knows/yard", locator=Told()) as store:
        assert store.locate(PACK.path) is PACK
