"""Spool: bounded temporary space for files on their way into the store."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightyard.closing import Closing
from weightyard.errors import StoreFull, StoreUnavailable, TooLarge


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
        """Take space for a file. Raises TooLarge if it needs more than all there is, and
        StoreUnavailable if others use the space now."""
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


class SpooledFile(Closing):
    """A file being received. It is gone when it is closed, whatever happened.

    It has no name in its folder, so a process that is killed leaves none behind.
    """

    def __init__(self, spool: Spool, folder: Path) -> None:
        self._spool = spool
        self.length = 0
        with _told():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - until it is closed

    def write(self, data: bytes) -> None:
        """Append. Raises TooLarge, StoreUnavailable, StoreFull."""
        self._spool.take(len(data), self.length)
        self.length += len(data)
        with _told():
            self._file.write(data)

    def finish(self) -> Path:
        """End writing. Returns a path from which this process can read it. Raises StoreFull."""
        with _told():
            self._file.flush()
        return Path(f"/dev/fd/{self._file.fileno()}")

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:
            pass  # the disk is full: what was buffered is not wanted any more
        finally:
            self._spool.give_back(self.length)
            self.length = 0


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as why:
        raise StoreFull(f"the service's temporary space: {os.strerror(why.errno or 0)}") from why
