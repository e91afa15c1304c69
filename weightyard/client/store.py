"""ServiceStore: writes into the store behind a service, through the service."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

from typing_extensions import Buffer

from weightyard.client.upload import HttpUpload
from weightyard.errors import FileMissing, Unsupported
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import (
    Again,
    FileOptions,
    FileStat,
    Location,
    Ownership,
    Read,
    Replica,
    Served,
    Stage,
    StagedFile,
    Store,
    StorePath,
)
from weightyard.transfer.source import MemorySource


class ServiceStore(Store):
    """Publishes the packs and the manifest of one upload; nothing else can be done with it.

    A staged file is kept in memory until it is published. The service answers only when a file is
    checked, and on as many DataNodes as the version wants; it does not tell on which ones.
    """

    replicates = False

    def __init__(self, upload: HttpUpload, url: str) -> None:
        """`url`: the service's, for errors."""
        self.url = url
        self._upload = upload
        self._staged: dict[StorePath, bytearray] = {}
        self._published: dict[StorePath, FileStat] = {}

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        """`options` are not used: the service knows them since the upload was opened."""
        return _MemoryStage(path, self._staged)

    def publish(self, staged: StagedFile, path: StorePath) -> None:
        """Raises as the service does: PackInvalid, BlockCorrupt, BlockMissing, UploadExpired."""
        content = self._staged.get(staged.path)
        if content is None:
            raise FileMissing(f"{staged.path} was not staged")
        self._upload.put_stored(path, MemorySource(content))
        del self._staged[staged.path]  # not before: what was not published stays staged
        self._published[path] = FileStat(path, staged.length, 1, time.time())

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        """Only for files published here. Has no replicas, as the service tells of none."""
        return Location(path, self.stat(path).length, ())

    def stat(self, path: StorePath) -> FileStat:
        """Only for files published here."""
        if path not in self._published:
            raise FileMissing(f"{path} was not published here")
        return self._published[path]

    def delete(self, path: StorePath) -> bool:
        """Only for files staged here."""
        return self._staged.pop(path, None) is not None

    def init(self, ownership: Ownership | None = None) -> None:
        self._refuse()

    def list(self, folder: StorePath) -> Iterator[FileStat]:
        self._refuse()

    def top(self) -> Sequence[StorePath]:
        self._refuse()

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        self._refuse()

    def adjust(self, path: StorePath, options: FileOptions) -> None:
        self._refuse()

    def close(self) -> None:
        self._staged.clear()

    def _refuse(self) -> NoReturn:
        raise Unsupported(f"this cannot be done with a store through the service {self.url}")


class _MemoryStage(Stage):
    def __init__(self, path: StorePath, staged: dict[StorePath, bytearray]) -> None:
        self._path = path
        self._staged = staged
        self._content: bytearray | None = bytearray()

    def write(self, data: Buffer, again: Again | None = None) -> None:
        assert self._content is not None
        self._content += memoryview(data).cast("B")

    def close(self) -> StagedFile:
        assert self._content is not None
        content, self._content = self._content, None
        self._staged[self._path] = content
        return StagedFile(self._path, len(content))

    def abort(self) -> None:
        self._content = None
