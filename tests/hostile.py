"""Inputs as a stranger might send them, and the memory that reading them takes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROUNDS = 10_000
_NUMBER = re.compile(rb"\d+")
_WORD = re.compile(rb'"[^"]*"')
_LIST = re.compile(rb"[\[{][^\[\]{}]*[\]}]")
_NUMBERS = (b"0", b"1", b"-1", b"1e3", b"0.5", b"4294967296", b"9223372036854775807", b"9" * 40)
_TOKENS = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"true", b"\xff", b"\0", b"")


@contextmanager
def growing_at_most(kib: int) -> Iterator[None]:
    """Fails if this process takes more memory meanwhile than it had."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak_kib()
    yield
    assert _peak_kib() - before < kib


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
