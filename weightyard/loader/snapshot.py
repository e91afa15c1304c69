"""Snapshot: a version's real files in a folder of this node, and what is known of them."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from blake3 import blake3

from weightyard.closing import Closing
from weightyard.errors import Damaged, InvalidName, NoSuchThing
from weightyard.loader.locks import Lock
from weightyard.loader.recent import Recent
from weightyard.loader.rechecking import RECHECK_S, recheck_behind
from weightyard.logs import Log
from weightyard.names import Digest, FilePath
from weightyard.transfer.private import is_own_file, is_own_folder, read_small, write_small
from weightyard.transfer.source import translated
from weightyard.transfer.stamp import Stamp

if TYPE_CHECKING:
    import torch

    from weightyard.loader.mapping import MappedFile

_log = Log(__name__)

ROOT_NAME = "snapshots"

STATE_FILE = "model.safetensors"
"""What the tensors of a pushed state dict become: the name every server looks for."""

RECORD_FORMAT = 1
_MAX_RECORD_BYTES = 64 << 20
_MOVING_S = 10.0
_NAME = re.compile(r"([0-9a-f]{64})(?:-[0-9a-f]{16})?", re.ASCII)
_Hex = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]

_MOST_RECORDED = 20_000
"""Files of which records are kept in memory: a few MB."""


class FileRecord(msgspec.Struct, frozen=True):
    """A file of a snapshot."""

    path: str
    bytes: int
    content: _Hex
    """Names what it holds, by its blocks: files with equal `content` can be one on disk."""
    blake3: _Hex
    """Of its bytes, taken when they had just been checked."""


class Record(msgspec.Struct, frozen=True):
    """What a snapshot is of. Written before the folder gets its name."""

    format: int
    digest: _Hex
    ref: str
    """The version for which it was made; others may have the same content."""
    is_whole: bool
    has_state: bool
    """Whether there is a file of a state dict, which the version has as tensors only."""
    files: tuple[FileRecord, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


_records: Recent[tuple[Path, Stamp], Record] = Recent(_MOST_RECORDED)


@dataclass(frozen=True)
class Place:
    """Where one snapshot lies, and beside it what belongs to it."""

    root: Path
    name: str

    @classmethod
    def of(cls, root: Path, digest: Digest, paths: Sequence[str] | None = None) -> Place:
        """Of a whole version, or of some of its files: those have a folder of their own."""
        if paths is None:
            return cls(root, digest.hex)
        chosen = blake3("\0".join(sorted(paths)).encode()).hexdigest(length=8)
        return cls(root, f"{digest.hex}-{chosen}")

    @classmethod
    def at(cls, folder: Path) -> Place | None:
        """The place of a folder; None if no snapshot has such a name."""
        is_one = folder.parent.name == ROOT_NAME and _NAME.fullmatch(folder.name)
        return cls(folder.parent, folder.name) if is_one else None

    @classmethod
    def all(cls, root: Path) -> Iterator[Place]:
        """All places that may have a snapshot, or had one."""
        names = {entry.name for entry in _entries(root)}
        names |= {entry.name.partition(".")[0] for entry in _entries(root / ".state")}
        return (cls(root, name) for name in sorted(names) if _NAME.fullmatch(name))

    @property
    def digest(self) -> Digest:
        return Digest(self.name[:64])

    @cached_property
    def folder(self) -> Path:
        return self.root / self.name

    @cached_property
    def lock(self) -> Path:
        """Shared while it is used, alone while it is made or removed; touched at every use."""
        return self.root / ".state" / f"{self.name}.lock"

    @cached_property
    def checked(self) -> Path:
        """Touched when all its bytes have been verified."""
        return self.root / ".state" / f"{self.name}.checked"

    @cached_property
    def record_file(self) -> Path:
        return self.root / ".state" / f"{self.name}.json"

    @cached_property
    def room(self) -> Path:
        """How many bytes all of it will have, while it is made."""
        return self.root / ".state" / f"{self.name}.room"

    def write_record(self, record: Record) -> None:
        write_small(self.record_file, msgspec.json.encode(record))

    def read_record(self) -> Record | None:
        """None where there is no snapshot, or none this weightyard knows how to read."""
        try:
            key = self.record_file, Stamp.of(os.lstat(self.record_file))
        except OSError:
            return None
        if (known := _records.get(key)) is not None:
            return known
        record = self._read_record()
        return record if record is None else _records.keep(key, record, len(record.files))

    def _read_record(self) -> Record | None:
        text = read_small(self.record_file, _MAX_RECORD_BYTES)
        if text is None:
            return None
        try:
            record = msgspec.json.decode(text, type=Record)
            for file in record.files:
                FilePath(file.path)
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidName):
            return None
        is_ours = record.format == RECORD_FORMAT and record.digest == self.digest.hex
        return record if is_ours else None

    def move_away(self, folder: str, lock: Lock) -> Path | None:
        """Take it out of sight, whole; who has it mapped keeps what it has. None: it is gone.

        `lock`: the one the caller holds. Its file is removed too, so that those who still use what
        was moved do not stand in the way of a new snapshot.
        """
        away = self.root / folder / f"{self.name}.{secrets.token_hex(8)}"
        with translated(self.folder), Lock.wait(self.root / ".state" / "moving.lock", _MOVING_S):
            if not lock.is_on(self.lock):
                return None  # another process moved it, and this may be a new one
            away.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                self.folder.rename(away)
            except FileNotFoundError:
                away = self.folder
            for file in (self.record_file, self.checked, self.room, self.lock):
                file.unlink(missing_ok=True)
        return away if away != self.folder else None

    def set_aside(self, why: str, lock: Lock) -> None:
        """Take a damaged one out of sight, where it can be looked at until it is pruned."""
        if (aside := self.move_away(".damaged", lock)) is not None:
            _log.warning("snapshot.damaged", snapshot=self.name, reason=why, moved_to=aside)


class Snapshot(Closing):
    """A version's files on this node. In use, and so not evicted, until closed or forgotten."""

    def __init__(self, place: Place, record: Record, lock: Lock) -> None:
        self._place = place
        self._record = record
        self._lock = lock

    @classmethod
    def open(cls, place: Place, lock: Lock, *, is_use: bool = True) -> Snapshot | None:
        """The snapshot at a place whose lock is held; None if it is not there.

        One whose files are not those it was made of is set aside, with a warning. `is_use`: count
        this as a use; what was not used for long is evicted first.
        """
        record = place.read_record()
        if record is None or not is_own_folder(place.folder):
            return None
        folder = str(place.folder)
        for file in record.files:
            if not _is_there(folder, file):
                why = f"{file.path} is gone, of another length, a link or not yours"
                place.set_aside(why, lock)
                return None
        if is_use:
            lock.touch()
        return cls(place, record, lock)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._place.folder

    @property
    def digest(self) -> Digest:
        return self._place.digest

    @property
    def record(self) -> Record:
        return self._record

    def tensors(self, file: str | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file, mapped; None: those of a pushed state dict.

        Nothing is read before it is used, and what is done to a tensor never reaches the file.
        Raises NoSuchThing, Damaged.
        """
        from weightyard.loader.mapping import map_file

        is_state = file is None or (self._record.has_state and file == STATE_FILE)
        return map_file(self._file(file), tied=is_state)

    def mapped(self, file: str | None = None) -> MappedFile:
        """The same, for a file whose tensors the version knows: makes only those asked for."""
        from weightyard.loader.mapping import MappedFile

        return MappedFile(self._file(file))

    def _file(self, file: str | None) -> Path:
        if file is None and not self._record.has_state:
            raise NoSuchThing(f"{self._record.ref} has no tensors of a state dict")
        path = FilePath(file or STATE_FILE)
        if path.text not in {one.path for one in self._record.files}:
            raise NoSuchThing(f"the snapshot of {self._record.ref} has no file {path}")
        return self.path.joinpath(*path.parts)

    def require_sound(self, file: str | None) -> None:
        """Read a file in which something is wrong, to see whether it is still as it was made.

        `file`: as in `tensors`. Raises Damaged if it is not; the snapshot is then set aside, so
        that the next load gets another one, or reads the store.
        """
        path = file or STATE_FILE
        made = next((one.blake3 for one in self._record.files if one.path == path), None)
        if digest_of(self._file(file), threads=blake3.AUTO) != made:
            self._place.set_aside(f"wrong bytes in {path}", self._lock)
            raise Damaged(
                f"the snapshot of {self._record.ref} on this node was damaged, in {path}, and is "
                "set aside: load again"
            )

    def verify(self) -> list[str]:
        """Read every byte; the paths of files that are not as they were made, none if all are.

        A damaged snapshot is set aside.
        """
        damaged = [
            file.path
            for file in self._record.files
            if digest_of(self.path.joinpath(*FilePath(file.path).parts)) != file.blake3
        ]
        if damaged:
            self._place.set_aside(f"wrong bytes in {', '.join(damaged[:3])}", self._lock)
        else:
            with suppress(OSError):
                os.utime(self._place.checked)
        return damaged

    def recheck(self) -> threading.Thread | None:
        """Verify in the background, at low priority, if it was not done for a day.

        At most one process of a node does. A damaged snapshot is set aside and a warning logged.
        """
        was_there = os.path.lexists(self._place.checked)  # else taking its lock makes it
        if time.time() - modified_s(self._place.checked) < RECHECK_S:
            return None
        if (alone := Lock.take(self._place.checked, shared=False)) is None:
            return None
        # Who had the lock until just now may have verified it.
        if was_there and time.time() - modified_s(self._place.checked) < RECHECK_S:
            alone.close()
            return None
        return recheck_behind(self._recheck, alone)

    def close(self) -> None:
        self._lock.close()

    def _recheck(self) -> None:
        in_use = Lock.take(self._place.lock, shared=True, make=False)
        if in_use is not None:
            with Snapshot(self._place, self._record, in_use) as own:
                own.verify()


def _is_there(folder: str, file: FileRecord) -> bool:
    """Whether a file of this user, of that length, lies there, in folders of this user."""
    at = file.path.find("/")
    while at > 0:
        if not is_own_folder(f"{folder}/{file.path[:at]}"):
            return False
        at = file.path.find("/", at + 1)
    return is_own_file(f"{folder}/{file.path}", file.bytes)


def digest_of(file: Path, *, threads: int = 1) -> str | None:
    """BLAKE3 of a file; None if it cannot be read."""
    try:
        return blake3(max_threads=threads).update_mmap(file).hexdigest()
    except OSError:
        return None


def modified_s(file: Path) -> float:
    """When a file was last touched, by the clock of this node; 0 if it is not there."""
    try:
        return file.lstat().st_mtime
    except OSError:
        return 0.0


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with translated(folder), suppress(FileNotFoundError), os.scandir(folder) as found:
        return list(found)
    return []
