"""HdfsTree: a folder of whole files in HDFS, read in ranges. Nothing is written."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from weightyard.errors import Conflict, FileMissing, NoSuchThing, StaleLocation
from weightyard.names import FilePath
from weightyard.settings import Settings
from weightyard.storage.hdfs.namenode import UnderConstruction
from weightyard.storage.hdfs.store import CHECKED_PATHS, HdfsStore
from weightyard.storage.retry import Retry
from weightyard.storage.store import Location, Read, ReadPath, StorePath


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A file as it was listed."""

    path: FilePath
    length: int
    modified_ms: int


class _Found(StorePath):
    """A path that was found by listing: people chose its names, so more signs are allowed."""

    __slots__ = ()

    def __post_init__(self) -> None:
        FilePath(self.text)


class HdfsTree:
    """Files below a folder of HDFS, or the one file. Thread-safe.

    They carry no checksums of their own, so HDFS's are checked: a wrong byte that came in here
    would be part of the model from then on.
    """

    def __init__(
        self,
        url: str,
        settings: Settings | None = None,
        *,
        read_paths: Sequence[ReadPath] = CHECKED_PATHS,
    ) -> None:
        settings = settings or Settings()
        self._url = url.rstrip("/")
        self._open = partial(_Listing, settings=settings, read_paths=read_paths)
        self._store = self._open(self._url)
        self._retry = Retry(deadline_s=settings.deadline_s)
        self._locations: dict[FilePath, Location] = {}
        self._lock = threading.Lock()

    def files(self) -> list[TreeFile]:
        """All files, by name. Raises NoSuchThing, NotAllowed, InvalidName, Retryable."""
        found = self._retry.run("list", self._store.files)
        if found is None:
            found = [self._one_file()]
        if not found:
            raise NoSuchThing(f"{self._url} has no files")
        return sorted(found, key=lambda file: file.path)

    def require_closed(self, file: TreeFile) -> None:
        """Raises Conflict if someone still writes the file, or if it is not the one listed.

        A listing does not tell: it has the length of the blocks that are whole, which is 0 for most
        of what is being written. The answer that tells is kept for whoever reads the file.
        """
        self._retry.run("locate", lambda: self._locate(file))

    def read_into(self, file: TreeFile, offset: int, into: memoryview) -> None:
        """Fill the buffer. Raises Conflict if the file is not the one that was listed."""

        def attempt() -> None:
            location = self._locate(file)
            try:
                served = self._store.read(location, [Read(offset, into)])
            except StaleLocation:
                self._forget(file)
                raise
            except FileMissing:  # of ways that open a file by its name
                raise self._gone(file) from None
            if served.path not in (ReadPath.SHORT_CIRCUIT, ReadPath.DIRECT):
                # Other ways open the file by its name, which may be another file's by now.
                self._require_same(file)

        if len(into):
            self._retry.run("read", attempt)

    def close(self) -> None:
        self._store.close()

    def _one_file(self) -> TreeFile:
        """The URL names a file: go on from the folder it lies in."""
        folder, _, name = self._url.rpartition("/")
        path = FilePath(name)
        self._store.close()
        self._store = self._open(folder)
        return self._retry.run("stat", lambda: self._store.file(path))

    def _locate(self, file: TreeFile) -> Location:
        with self._lock:
            known = self._locations.get(file.path)
        if known is None:
            # HDFS blocks never change, so direct reads of those located see one state of the file.
            try:
                known = self._store.locate(_Found(file.path.text))
            except FileMissing:
                raise self._gone(file) from None
            except UnderConstruction:
                raise self._being_written(file) from None
            self._require_same(file)
            with self._lock:
                self._locations[file.path] = known
        return known

    def _forget(self, file: TreeFile) -> None:
        with self._lock:
            self._locations.pop(file.path, None)

    def _require_same(self, file: TreeFile) -> None:
        try:
            now = self._store.file(file.path)
        except FileMissing:
            raise self._gone(file) from None
        if now != file:
            raise Conflict(f"{self._url}: {file.path} changed while it was read: push it again")

    def _gone(self, file: TreeFile) -> Conflict:
        return Conflict(f"{self._url}: {file.path} is gone: push it again")

    def _being_written(self, file: TreeFile) -> Conflict:
        where = shlex.quote(f"{self._store.url.rstrip('/')}/{file.path}")
        return Conflict(
            f"{self._url}: {file.path} is still being written: push it again when its writer is "
            "done; if that has died, write the file anew, or have HDFS close it as far as it got: "
            f"hdfs debug recoverLease -retries 10 -path {where}; or leave it out (--exclude)"
        )


class _Listing(HdfsStore):
    """A store's folder seen as files of any name."""

    def files(self) -> list[TreeFile] | None:
        """All files below the folder; None if it is a file itself. Raises NoSuchThing."""
        try:
            if not self._namespace.status(self._root).isdir:
                return None
        except FileMissing:
            raise NoSuchThing(f"{self.url} is not there") from None
        skip = len(self._cluster.root) + 1
        return [
            TreeFile(FilePath(status.path[skip:]), status.length, status.modification_time)
            for status in self._namespace.list(self._root)
        ]

    def file(self, path: FilePath) -> TreeFile:
        status = self._namespace.status(f"{self._cluster.root}/{path}")
        return TreeFile(path, status.length, status.modification_time)
