"""Building a snapshot: its files linked from other snapshots, or fetched, checked and durable."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from weightyard.errors import BlockCorrupt, NoSuchThing, Unsupported
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.loader.assembled import StateFile, extents_key, fill_state, state_file
from weightyard.loader.leases import held
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
from weightyard.storage.deadline import Deadline
from weightyard.storage.final_name import sync
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.gather import EVERYTHING, Choice
from weightyard.transfer.reader import ReadsBlocks
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
    def entries(self) -> list[FileEntry]:
        """Those that are files of the version."""
        return [file.source for file in self.files if isinstance(file.source, FileEntry)]

    @property
    def state(self) -> StateFile | None:
        """The one that is made of a state dict, if there is one."""
        return next((one.source for one in self.files if isinstance(one.source, StateFile)), None)

    @property
    def paths(self) -> list[str] | None:
        """None: all there are."""
        return None if self.is_whole else [file.path.text for file in self.files]


@dataclass(frozen=True, slots=True)
class Supply:
    """Where bytes come from."""

    pull: Callable[[Sequence[FileEntry], Path, Progress], None]
    """Puts files into a folder, checked and durable."""
    reader: Callable[[], ReadsBlocks]
    on_bytes: Progress = lambda done_bytes: None
    """Is told of bytes that came here; `progress` also counts those this node had already."""


def take_snapshot(
    snapshots: Snapshots,
    catalogue: Catalogue,
    version: Version,
    manifest: Manifest,
    supply: Supply,
    choice: Choice = EVERYTHING,
    progress: Progress | None = None,
    *,
    deadline: Deadline,
    is_patient: bool = True,
) -> Snapshot:
    """The snapshot of a version, made if it is not there, under a lease on the version.

    `is_patient`, `deadline`: see `Snapshots.obtain`. What `progress` raises ends it.
    Raises NotOnNode, NoSuchThing, Unsupported, StoreFull, and what reading raises.
    """
    plan = plan_snapshot(manifest, choice)
    place = Place.of(snapshots.root, Digest(version.digest), plan.paths)

    def make(folder: Path, alive: Progress) -> Record:
        def told(done_bytes: int) -> None:
            deadline.left(f"bringing {version.ref} to this node")
            alive(done_bytes)
            if progress is not None:
                progress(done_bytes)

        def make_room(needed_bytes: int) -> None:
            snapshots.make_room(place, needed_bytes, sum(file.bytes for file in plan.files))

        with held(catalogue, version.ref, deadline):
            files = build(supply, manifest, plan, folder, snapshots.linkable(), make_room, told)
        return Record(
            RECORD_FORMAT, version.digest, version.ref, plan.is_whole, plan.state is not None, files
        )

    return snapshots.obtain(place, make, deadline, is_patient=is_patient)


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
    wanted = tuple(file for file in files if choice.takes(file.path))
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

    def came(done_bytes: int) -> None:
        supply.on_bytes(done_bytes)
        progress(done_bytes)

    made: dict[FilePath, FileRecord] = {}
    for file in plan.files:
        if (known := linkable.get(file.content)) is not None and _link(file, *known, folder):
            made[file.path] = FileRecord(file.path.text, file.bytes, file.content, known[1].blake3)
            progress(file.bytes)
    missing = [file for file in plan.files if file.path not in made]
    make_room(sum(file.bytes for file in missing))
    entries = [file.source for file in missing if isinstance(file.source, FileEntry)]
    supply.pull(entries, folder, came)
    for file in missing:
        at = folder.joinpath(*file.path.parts)
        if isinstance(file.source, StateFile):
            with translated(at):
                write_state(supply.reader(), manifest, file.source, at, came)
        progress(0)  # a sign of life: a large file takes long to hash
        digest = digest_of(at, threads=blake3.AUTO)
        if digest is None:
            raise BlockCorrupt(f"{at} cannot be read back")
        made[file.path] = FileRecord(file.path.text, file.bytes, file.content, digest)
        at.chmod(0o400)  # other snapshots may share it
    with translated(folder):
        for parent, _, _ in os.walk(folder):
            os.chmod(parent, 0o700)
            sync(Path(parent))
    return tuple(made[file.path] for file in plan.files)


def _link(file: PlannedFile, known: Path, record: FileRecord, folder: Path) -> bool:
    """Link a file of another snapshot here, if it still is there and has the right bytes."""
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


def write_state(
    reader: ReadsBlocks,
    manifest: Manifest,
    state: StateFile,
    file: Path,
    progress: Progress | None,
) -> None:
    """Make the safetensors file of a state dict, durable. Raises as the reader, OSError."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Writing to a mapped page for which the disk has no room would kill the process (SIGBUS).
        os.posix_fallocate(handle, 0, state.bytes)
        # Not closed by hand: after a failure the error's traceback still has views of it.
        pages = mmap.mmap(handle, state.bytes)
        fill_state(lambda wanted: reader.read(wanted, progress), manifest, state, memoryview(pages))
        os.fsync(handle)
    finally:
        os.close(handle)
