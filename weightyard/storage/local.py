"""A store in a local folder: the embedded default."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from stat import S_ISREG

from typing_extensions import Buffer

from weightyard.errors import (
    AlreadyThere,
    BadSetting,
    FileMissing,
    InvalidName,
    NotAllowed,
    Refused,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    Unsupported,
    YardError,
)
from weightyard.logs import Log
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.final_name import move_to_final_name, sync
from weightyard.storage.store import (
    Again,
    FileOptions,
    FileStat,
    Location,
    Ownership,
    Read,
    ReadPath,
    Replica,
    Served,
    Span,
    Stage,
    StagedFile,
    Store,
    StorePath,
)

_log = Log(__name__)

HERE = Replica(datanode="localhost", host="localhost")
"""The one copy of what lies in a folder."""

_BY_ERRNO: dict[int, type[YardError]] = {
    errno.ENOENT: FileMissing,
    errno.ENOTDIR: FileMissing,
    errno.ELOOP: FileMissing,  # a link to itself leads to no file
    errno.EEXIST: AlreadyThere,
    errno.EACCES: NotAllowed,
    errno.EPERM: NotAllowed,
    errno.EROFS: NotAllowed,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EFBIG: StoreFull,
}


class LocalStore(Store):
    """Files below one folder. What is published survives a power cut: files and folders are synced.

    New files and folders take their modes from the root folder, which `init` sets.
    """

    replicates = False

    def __init__(self, root: Path) -> None:
        """Raises Refused if there is a file."""
        self.folder = root.expanduser().absolute()
        """Where it is on this machine."""
        require_no_file(self.folder)
        self.url = self.folder.as_uri()

    def init(self, ownership: Ownership | None = None) -> None:
        ownership = ownership or Ownership()
        _require_known(ownership)
        with _translated(self.folder):
            for folder in (self.folder, *(self._at(path) for path in layout.FOLDERS)):
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(ownership.folder_mode)  # mkdir's own mode is cut by the umask
                if ownership.owner is not None:
                    shutil.chown(folder, user=ownership.owner)
                if ownership.group is not None:
                    shutil.chown(folder, group=ownership.group)
            sync(self.folder)

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        _require_one_copy(options)
        target = self._at(path)
        with _translated(target):
            self._make_folder(target.parent)
            file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            stage = _LocalStage(path, target, file)
            try:
                os.fchmod(file, self._folder_mode() & 0o666)
            except OSError:
                stage.abort()
                raise
        return stage

    def publish(self, staged: StagedFile, path: StorePath) -> None:
        source, target = self._at(staged.path), self._at(path)
        with _translated(target):
            self.stat(staged.path)  # so that it is named if it is what is missing
            self._make_folder(target.parent)
            move_to_final_name(source, target)

    def stat(self, path: StorePath) -> FileStat:
        # Not Path.is_file(): since Python 3.14 it says of a file in a folder that may not be
        # entered that there is none, and who believes that takes a pack for lost.
        with _translated(f"{path} in {self.url}"):
            seen = self._at(path).stat()
        if not S_ISREG(seen.st_mode):
            raise FileMissing(f"{path} in {self.url} is not a file")
        return FileStat(path, seen.st_size, replication=1, modified_s=seen.st_mtime)

    def list(self, folder: StorePath) -> Iterator[FileStat]:
        for parent, names in self._walk(folder):
            for path in self._named(Path(parent, name) for name in names):
                try:
                    found = self.stat(path)
                except FileMissing:  # deleted meanwhile
                    continue
                yield found

    def top(self) -> Sequence[StorePath]:
        with _translated(self.folder):
            return [*self._named(self.folder.iterdir())]

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        length = self.stat(path).length
        return Location(path, length, (Span(0, length, (HERE,)),) if length else ())

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        deadline = Deadline.after(timeout_s, cancel)
        source = self._at(location.path)
        with _translated(source):
            file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for wanted in reads:
                    _fill(file, wanted, location, deadline)
            finally:
                os.close(file)
        return Served(ReadPath.LOCAL, HERE)

    def delete(self, path: StorePath) -> bool:
        target = self._at(path)
        with _translated(target):
            try:
                if target.is_dir():
                    target.rmdir()
                else:
                    target.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as why:
                if why.errno == errno.ENOTEMPTY:
                    return False
                raise
            sync(target.parent)
        return True

    def adjust(self, path: StorePath, options: FileOptions) -> None:
        _require_one_copy(options)
        self.stat(path)

    def close(self) -> None:
        pass

    def _walk(self, folder: StorePath) -> Iterator[tuple[str, Sequence[str]]]:
        """Folders with the names of their files.

        One that cannot be read is not an empty one: whoever rebuilds a registry, or collects, would
        take what is in it for gone.
        """

        def fail(why: OSError) -> None:
            # Removed meanwhile, or a file: nothing is below that.
            if not isinstance(why, FileNotFoundError | NotADirectoryError):
                raise why

        top = self._at(folder)
        with _translated(top):
            for parent, _, names in os.walk(top, onerror=fail):
                yield parent, names

    def _named(self, files: Iterable[Path]) -> Iterator[StorePath]:
        """The paths of files, without those that no store writes."""
        for file in files:
            try:
                yield StorePath(file.relative_to(self.folder).as_posix())
            except InvalidName:
                _log.warning("store.foreign_file", file=file)

    def _at(self, path: StorePath) -> Path:
        return self.folder / path.text

    def _folder_mode(self) -> int:
        return self.folder.stat().st_mode & 0o777

    def _make_folder(self, folder: Path) -> None:
        """Make a folder below the root, with the root's mode, and its name durable."""
        if folder.is_dir():
            return
        if folder == self.folder:  # what was mounted there is away: here its files would be lost
            raise FileMissing(f"{folder} is not there: is it mounted? `weightyard init` makes it")
        self._make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):  # another writer was quicker
            folder.mkdir()
            folder.chmod(self._folder_mode())
            sync(folder.parent)


