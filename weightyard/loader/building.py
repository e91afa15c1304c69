"""Building a snapshot: its files linked from other snapshots, or fetched, checked and durable."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from weightyard.errors import BlockCorrupt, NoSuchThing, Unsupported
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.loader.assembled import StateFile, extents_key, fill_state, state_file
from weightyard.loader.leases import held
from weightyard.loader.private import sync_folder
from weightyard.loader.snapshot import (
    RECORD_FORMAT,
    STATE_FILE,
    FileRecord,
    Place,
    Record,
    Snapshot,
    digest_of,
)
from weightyard.loader.snapshots import Snapshots
from weightyard.names import Digest, FilePath
from weightyard.records import Version
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.gather import is_wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import translated

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file a snapshot is to have."""

    path: FilePath
    bytes: int
    content: str
    """Names what it holds, by its blocks."""
    source: FileEntry | StateFile


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """What a snapshot is to hold."""

    files: tuple[PlannedFile, ...]
    is_whole: bool

    @property
    def has_state(self) -> bool:
        return any(isinstance(file.source, StateFile) for file in self.files)

    @property
    def paths(self) -> list[str] | None:
        """None: all there are."""
        return None if self.is_whole else [file.path.text for file in self.files]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which files are wanted: those that fit a pattern, if there are any, and no excluding one."""

    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None


EVERYTHING = Choice()


@dataclass(frozen=True, slots=True)
class Supply:
    """Where bytes come from."""

    pull: Callable[[Manifest, Sequence[FileEntry], Path, Progress], None]
    """Puts files into a folder, checked and durable."""
    reader: Callable[[], Reader]


def take_snapshot(
    snapshots: Snapshots,
    catalogue: Catalogue,
    version: Version,
    manifest: Manifest,
    supply: Supply,
    choice: Choice = EVERYTHING,
    progress: Progress | None = None,
) -> Snapshot:
    """The snapshot of a version, made if it is not there. Its bytes stay in the store meanwhile.

    Raises NotOnNode, NoSuchThing, Unsupported, StoreFull, and what reading raises.
    """
    plan = plan_snapshot(manifest, choice)
    place = Place.of(snapshots.root, Digest(version.digest), plan.paths)

    def make(folder: Path, alive: Progress) -> Record:
        def told(done_bytes: int) -> None:
            alive(done_bytes)
            if progress is not None:
                progress(done_bytes)

        with held(catalogue, version.ref):
            files = build(
                supply, manifest, plan, folder, snapshots.linkable(), snapshots.make_room, told
            )
        return Record(
            RECORD_FORMAT, version.digest, version.ref, plan.is_whole, plan.has_state, files
        )

    return snapshots.obtain(place, make)


def plan_snapshot(manifest: Manifest, choice: Choice = EVERYTHING) -> SnapshotPlan:
    """Which files a snapshot of a version has. Raises NoSuchThing if none fits, Unsupported."""
    files = [
        PlannedFile(
            file.name, file.bytes, blake3(extents_key(manifest, file.extents)).hexdigest(), file
        )
        for file in manifest.files
    ]
    if (state := state_file(manifest)) is not None:
        if any(file.path.text == STATE_FILE for file in files):
            raise Unsupported(f"it has a file {STATE_FILE} and tensors that would become one")
        content = state.content(manifest)
        files.append(PlannedFile(FilePath(STATE_FILE), state.bytes, content, state))
    wanted = tuple(
        file for file in files if is_wanted(file.path.text, choice.include, choice.exclude)
    )
    if files and not wanted:
        shown = ", ".join(file.path.text for file in files[:8])
        raise NoSuchThing(f"no file fits; there are {shown}{', …' if len(files) > 8 else ''}")
    return SnapshotPlan(wanted, len(wanted) == len(files))


def build(
    supply: Supply,
    manifest: Manifest,
    plan: SnapshotPlan,
    folder: Path,
    linkable: Mapping[str, tuple[Path, FileRecord]],
    make_room: Callable[[int], None],
    progress: Progress,
) -> tuple[FileRecord, ...]:
    """Fill an empty folder. When this returns, every byte was checked and is on disk.

    `linkable` are files on this node by their content. Raises as `Reader.read`, StoreFull.
    """
    made: dict[FilePath, FileRecord] = {}
    for file in plan.files:
        if (known := linkable.get(file.content)) is not None and _link(file, *known, folder):
            made[file.path] = FileRecord(file.path.text, file.bytes, file.content, known[1].blake3)
            progress(file.bytes)
    missing = [file for file in plan.files if file.path not in made]
    make_room(sum(file.bytes for file in missing))
    entries = [file.source for file in missing if isinstance(file.source, FileEntry)]
    supply.pull(manifest, entries, folder, progress)
    for file in missing:
        at = folder.joinpath(*file.path.parts)
        if isinstance(file.source, StateFile):
            with translated(at):
                _write_state(supply.reader(), manifest, file.source, at, progress)
        digest = digest_of(at, threads=blake3.AUTO)
        if digest is None:
            raise BlockCorrupt(f"{at} cannot be read back")
        made[file.path] = FileRecord(file.path.text, file.bytes, file.content, digest)
        at.chmod(0o400)  # other snapshots may share it
    with translated(folder):
        for parent, _, _ in os.walk(folder):
            os.chmod(parent, 0o700)
            sync_folder(Path(parent))
    return tuple(made[file.path] for file in plan.files)


def _link(file: PlannedFile, known: Path, record: FileRecord, folder: Path) -> bool:
    """Have a file of another snapshot here too, if it is still there and still right."""
    target = folder.joinpath(*file.path.parts)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(known, target, follow_symlinks=False)
    except OSError:  # removed meanwhile, or as many links as the file system allows
        return False
    if record.bytes == file.bytes and digest_of(target, threads=blake3.AUTO) == record.blake3:
        return True
    target.unlink()
    return False


def _write_state(
    reader: Reader, manifest: Manifest, state: StateFile, file: Path, progress: Progress
) -> None:
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Pages of a sparse file that find no room when they are written end the process.
        os.posix_fallocate(handle, 0, state.bytes)
        # Not closed by hand: after a failure the error's traceback still has views of it.
        pages = mmap.mmap(handle, state.bytes)
        fill_state(partial(reader.read, progress=progress), manifest, state, memoryview(pages))
        os.fsync(handle)
    finally:
        os.close(handle)
