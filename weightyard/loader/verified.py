"""Verified: the runs of packs of this host whose chunks this node has checked before.

As with a snapshot, what was checked once is used without a check, and checked again in the
background after a day. This goes only for files of this user whose stamp has not changed since. The
cache has one small file for each store, which all processes use; losing it costs a check.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import msgspec

from weightyard.errors import YardError
from weightyard.loader.locks import Lock
from weightyard.loader.rechecking import RECHECK_S
from weightyard.logs import Log
from weightyard.storage.stitched import FileRun
from weightyard.transfer.private import private_folder, read_small, write_small
from weightyard.transfer.stamp import Stamp

_log = Log(__name__)

FOLDER_NAME = "verified"

_FORMAT = 1
_MAX_BYTES = 64 << 20
_SETTLED_NS = 100_000_000
"""Two changes within a tick of the system's clock have the same time. So a file that was changed
just now is not remembered: it may be changed once more unseen."""


class Pack(msgspec.Struct, frozen=True):
    """What is known of a pack."""

    stamp: Stamp
    """Of the file, as it was when this was checked."""
    checked_s: float
    """When the oldest of the checks was made."""
    runs: tuple[tuple[int, int], ...]
    """Where checked chunks begin and end; apart from each other, in order."""


class _Record(msgspec.Struct, frozen=True):
    format: int
    folder: str
    packs: dict[str, Pack]
    """By their paths in the store."""


class Verified:
    """What is known of the packs of one store. Thread-safe. Remembering never fails a load."""

    def __init__(self, cache: Path, folder: Path) -> None:
        """`folder`: of the store."""
        name = hashlib.blake2s(str(folder).encode(), digest_size=16).hexdigest()
        self._file = cache.expanduser().absolute() / FOLDER_NAME / f"{name}.json"
        self._folder = folder

    def of(self, files: Iterable[Path]) -> dict[Path, Pack]:
        """What is known of these packs now. Ask when they are mapped: a file that gets the same
        name later is not the one mapped. A pack that cannot be remembered is left out.
        """
        known = self._read()
        found = {}
        for file in set(files):
            if (stamp := _own(file)) is not None:
                pack = known.get(self._name(file))
                is_same = pack is not None and pack.stamp == stamp
                found[file] = pack if is_same and pack is not None else Pack(stamp, 0.0, ())
        return found

    def add(self, known: Mapping[Path, Pack], runs: Iterable[FileRun], began_s: float) -> None:
        """Remember that runs were checked, of files as `of` saw them before."""
        now_ns = time.time_ns()
        fresh = {}
        for file, some in groupby(sorted(runs, key=_by_place), key=lambda run: run.file):
            pack = known.get(file)
            if pack is None or now_ns - pack.stamp.changed_ns < _SETTLED_NS:
                continue
            is_due_again = began_s - pack.checked_s >= RECHECK_S  # then only what was checked now
            before = () if is_due_again else pack.runs
            checked_s = began_s if is_due_again else pack.checked_s
            spans = joined([*before, *((run.start, run.end) for run in some)])
            fresh[self._name(file)] = Pack(pack.stamp, checked_s, spans)
        if fresh:
            self._change({**self._read(), **fresh})

    def forget(self, files: Iterable[Path]) -> None:
        """Have these packs checked by whoever loads from them next."""
        gone = set(map(self._name, files))
        kept = {name: pack for name, pack in self._read().items() if name not in gone}
        self._change(kept)

    def alone(self) -> Lock | None:
        """The lock of the one process that checks again; None: another process has it."""
        try:
            return Lock.take(self._file.with_suffix(".lock"), shared=False)
        except YardError:
            return None

    def _change(self, packs: Mapping[str, Pack]) -> None:
        """If two processes do so at once, what one of them checked may be checked again."""
        there = {name: one for name, one in packs.items() if (self._folder / name).exists()}
        try:
            private_folder(self._file.parent)
            write_small(self._file, msgspec.json.encode(_Record(_FORMAT, str(self._folder), there)))
        except (YardError, OSError) as why:
            _log.info("node.cannot_remember", file=self._file, reason=why)

    def _read(self) -> Mapping[str, Pack]:
        with suppress(YardError, OSError, msgspec.DecodeError, UnicodeDecodeError):
            if self._file.exists():
                private_folder(self._file.parent)
                text = read_small(self._file, _MAX_BYTES) or b""
                found = msgspec.json.decode(text, type=_Record)
                if found.format == _FORMAT and found.folder == str(self._folder):
                    return found.packs
        return {}

    def _name(self, file: Path) -> str:
        return file.relative_to(self._folder).as_posix()


def forget_all(cache: Path) -> None:
    """Have all packs checked by whoever loads from them next."""
    shutil.rmtree(cache.expanduser().absolute() / FOLDER_NAME, ignore_errors=True)


def covers(known: Mapping[Path, Pack], runs: Iterable[FileRun]) -> bool:
    """Whether all of these runs were checked. Pure."""
    return all(
        any(
            start <= run.start and run.end <= end
            for start, end in (known[run.file].runs if run.file in known else ())
        )
        for run in runs
    )


def is_due(known: Mapping[Path, Pack], runs: Iterable[FileRun], now_s: float) -> bool:
    """Whether some of these were checked so long ago that they should be again. Pure."""
    return any(now_s - known[run.file].checked_s >= RECHECK_S for run in runs if run.file in known)


def joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same bytes as spans that do not touch, in order. Pure."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            start, end = found[-1][0], max(end, found.pop()[1])
        found.append((start, end))
    return tuple(found)


def _own(file: Path) -> Stamp | None:
    """The stamp of a file of this user; None for a file of another, who could fake it."""
    try:
        seen = os.stat(file)
    except OSError:
        return None
    return Stamp.of(seen) if seen.st_uid == os.geteuid() else None


def _by_place(run: FileRun) -> tuple[Path, int]:
    return run.file, run.start
