"""Snapshots: the node cache. The real files of versions, made once, mapped by everyone after.

Below the cache's folder `snapshots`:

    <digest>/              a version's files, and nothing else
    <digest>-<choice>/     some of its files
    .state/                of each: its record, its lock, when it was last verified; while it is
                           made, how much it will be
    .building/ .going/     being made, being removed; what a dead process left is swept
    .damaged/              set aside by a verification

A snapshot is made in `.building`, under its lock, and gets its name by a rename when all of it is
checked and durable. It is removed by a rename too, so who has it mapped is not disturbed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from weightyard.amounts import size
from weightyard.errors import (
    Damaged,
    DeadlineExceeded,
    NoSuchThing,
    Protected,
    Refused,
    StoreFull,
    YardError,
)
from weightyard.loader.locks import Lock
from weightyard.loader.recent import Recent
from weightyard.loader.snapshot import ROOT_NAME, FileRecord, Place, Record, Snapshot, modified_s
from weightyard.logs import Log
from weightyard.names import Digest, FilePath
from weightyard.storage.deadline import Deadline
from weightyard.storage.final_name import sync
from weightyard.storage.local import require_path
from weightyard.transfer.private import private_folder, read_small, write_small
from weightyard.transfer.source import translated

if TYPE_CHECKING:
    import torch

_log = Log(__name__)

PATIENCE_S = 600.0
"""How long another process that makes a snapshot may show no sign of life: the disk may be slow
to take a large file."""

_PAUSE_S = 0.05
_SOON_S = 2.0
_SIGN_OF_LIFE_S = 1.0
_OLD_S = 3600.0
_MOST_PLACES = 64

Make = Callable[[Path, Callable[[int], None]], Record]
"""Fills a folder, tells of bytes done, and says what is in it."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A snapshot and what is known of it."""

    place: Place
    record: Record
    used: datetime
    checked: datetime
    is_used: bool
    """A process has it open now."""


