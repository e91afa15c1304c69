"""Ten thousand changed records of each kind: a typed refusal, or what they say."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile import ROUNDS, changed_json, growing_at_most

from weightyard.errors import ManifestInvalid, UnknownFormat
from weightyard.registry import binding, history
from weightyard.registry.binding import Owner, YardFile
from weightyard.registry.history import JournalEntry, RecordFile
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store, StorePath

YARD = YardFile(1, "ab" * 16, "cd" * 16, 16 << 20)
OWNER = Owner(1, 3, "cd" * 16, "ef" * 16)
RECORD = RecordFile(
    1, {"model": "team/bert", "number": 3, "digest": "5f" * 32, "metrics": {"loss": 0.5}}
)
ENTRY = JournalEntry(1, 7, 1_700_000_000_000, "alias", "team/bert@prod", "alice", {"after": 3})
DEEP = b'{"format":1,"more":' + b"[" * 100_000
BROKEN_TEXT = b'{"format":1,"yard_id":"\xff"}'

Kind = tuple[Any, Any, str, Callable[[Store], Any]]
KINDS: list[Kind] = [
    (YARD, binding, "yard.json", binding.read_yard_file),
    (OWNER, binding, "owners/000003.json", lambda store: binding.read_owner(store, YARD)),
    (
        RECORD,
        history,
        "models/team/bert/v3.json",
        lambda store: history.read_record(store, StorePath("models/team/bert/v3.json")),
    ),
    (
        ENTRY,
        history,
        "journal/000000000007.json",
        lambda store: history.read_entry(store, layout.journal(7)),
    ),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[2].partition("/")[0])
def test_changed_records_are_refused_or_say_what_they_say(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, module, name, read = kind
    text = msgspec.json.encode(right)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(text)
    store = LocalStore(tmp_path)
    assert read(store) == right

    given = [DEEP, BROKEN_TEXT, b"", b"\xff"]
    monkeypatch.setattr(module, "read_whole", lambda *_: given[-1])
    monkeypatch.setattr(store, "list", lambda _: [store.stat(layout.owner(3))])
    chance = random.Random(9)
    good = 0
    with growing_at_most(kib=64 * 1024):
        while given:
            with pytest.raises((ManifestInvalid, UnknownFormat)):
                read(store)
            given.pop()
        for _ in range(ROUNDS):
            given[:] = [changed_json(text, chance)]
            try:
                found = read(store)
            except (ManifestInvalid, UnknownFormat):
                continue
            good += 1
            assert isinstance(found, type(right))
            assert found.format <= 1
    assert 0 < good < ROUNDS