class _LocalStage(Stage):
    def __init__(self, path: StorePath, target: Path, file: int) -> None:
        self._path = path
        self._target = target
        self._file: int | None = file
        self._written = 0

    def write(self, data: Buffer, again: Again | None = None) -> None:
        rest = memoryview(data).cast("B")
        with _translated(self._target):
            while rest:
                done = os.write(self._open_file(), rest)
                self._written += done
                rest = rest[done:]

    def close(self) -> StagedFile:
        with _translated(self._target):
            file = self._open_file()
            os.fsync(file)
            length = os.fstat(file).st_size
            if length != self._written:
                raise StoreUnavailable(f"{self._path}: wrote {self._written}, has {length} bytes")
            os.close(file)
            self._file = None
            sync(self._target.parent)
        return StagedFile(self._path, length)

    def abort(self) -> None:
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        with contextlib.suppress(OSError):
            self._target.unlink()

    def _open_file(self) -> int:
        if self._file is None:
            raise ValueError(f"{self._path} is closed")
        return self._file


def _require_known(ownership: Ownership) -> None:
    """Before a folder is made, or changed, for somebody whom this host does not know."""
    for kind, name, find in (
        ("user", ownership.owner, pwd.getpwnam),
        ("group", ownership.group, grp.getgrnam),
    ):
        try:
            if name is not None:
                find(name)
        except (KeyError, ValueError):
            raise BadSetting(f"this host knows no {kind} of the name {name!a}") from None


def require_path(path: str | Path) -> None:
    """See that a path is one, and not empty: Python takes that for the folder one is in.

    A variable of a script was not set: what was meant for one folder would be done to another.
    Raises Refused.
    """
    if not isinstance(path, str | os.PathLike):
        raise BadSetting(f"{path!r:.80} is no path: give the text of one, or a pathlib.Path")
    if not str(path).strip():
        raise Refused("the path is empty; for the folder you are in say '.'")
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a NUL")
    except ValueError as why:
        raise Refused(f"{str(path)!a} cannot be a path: {why}") from None


def require_no_file(folder: Path) -> None:
    """See that where a folder is meant there is no file. Raises Refused."""
    if os.path.isfile(folder):  # which, unlike Path.is_file(), raises nothing
        raise Refused(f"{folder} is a file, not a folder")


def _fill(file: int, wanted: Read, location: Location, deadline: Deadline) -> None:
    if wanted.offset < 0 or wanted.offset + len(wanted.into) > location.length:
        raise TooLarge(
            f"{location.path}: read of {len(wanted.into)} at {wanted.offset} "
            f"is past its {location.length} bytes"
        )
    offset, rest = wanted.offset, wanted.into
    while rest:
        deadline.left(f"reading {location.path}")
        done = os.preadv(file, [rest], offset)
        if done == 0:
            raise FileMissing(f"{location.path} ends at {offset}, not at {location.length}")
        offset += done
        rest = rest[done:]


def _require_one_copy(options: FileOptions | None) -> None:
    if options is not None and (options.replication or 1) != 1:
        raise Unsupported(
            f"a folder keeps one copy, not {options.replication}: use an hdfs:// store"
        )
    if options is not None and options.policy is not None:
        raise Unsupported(
            f"a folder has no storage policy {options.policy!a}: use an hdfs:// store"
        )


@contextlib.contextmanager
def _translated(what: object) -> Iterator[None]:
    """Turns OSError into one of our errors, which names the file and so tells the disk."""
    try:
        yield
    except OSError as why:
        kind = _BY_ERRNO.get(why.errno or 0, StoreUnavailable)
        raise kind(f"{what}: {why.strerror or why}") from why
