"""Ten thousand changed inputs for each parser: a typed refusal or a right answer, within memory."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
import zstandard
from format_examples import fake_ids, safetensors_file, small_manifest
from test_pack import EXAMPLES, PACK, built

from weightyard.errors import YardError
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.manifest import check, decode
from weightyard.format.pack import TRAILER_BYTES, FooterSpan, read_footer, read_trailer
from weightyard.format.safetensors import Header, parse_header
from weightyard.format.splitting import split_safetensors
from weightyard.names import FilePath

ROUNDS = 10_000
_NUMBER = re.compile(rb"\d+")
_WORD = re.compile(rb'"[^"]*"')
_LIST = re.compile(rb"[\[{][^\[\]{}]*[\]}]")
_NUMBERS = (b"0", b"1", b"-1", b"1e3", b"0.5", b"4294967296", b"9223372036854775807", b"9" * 40)
_TOKENS = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"true", b"\xff", b"\0", b"")


@pytest.fixture(autouse=True)
def memory_stays_bounded() -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak_kib()
    yield
    assert _peak_kib() - before < 64 * 1024


def _peak_kib() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def changed_json(text: bytes, chance: random.Random) -> bytes:
    """JSON with numbers, words or lists replaced, swapped or repeated, or a few bytes changed."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        pattern = chance.choice((_NUMBER, _NUMBER, _WORD, _LIST, None))
        found = list(pattern.finditer(text)) if pattern else []
        if not found:
            at = chance.randrange(len(text) or 1)
            text = text[:at] + chance.choice(_TOKENS) + text[at + chance.randrange(3) :]
            continue
        old, other = chance.choice(found), chance.choice(found)[0]
        new = chance.choice((other, other, b"", old[0] + b"," + other, chance.choice(_NUMBERS)))
        text = text[: old.start()] + new + text[old.end() :]
    return text


def changed_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, set to an extreme, copied over others or cut off."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(out))
        match chance.randrange(4):
            case 0:
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                out[at : at + 4] = chance.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0"))
            case 2:
                other = chance.randrange(len(out))
                out[at : at + 16] = out[other : other + 16]
            case 3 if chance.random() < 0.1:
                del out[at:]
        if not out:
            break
    return bytes(out)


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
