"""A folder of files in, and out again bit for bit."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from weightyard.errors import NoSuchThing, Refused
from weightyard.format.assembly import manifest_of
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.format.splitting import Split, split_file
from weightyard.logs import Log
from weightyard.names import FilePath
from weightyard.transfer.appearing import appearing
from weightyard.transfer.plan import wanted_of
from weightyard.transfer.reader import ReadReport, ReadsBlocks
from weightyard.transfer.source import FileSource, Source, translated
from weightyard.transfer.verifying import has_content
from weightyard.transfer.writer import Content, Writer

_log = Log(__name__)


def files_in(folder: Path, *, follow_links: bool = False) -> list[tuple[FilePath, Path]]:
    """The files of a folder, or the one file, by the names they will have.

    `follow_links`: a link to a file counts as that file; links to folders are refused even then,
    since they may lead round in circles. Raises Refused for other links and whatever else is no
    file, and NotAllowed if a folder below cannot be read: a push is never only a part.
    """
    with translated(folder):
        if folder.is_file():
            return [(FilePath(folder.name), folder)]
        if not folder.is_dir():
            raise NoSuchThing(f"there is no folder or file {folder}")
    found = []
    for file in sorted(_below(folder)):
        with translated(file):
            if not _is_pushed(file, follow_links):
                continue
        found.append((FilePath(file.relative_to(folder).as_posix()), file))
    if not found:
        raise NoSuchThing(f"{folder} has no files")
    return found


def _is_pushed(file: Path, follow_links: bool) -> bool:
    """Whether it is a file; False for a folder, whose files are listed too. Raises Refused."""
    if file.is_symlink() and not (follow_links and file.is_file()):
        raise Refused(f"{file} is a link{_about(file)}")
    if file.is_dir():
        return False
    if not file.is_file():
        raise Refused(f"{file} is neither a file nor a folder: it cannot be pushed")
    return True


def _about(link: Path) -> str:
    """What to do about a link that is not followed."""
    if link.is_file():
        return ": follow links (--follow-links) to push the file that it points to"
    return " to a folder: put a copy there" if link.is_dir() else " that leads nowhere"


def _below(folder: Path) -> Iterator[Path]:
    """All that is in a folder and in the folders below it."""

    def fail(why: OSError) -> None:
        with translated(Path(why.filename)):
            raise why

    for parent, folders, names in os.walk(folder, onerror=fail):
        yield from (Path(parent, name) for name in (*folders, *names))


def folder_contents(
    folder: Path,
    block_bytes: int,
    wanted: Callable[[FilePath], bool] = lambda path: True,
    *,
    follow_links: bool = False,
    opened: Callable[[Path], Source] = FileSource,
) -> list[Content]:
    """The files of a folder that are wanted, split. Raises NoSuchThing if none is."""
    files = files_in(folder, follow_links=follow_links)
    found = ((path, opened(file)) for path, file in files if wanted(path))
    contents = split_sources(found, block_bytes)
    if not contents:
        raise NoSuchThing(f"{folder} has no file that fits")
    return contents


def split_sources(files: Iterable[tuple[FilePath, Source]], block_bytes: int) -> list[Content]:
    """Files, wherever they are, split by what they are. Raises InvalidName."""
    return [
        Content(split_source(FilePath.of_new(path.text), source, block_bytes), [source])
        for path, source in files
    ]


def split_source(path: FilePath, source: Source, block_bytes: int) -> Split:
    """A file, split by what it is; logged if it is not what its suffix promises."""
    split = split_file(path, source.length, source.read_at, block_bytes)
    if split.odd is not None:
        _log.warning("file.kept_plain", path=path.text, reason=split.odd)
    return split


def write_folder(writer: Writer, folder: Path, block_bytes: int) -> Manifest:
    """Put the files of a folder into the store; returns the manifest, which is not stored yet."""
    contents = folder_contents(folder, block_bytes)
    return manifest_of([content.split for content in contents], writer.write(contents))


def read_folder(
    reader: ReadsBlocks,
    manifest: Manifest,
    folder: Path,
    files: Sequence[FileEntry] | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReadReport:
    """Put files of a version into a folder, all by default.

    Each gets its name when it is whole and durable; those there already with the right bytes stay.
    `progress` is told of bytes done. Raises Conflict if another file is there, NotAllowed,
    NoSuchThing.
    """
    report = ReadReport()
    for file in manifest.files if files is None else files:
        target = folder.joinpath(*file.name.parts)
        if is_there(manifest, file, target):
            if progress is not None:
                progress(file.bytes)
            continue
        with appearing(target) as partial, translated(target):
            report += _read_file(reader, manifest, file, partial, progress)
    return report


def is_there(manifest: Manifest, file: FileEntry, target: Path) -> bool:
    """Whether a file is in its place, byte for byte: so a killed pull goes on where it was."""
    with translated(target):
        if target.is_symlink() or not target.is_file():
            return False
    return has_content(manifest, file, FileSource(target))


def _read_file(
    reader: ReadsBlocks,
    manifest: Manifest,
    file: FileEntry,
    into: Path,
    progress: Callable[[int], None] | None,
) -> ReadReport:
    """Blocks are decoded straight into the pages of a mapped file, in any order."""
    if not file.bytes:
        return ReadReport()
    with into.open("r+b") as opened:
        # Writing to a mapped page for which the disk has no room would kill the process (SIGBUS).
        os.posix_fallocate(opened.fileno(), 0, file.bytes)
        # Not closed by hand: after a failure the error's traceback still has views of it.
        pages = memoryview(mmap.mmap(opened.fileno(), file.bytes))
        return reader.read(list(wanted_of(manifest, file.extents, pages)), progress)
