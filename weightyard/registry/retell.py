"""Retelling: what models and versions there are, from the records and the journal of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from pydantic import ValidationError

from weightyard.errors import Damaged, InvalidName, Refused
from weightyard.names import MAX_STEP, AliasName, ModelName, Ref
from weightyard.records import Retention, Version
from weightyard.registry import history
from weightyard.registry.history import JournalEntry
from weightyard.storage import layout
from weightyard.storage.store import Store, StorePath


class _Made(msgspec.Struct):
    kind: str
    created_ms: int


class _Began(msgspec.Struct):
    generation: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)] = 0


class AliasChange(msgspec.Struct, frozen=True):
    """One move of an alias, as the journal tells it."""

    before: int | None
    after: int | None
    reason: str = ""
    alias: str = ""
    who: str = ""
    at_ms: int = 0


@dataclass(slots=True)
class RetoldModel:
    """A model, before it has a row."""

    created_ms: int | None = None
    created_by: str = ""
    kind: str = "model"
    last_number: int = 0
    generation: int = 0
    is_removed: bool = False
    retention: dict[str, Any] | None = None
    versions: dict[int, Version] = field(default_factory=dict)
    moves: list[AliasChange] = field(default_factory=list)

    @property
    def aliases(self) -> dict[str, int]:
        """Where the aliases are after all moves."""
        now = {move.alias: move.after for move in self.moves}
        return {alias: number for alias, number in now.items() if number is not None}


@dataclass(slots=True)
class Retold:
    """What a store tells."""

    models: dict[ModelName, RetoldModel] = field(default_factory=dict)
    last_sequence: int = 0
    entries: dict[int, int] = field(default_factory=dict)
    """Which entries of the journal were understood, and when each was made."""
    lost: list[str] = field(default_factory=list)
    """What cannot be brought back: files, each with the reason."""


def retell(store: Store) -> Retold:
    """All that records and journal tell. Raises what the store raises if it does not answer."""
    telling = _Telling(store)
    for file in store.list(layout.MODELS):
        telling.hear_record(file.path)
    for path in sorted(file.path for file in store.list(layout.JOURNAL)):
        telling.hear_entry(path)
    telling.miss_entries()
    for model in telling.told.models.values():
        _settle(model)
    return telling.told


def _settle(model: RetoldModel) -> None:
    """Fill in what entries were lost: a model with versions exists, and is as old as the first."""
    model.is_removed = model.is_removed and not model.versions
    if model.created_ms is None:
        first = min(model.versions.values(), key=lambda version: version.number, default=None)
        model.created_ms = millis(first) if first is not None else 0
        model.created_by = first.author if first is not None else ""
    if any(version.step is not None for version in model.versions.values()):
        model.kind = "run"


def millis(version: Version) -> int:
    """When a version was made, as the database keeps it."""
    return round(version.created.timestamp() * 1000)


class _Telling:
    def __init__(self, store: Store) -> None:
        self.told = Retold()
        self._sequences: set[int] = set()
        self._store = store
        self._verbs: dict[str, Callable[[JournalEntry], None]] = {
            "model": self._made,
            "model-removed": self._unmade,
            "retention": self._kept,
            "generation": self._began,
            "alias": self._moved,
            "annotated": self._annotated,
            "removed": self._removed,
            "published": self._published,
            "collecting": lambda entry: None,
        }

    def hear_record(self, path: StorePath) -> None:
        found = history.record_of(path)
        if found is None:
            self.told.lost.append(f"{path}: not the name of a record")
            return
        name, number = found
        model = self._model(name)
        model.last_number = max(model.last_number, number)
        with self._losing(path):
            model.versions[number] = history.read_version(self._store, path)

    def hear_entry(self, path: StorePath) -> None:
        sequence = history.sequence_of(path)
        if sequence is None:
            self.told.lost.append(f"{path}: not the name of a journal entry")
            return
        self.told.last_sequence = max(self.told.last_sequence, sequence)
        self._sequences.add(sequence)
        with self._losing(path):
            entry = history.read_entry(self._store, path)
            if entry.what not in self._verbs:
                raise InvalidName(f"tells of {entry.what[:40]!a}, which is not known")
            self._verbs[entry.what](entry)
            self.told.entries[sequence] = entry.at_ms

    def miss_entries(self) -> None:
        """Note gaps as losses: the journal is written without any."""
        there = sorted({0, self.told.last_sequence, *self._sequences})
        for before, after in pairwise(there):
            if gap := range(before + 1, after):
                first, last = layout.journal(gap[0]), layout.journal(gap[-1])
                files = f"{first}" if len(gap) == 1 else f"{first} to {last}"
                self.told.lost.append(f"{files}: gone, with what changed then")

    def _made(self, entry: JournalEntry) -> None:
        model = self._model(ModelName.parse(entry.subject))
        made = msgspec.convert(entry.detail, _Made)
        model.created_ms, model.created_by, model.kind = made.created_ms, entry.who, made.kind
        model.is_removed = False

    def _unmade(self, entry: JournalEntry) -> None:
        model = self._model(ModelName.parse(entry.subject))
        model.is_removed, model.retention = True, None

    def _kept(self, entry: JournalEntry) -> None:
        rules = Retention.model_validate(entry.detail).model_dump(exclude_none=True)
        self._model(ModelName.parse(entry.subject)).retention = rules or None

    def _began(self, entry: JournalEntry) -> None:
        self._reach(self._model(ModelName.parse(entry.subject)), entry)

    def _reach(self, model: RetoldModel, entry: JournalEntry) -> None:
        began = msgspec.convert(entry.detail, _Began)
        model.generation = max(model.generation, began.generation)

    def _moved(self, entry: JournalEntry) -> None:
        ref = Ref.parse(entry.subject)
        if not isinstance(ref.selector, AliasName):
            raise InvalidName(f"{entry.subject[:80]!a} is no alias")
        told = {
            "alias": ref.selector.text,
            "who": entry.who,
            "at_ms": entry.at_ms,
            "reason": "",
            **entry.detail,
        }
        model = self._model(ref.model)
        change = msgspec.convert(told, AliasChange)
        model.moves.append(change)
        model.last_number = max(model.last_number, change.before or 0, change.after or 0)

    def _annotated(self, entry: JournalEntry) -> None:
        ref = Ref.parse(entry.subject)
        model = self._model(ref.model)
        if isinstance(ref.selector, int) and (version := model.versions.get(ref.selector)):
            changed = {**version.model_dump(), **entry.detail}
            model.versions[ref.selector] = Version.model_validate(changed)

    def _removed(self, entry: JournalEntry) -> None:
        ref = Ref.parse(entry.subject)
        if isinstance(ref.selector, int):
            model = self._model(ref.model)
            model.versions.pop(ref.selector, None)
            model.last_number = max(model.last_number, ref.selector)

    def _published(self, entry: JournalEntry) -> None:
        """The record tells the rest; if it is lost, the number is used up all the same."""
        ref = Ref.parse(entry.subject)
        if isinstance(ref.selector, int):
            model = self._model(ref.model)
            model.last_number = max(model.last_number, ref.selector)
            self._reach(model, entry)

    def _model(self, name: ModelName) -> RetoldModel:
        return self.told.models.setdefault(name, RetoldModel())

    @contextmanager
    def _losing(self, path: StorePath) -> Iterator[None]:
        """Note a file that cannot be understood as lost, and go on."""
        try:
            yield
        except (Damaged, Refused, ValidationError, msgspec.ValidationError) as why:
            self.told.lost.append(f"{path}: {str(why)[:300]}")
