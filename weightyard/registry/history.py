"""History: reading a store's own account of versions and changes, its records and journal."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from weightyard.errors import InvalidName, ManifestInvalid, UnknownFormat
from weightyard.names import Digest, ModelName
from weightyard.records import Version
from weightyard.storage.store import Store, StorePath
from weightyard.transfer.once import read_whole

RECORD_FORMAT = 1

MAX_RECORD_BYTES = 64 << 20

_RECORD = re.compile(r"models/([^/]+)/([^/]+)/v([1-9][0-9]{0,8})\.json", re.ASCII)
_JOURNAL = re.compile(r"journal/([0-9]{12,19})\.json", re.ASCII)


class RecordFile(msgspec.Struct, frozen=True):
    """`models/<project>/<name>/v<number>.json`: a version as it was published."""

    format: int
    version: dict[str, Any]


class JournalEntry(msgspec.Struct, frozen=True):
    """`journal/<sequence>.json`: a change that no record tells."""

    format: int
    sequence: int
    at_ms: int
    what: str
    subject: str
    who: str
    detail: dict[str, Any]


_T = TypeVar("_T", RecordFile, JournalEntry)


def read_record(store: Store, path: StorePath) -> RecordFile:
    """Raises FileMissing, ManifestInvalid, UnknownFormat."""
    return _read(store, path, RecordFile)


def read_version(store: Store, path: StorePath) -> Version:
    """The version a record tells of, if it is the one its path names.

    Raises FileMissing, ManifestInvalid, UnknownFormat.
    """
    try:
        version = Version.model_validate(read_record(store, path).version)
        Digest(version.digest)
    except (ValidationError, InvalidName) as why:
        raise ManifestInvalid(f"{path}: {str(why)[:200]}") from None
    if record_of(path) != (ModelName.parse(version.model), version.number):
        raise ManifestInvalid(f"{path}: is a record of {version.ref[:200]}")
    return version


def read_entry(store: Store, path: StorePath) -> JournalEntry:
    """The entry, if it is the one its path names.

    Raises FileMissing, ManifestInvalid, UnknownFormat.
    """
    entry = _read(store, path, JournalEntry)
    if entry.sequence != sequence_of(path):
        raise ManifestInvalid(f"{path}: is entry {entry.sequence} of the journal")
    return entry


def record_of(path: StorePath) -> tuple[ModelName, int] | None:
    """Which version a record is of, by its path."""
    found = _RECORD.fullmatch(path.text)
    if found is None:
        return None
    try:
        return ModelName(found[1], found[2]), int(found[3])
    except InvalidName:
        return None


def sequence_of(path: StorePath) -> int | None:
    """The number of a journal entry, by its path."""
    found = _JOURNAL.fullmatch(path.text)
    return None if found is None else int(found[1])


def _read(store: Store, path: StorePath, kind: type[_T]) -> _T:
    try:
        found = msgspec.json.decode(read_whole(store, path, MAX_RECORD_BYTES), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise ManifestInvalid(f"{path}: {str(why)[:200]}") from None
    if found.format > RECORD_FORMAT:
        raise UnknownFormat(path.text, found.format, RECORD_FORMAT)
    return found
