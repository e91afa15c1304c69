"""Spool: bounded temporary space for files on their way into the store."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from weightyard.errors import StoreFull, StoreUnavailable, TooLarge

if TYPE_CHECKING:
    from tempfile import _TemporaryFileWrapper


class Spool:
    """A folder that never holds more than so many bytes. Thread-safe."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def open(self, announced_bytes: int | None) -> SpooledFile:
        """A new file. Raises TooLarge for one announced to be longer than all of the space."""
        if announced_bytes is not None:
            self._require_possible(announced_bytes)
        return SpooledFile(self, self._folder)

    def take(self, more_bytes: int, so_far_bytes: int) -> None:
        """Raises TooLarge if one file needs it all, StoreUnavailable if others use it now."""
        self._require_possible(so_far_bytes + more_bytes)
        with self._lock:
            if self._used_bytes + more_bytes > self._limit_bytes:
                raise StoreUnavailable("the service's temporary space is in use: try again later")
            self._used_bytes += more_bytes

    def give_back(self, freed_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= freed_bytes

    def _require_possible(self, file_bytes: int) -> None:
        if file_bytes > self._limit_bytes:
            raise TooLarge(
                f"a file sent through the service has at most {self._limit_bytes} bytes: push it "
                "from a host that reaches the store"
            )


class SpooledFile:
    """A file being received; gone when its context ends, whatever happened."""

    def __init__(self, spool: Spool, folder: Path) -> None:
        self._spool = spool
        self._folder = folder
        self._file: _TemporaryFileWrapper[bytes] | None = None
        self.length = 0

    @property
    def path(self) -> Path:
        assert self._file is not None
        return Path(self._file.name)

    def write(self, data: bytes) -> None:
        """Append. Raises TooLarge, StoreUnavailable, StoreFull."""
        assert self._file is not None
        self._spool.take(len(data), self.length)
        self.length += len(data)
        try:
            self._file.write(data)
        except OSError as why:
            raise StoreFull(
                f"the service's temporary space: {os.strerror(why.errno or 0)}"
            ) from why

    def finish(self) -> Path:
        """All was written; the path to read it from."""
        assert self._file is not None
        try:
            self._file.flush()
        except OSError as why:
            raise StoreFull(
                f"the service's temporary space: {os.strerror(why.errno or 0)}"
            ) from why
        return self.path

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = tempfile.NamedTemporaryFile(dir=self._folder, prefix="file-")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            self._file.close()
        except OSError:
            pass  # the disk is full: what was buffered is not wanted any more
        finally:
            self._spool.give_back(self.length)
