"""Ten thousand changed inputs for each parser: a typed refusal or a right answer, within memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
import xxhash
import zstandard
from format_examples import fake_ids, safetensors_file, small_manifest
from hostile import ROUNDS, changed_bytes, changed_json, growing_at_most
from test_pack import EXAMPLES, PACK, built

from weightyard.errors import PackInvalid, YardError
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.manifest import check, decode
from weightyard.format.pack import (
    TRAILER_BYTES,
    FooterSpan,
    entry_bytes,
    read_entry,
    read_footer,
    read_trailer,
)
from weightyard.format.safetensors import Header, parse_header
from weightyard.format.splitting import split_safetensors
from weightyard.names import FilePath


@pytest.fixture(autouse=True)
def memory_stays_bounded() -> Iterator[None]:
    with growing_at_most(kib=64 * 1024):
        yield


def test_changed_headers_are_odd_or_split_into_a_right_manifest() -> None:
    chance = random.Random(1)
    data = safetensors_file(
        [
            ("a", DType.F32, (2, 3)),
            ("b", DType.BF16, (0,)),
            ("c", DType.F4, (4,)),
            ("d", DType.I64, ()),
        ]
    )
    end = 8 + int.from_bytes(data[:8], "little")
    good = 0
    for _ in range(ROUNDS):
        text = changed_json(data[8:end], chance)
        length = chance.choice((len(text), len(text), len(text), chance.getrandbits(64)))
        file = length.to_bytes(8, "little") + text + data[end:]
        header = parse_header(file, len(file))
        if isinstance(header, Header):
            good += 1
            split = split_safetensors(FilePath("a.safetensors"), header, MIB)
            manifest = manifest_of([split], [fake_ids(split)])
            assert manifest.files[0].bytes == len(file)
    assert 0 < good < ROUNDS / 2


def test_changed_manifests_are_refused_or_hold_every_rule() -> None:
    chance = random.Random(2)
    text = msgspec.json.encode(small_manifest())
    compressor = zstandard.ZstdCompressor(level=1)
    good = 0
    for number in range(ROUNDS):
        if number % 10:
            data = compressor.compress(changed_json(text, chance))
        else:
            data = changed_bytes(compressor.compress(text), chance)
        try:
            check(decode(data, None))
            good += 1
        except YardError:
            pass
    assert good < ROUNDS / 2


def test_changed_footers_and_trailers_are_refused_or_hold_every_rule() -> None:
    chance = random.Random(3)
    tail, pack_bytes, _ = built(*EXAMPLES)
    footer, trailer = tail[:-TRAILER_BYTES], tail[-TRAILER_BYTES:]
    good = 0
    for number in range(ROUNDS):
        try:
            if number % 4 == 0:
                read_trailer(footer + changed_bytes(trailer, chance), pack_bytes)
                continue
            changed = changed_bytes(footer, chance)
            offset = read_trailer(tail, pack_bytes).offset
            span = FooterSpan(offset, len(changed), xxhash.xxh3_64_intdigest(changed))
            placements = read_footer(changed, span, PACK)
        except YardError:
            continue
        good += 1
        assert all(p.encoding.flaw is None and p.end <= offset for p in placements)
    assert 0 < good < ROUNDS / 2


def test_changed_entries_are_refused_or_say_all_they_hold() -> None:
    chance = random.Random(4)
    entries = [entry_bytes(placement) for placement in built(*EXAMPLES)[2]]
    good = 0
    for _ in range(ROUNDS):
        changed = changed_bytes(chance.choice(entries), chance)
        try:
            placement = read_entry(changed, PACK)
        except PackInvalid:
            continue
        good += 1
        assert placement.encoding.flaw is None
        assert entry_bytes(placement) == changed
    assert 0 < good < ROUNDS / 2
