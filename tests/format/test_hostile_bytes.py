"""Ten thousand changed inputs for each parser: a typed refusal or a right answer, within memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
import xxhash
from format_examples import fake_ids, safetensors_file, small_manifest
from hostile import ROUNDS, changed_bytes, changed_json, growing_at_most
from test_pack import EXAMPLES, PACK, built

from weightyard.errors import ManifestInvalid, PackInvalid, UnknownFormat, YardError
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.manifest import check, decode, encode, from_json
from weightyard.format.pack import (
    PACK_HEADER,
    TRAILER_BYTES,
    FooterSpan,
    check_header,
    entry_bytes,
    read_entries,
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
    good = 0
    for _ in range(ROUNDS):
        try:
            check(from_json(changed_json(text, chance), None))
            good += 1
        except YardError:
            pass
    assert 0 < good < ROUNDS / 2


def test_changed_frames_of_manifests_are_refused_or_hold_every_rule() -> None:
    chance = random.Random(5)
    _, stored = encode(small_manifest())
    good = 0
    for _ in range(ROUNDS):
        try:
            check(decode(changed_bytes(stored, chance), None))
            good += 1
        except (ManifestInvalid, UnknownFormat):
            pass
    assert good < ROUNDS / 2


def test_changed_headers_of_packs_are_refused() -> None:
    chance = random.Random(7)
    for _ in range(ROUNDS):
        changed = changed_bytes(PACK_HEADER, chance)
        try:
            check_header(changed)
        except (PackInvalid, UnknownFormat):
            assert not changed.startswith(PACK_HEADER)
        else:
            assert changed.startswith(PACK_HEADER)


def test_changed_trailers_are_refused_or_name_a_footer_inside_the_pack() -> None:
    chance = random.Random(8)
    tail, pack_bytes, _ = built(*EXAMPLES)
    footer, trailer = tail[:-TRAILER_BYTES], tail[-TRAILER_BYTES:]
    good = 0
    for _ in range(ROUNDS):
        try:
            span = read_trailer(footer + changed_bytes(trailer, chance), pack_bytes)
        except (PackInvalid, UnknownFormat):
            continue
        good += 1
        assert span.offset + span.length == pack_bytes - TRAILER_BYTES
    assert 0 < good < ROUNDS / 2


def test_changed_footers_are_refused_or_hold_every_rule() -> None:
    chance = random.Random(3)
    tail, pack_bytes, _ = built(*EXAMPLES)
    footer = tail[:-TRAILER_BYTES]
    offset = read_trailer(tail, pack_bytes).offset
    good = 0
    for _ in range(ROUNDS):
        changed = changed_bytes(footer, chance)
        span = FooterSpan(offset, len(changed), xxhash.xxh3_64_intdigest(changed))
        try:
            placements = read_footer(changed, span, PACK)
        except PackInvalid:
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


def test_entries_read_together_are_as_each_read_alone() -> None:
    entries = [(entry_bytes(placement), PACK) for placement in built(*EXAMPLES)[2]]
    assert read_entries(entries) == [read_entry(*entry) for entry in entries]
    assert read_entries([]) == []


def test_changed_entries_read_together_are_refused_or_as_each_read_alone() -> None:
    chance = random.Random(9)
    entries = [entry_bytes(placement) for placement in built(*EXAMPLES)[2]]
    good = 0
    for _ in range(ROUNDS):
        together = [(entry, PACK) for entry in chance.choices(entries, k=chance.randint(1, 4))]
        changed = chance.randrange(len(together))
        together[changed] = (changed_bytes(together[changed][0], chance), PACK)
        try:
            alone = [read_entry(*entry) for entry in together]
        except PackInvalid:
            with pytest.raises(PackInvalid):
                read_entries(together)
            continue
        good += 1
        assert read_entries(together) == alone
    assert 0 < good < ROUNDS / 2


def test_entries_that_hold_segments_of_one_another_are_refused() -> None:
    """Laid one after the other they would read well: the first lacks what the second has."""
    whole = next(
        placement for placement in built(*EXAMPLES)[2] if len(placement.encoding.segments) > 1
    )
    entry, segment = entry_bytes(whole), 16
    table = len(entry) - segment * len(whole.encoding.segments)
    short, long = entry[:-segment], entry[:table] + entry[-segment:] + entry[table:]
    with pytest.raises(PackInvalid):
        read_entries([(short, PACK), (long, PACK)])
    with pytest.raises(PackInvalid):
        read_entries([(entry, PACK), (entry[:40], PACK)])