class Snapshots:
    """All snapshots of this user on this node. Thread-safe, and safe between processes.

    `max_bytes` None: half of what the disk would have free without them.
    """

    def __init__(self, cache: Path, max_bytes: int | None = None) -> None:
        self.root = cache.expanduser().absolute() / ROOT_NAME
        self._max_bytes = max_bytes
        self._places: Recent[Digest, Place] = Recent(_MOST_PLACES)

    def find(self, digest: Digest) -> Snapshot | None:
        """The snapshot of a whole version, in use from now on; None if it is not on this node."""
        try:
            place = self._places.get(digest)
            if place is None:
                place = self._places.keep(digest, Place.of(self.root, digest), 1)
            return self.open(place)
        except (YardError, OSError) as why:
            _log.warning("snapshot.not_usable", snapshot=digest, reason=why)
            return None

    def open(self, place: Place, *, is_use: bool = True) -> Snapshot | None:
        """The snapshot at a place, in use from now on; None if there is none. Raises NotAllowed.

        `is_use`: as of `Snapshot.open`.
        """
        end = time.monotonic() + _SOON_S
        while os.path.lexists(place.folder):
            private_folder(self.root)
            has_record = os.path.lexists(place.record_file)
            lock = Lock.take(place.lock, shared=True, make=has_record)
            if lock is not None:
                if (snapshot := Snapshot.open(place, lock, is_use=is_use)) is None:
                    lock.close()
                return snapshot
            # Who made it is just giving up its lock, or it is being removed.
            if not has_record or time.monotonic() > end:
                break
            time.sleep(_PAUSE_S)
        return None

    def obtain(
        self, place: Place, make: Make, deadline: Deadline, *, is_patient: bool = True
    ) -> Snapshot:
        """The snapshot at a place, made if there is none: once, however many processes ask.

        Raises what making it raises, and DeadlineExceeded if another process that makes it seems to
        be stuck or takes longer than there is time. A caller that is not patient does not wait for
        that process: Protected.
        """
        private_folder(private_folder(self.root) / ".state")
        began = time.monotonic()
        while True:
            if (found := self.open(place)) is not None:
                return found
            if (alone := Lock.take(place.lock, shared=False)) is None:
                if not is_patient and time.monotonic() - began > _SOON_S:
                    raise Protected(_being_made(place))
                deadline.left(f"waiting for {_maker(place)} to make {place.folder}")
                self._wait(place, began)
                continue
            try:
                snapshot = Snapshot.open(place, alone)
                if snapshot is None and alone.is_on(place.lock):
                    self._make(place, alone, make)
                    snapshot = Snapshot.open(place, alone)
                    if snapshot is None:
                        raise Damaged(f"{place.folder} was changed as soon as it was made")
                # Not atomic: another process may have had it alone in between, and removed it.
                if snapshot is not None and alone.share() and alone.is_on(place.lock):
                    return snapshot
            except BaseException:
                alone.close()
                raise
            alone.close()

    def listed(self) -> list[Listed]:
        """All there are, the last used first."""
        found = []
        for place in Place.all(self.root):
            record = place.read_record()
            if record is None or not place.folder.is_dir():
                continue
            with suppress(YardError):
                alone = Lock.take(place.lock, shared=False)
                found.append(
                    Listed(
                        place, record, _moment(place.lock), _moment(place.checked), alone is None
                    )
                )
                if alone is not None:
                    alone.close()
        return sorted(found, key=lambda one: one.used, reverse=True)

    def linkable(self) -> dict[str, tuple[Path, FileRecord]]:
        """Files on this node by what they hold."""
        return {
            file.content: (one.place.folder.joinpath(*FilePath(file.path).parts), file)
            for one in self.listed()
            for file in one.record.files
        }

    def remove(self, place: Place) -> None:
        """Remove a snapshot, also one that is mapped: who has it open keeps what it has.

        Raises Protected if it is being made.
        """
        if not os.path.lexists(place.folder):
            return
        private_folder(private_folder(self.root) / ".state")
        lock = Lock.take(place.lock, shared=True)
        if lock is None:
            raise Protected(_being_made(place))
        with lock:
            if (away := place.move_away(".going", lock)) is not None:
                shutil.rmtree(away, ignore_errors=True)

    def make_room(self, place: Place, needed_bytes: int, all_bytes: int) -> None:
        """Remove the least recently used until so much more fits, and reserve that room.

        For the caller, who makes the snapshot at this place: it will have `all_bytes`, with those
        that are there already. What other processes are making counts in full. Raises StoreFull.
        """
        if not needed_bytes:
            return
        with Lock.wait(self.root / ".state" / "room.lock", PATIENCE_S):
            taken_bytes = self._taken_bytes()
            limit_bytes = self.limit_bytes(self.used_bytes())
            if needed_bytes <= limit_bytes:
                shutil.rmtree(self.root / ".damaged", ignore_errors=True)
                self._evict(limit_bytes - needed_bytes)
                taken_bytes = self._taken_bytes()
            if taken_bytes + needed_bytes > limit_bytes:
                raise StoreFull(
                    f"{size(needed_bytes)} more do not fit below {self.root}: {size(limit_bytes)} "
                    f"may be used (WEIGHTYARD_CACHE_MAX), {size(taken_bytes)} are, by snapshots in "
                    "use or being made; see `weightyard cache ls`"
                )
            write_small(place.room, str(all_bytes).encode())

    def prune(self, *, max_bytes: int | None = None, unused_s: float | None = None) -> list[Listed]:
        """Remove what was not used for so long, then the least recently used over a bound.

        What is in use stays. Leftovers and damaged ones go. Returns what went.
        """
        if not self.root.is_dir():
            return []
        private_folder(self.root)
        self.sweep()
        shutil.rmtree(self.root / ".damaged", ignore_errors=True)
        gone = []
        if unused_s is not None:
            now = time.time()
            old = [one for one in self.listed() if now - one.used.timestamp() >= unused_s]
            gone += [one for one in reversed(old) if self._evict_one(one)]
        limit_bytes = self.limit_bytes(self.used_bytes()) if max_bytes is None else max_bytes
        return gone + self._evict(limit_bytes)

    def used_bytes(self) -> int:
        """What all of it takes on disk; a file that several snapshots share counts once."""
        return _on_disk(self.root)

    def _taken_bytes(self) -> int:
        """The same, with what snapshots that are being made do not have yet."""
        coming_bytes = 0
        for building in _inside(self.root / ".building"):
            place = Place(self.root, building.name.partition(".")[0])
            said = read_small(place.room, 20) or b""
            all_bytes = int(said) if said.isdigit() else 0
            coming_bytes += max(0, all_bytes - _on_disk(building))
        return self.used_bytes() + coming_bytes

    def limit_bytes(self, used_bytes: int) -> int:
        """How much all of it may take."""
        if self._max_bytes is not None:
            return self._max_bytes
        with translated(self.root):
            return (shutil.disk_usage(self.root).free + used_bytes) // 2

    def sweep(self, own: Place | None = None) -> None:
        """Remove what killed processes left; `own`: the place whose lock the caller has alone."""
        for left in _inside(self.root / ".going"):
            shutil.rmtree(left, ignore_errors=True)
        for left in _inside(self.root / ".building"):
            self._sweep_building(left, own)
        for place in Place.all(self.root):
            if place != own and not os.path.lexists(place.folder):
                self._sweep_record(place)
        for file in (self.root / ".state").glob(".*.partial"):
            if time.time() - modified_s(file) > _OLD_S:
                file.unlink(missing_ok=True)

    def _sweep_building(self, left: Path, own: Place | None) -> None:
        """Remove a half-made snapshot that nobody is making."""
        place = Place(self.root, left.name.partition(".")[0])
        if place == own or not os.path.lexists(place.lock):
            shutil.rmtree(left, ignore_errors=True)
        elif (alone := Lock.take(place.lock, shared=False, make=False)) is not None:
            with alone:
                shutil.rmtree(left, ignore_errors=True)

    def _sweep_record(self, place: Place) -> None:
        """Remove what is known of a snapshot that is not there."""
        if (alone := Lock.take(place.lock, shared=False)) is not None:
            with alone:
                if not os.path.lexists(place.folder):  # nor made just before the lock was had
                    place.move_away(".going", alone)

    def _make(self, place: Place, alone: Lock, make: Make) -> None:
        self.sweep(place)
        building = self.root / ".building" / f"{place.name}.{secrets.token_hex(8)}"
        with translated(building):
            building.parent.mkdir(mode=0o700, exist_ok=True)
            building.mkdir(mode=0o700)
            alone.write(f"process {os.getpid()}")
        try:
            record = make(building, _sign_of_life(alone))
            place.room.unlink(missing_ok=True)
            with translated(place.folder):
                if os.path.lexists(place.folder):  # something nobody has a record of
                    going = private_folder(self.root / ".going")
                    place.folder.rename(going / building.name)
                place.write_record(record)
                write_small(place.checked, b"")
                building.rename(place.folder)
                sync(self.root)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            place.room.unlink(missing_ok=True)
            raise

    def _wait(self, place: Place, began: float) -> None:
        """Another process has the lock: wait a little. Raises DeadlineExceeded."""
        if time.monotonic() - began > _SOON_S:
            shared = Lock.take(place.lock, shared=True, make=False)
            if shared is not None:  # not being made, so in use
                with shared:
                    if Snapshot.open(place, shared) is None:  # but removed or changed by hand
                        place.move_away(".going", shared)
            elif time.time() - modified_s(place.lock) > PATIENCE_S:
                raise DeadlineExceeded(
                    f"{_maker(place)} makes {place.folder}, and showed no sign of life for "
                    f"{PATIENCE_S:.0f} s: end it, then try again"
                )
        time.sleep(_PAUSE_S)

    def _evict(self, limit_bytes: int) -> list[Listed]:
        gone = []
        for one in reversed(self.listed()):
            if self._taken_bytes() <= limit_bytes:
                break
            if self._evict_one(one):
                gone.append(one)
        return gone

    def _evict_one(self, one: Listed) -> bool:
        """Remove a snapshot nobody uses."""
        alone = Lock.take(one.place.lock, shared=False)
        if alone is None:
            return False
        with alone:
            away = one.place.move_away(".going", alone)
        if away is None:
            return False
        shutil.rmtree(away, ignore_errors=True)
        _log.info("snapshot.evicted", snapshot=one.place.name, version=one.record.ref)
        return True


def open_snapshot(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a snapshot, by the folder that `yard.snapshot` gave: mapped, nothing is read.

    What is done to them never reaches the files, and they outlive the snapshot. Raises NoSuchThing,
    Refused if two files have a tensor of the same name, Damaged.
    """
    require_path(path)
    folder = Path(path).expanduser().absolute()
    place = Place.at(folder)
    snapshot = Snapshots(folder.parent.parent).open(place) if place is not None else None
    if snapshot is None:
        raise NoSuchThing(f"{folder} is no snapshot: `weightyard path REF` makes one")
    tensors: dict[str, torch.Tensor] = {}
    with snapshot:
        for file in snapshot.record.files:
            if file.path.endswith(".safetensors"):
                mapped = snapshot.tensors(file.path)
                if doubles := tensors.keys() & mapped.keys():
                    raise Refused(f"tensor {min(doubles)} is in several files: map them one by one")
                tensors |= mapped
        snapshot.recheck()
    return tensors


def _sign_of_life(lock: Lock) -> Callable[[int], None]:
    last = 0.0

    def alive(done_bytes: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SIGN_OF_LIFE_S:
            last = time.monotonic()
            lock.touch()

    return alive


def _being_made(place: Place) -> str:
    return f"{place.folder} is being made by {_maker(place)}: wait, or end it"


def _maker(place: Place) -> str:
    note = read_small(place.lock, 64) or b""
    return note.decode("ascii", "replace") or "another process"


def _moment(file: Path) -> datetime:
    return datetime.fromtimestamp(modified_s(file), UTC)


def _on_disk(folder: Path) -> int:
    seen: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found = os.lstat(os.path.join(parent, name))
                seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _inside(folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from folder.iterdir()
