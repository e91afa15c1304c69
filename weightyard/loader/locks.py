"""Locks between the processes of a node. When a process dies, its locks are free."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Self

from weightyard.closing import Closing
from weightyard.errors import DeadlineExceeded
from weightyard.transfer.source import translated

_PAUSE_S = 0.02


class Lock(Closing):
    """A lock on a file, shared or alone; held until closed or forgotten."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._close = weakref.finalize(self, os.close, handle)

    @classmethod
    def take(cls, file: Path, *, shared: bool, make: bool = True) -> Self | None:
        """Take the lock if nobody stands in the way; else None, at once.

        Who holds it alone may remove the file: a lock on a file that was removed does not count.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
        with translated(file):
            while True:
                try:
                    handle = os.open(file, flags, 0o600)
                except FileNotFoundError:
                    if make:
                        raise
                    return None
                lock = cls(handle)
                if not lock._try(fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                    lock.close()
                    return None
                if lock.is_on(file):
                    return lock
                lock.close()

    @classmethod
    def wait(cls, file: Path, seconds: float) -> Self:
        """Have the lock alone, when its turn comes. Raises DeadlineExceeded."""
        end = time.monotonic() + seconds
        while (lock := cls.take(file, shared=False)) is None:
            if time.monotonic() > end:
                raise DeadlineExceeded(f"{file} is locked by another process for {seconds:.0f} s")
            time.sleep(_PAUSE_S)
        return lock

    def share(self) -> bool:
        """Let others in; False if another process was quicker and has it alone now."""
        return self._try(fcntl.LOCK_SH)

    def is_on(self, file: Path) -> bool:
        """Whether this is the file the lock is on, and not another that took its name."""
        try:
            return os.path.samestat(os.fstat(self._handle), file.lstat())
        except FileNotFoundError:
            return False

    def touch(self) -> None:
        """Show those who wait a sign of life."""
        os.utime(self._handle)

    def write(self, note: str) -> None:
        """Leave a note for those who wait."""
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, note.encode(), 0)

    def close(self) -> None:
        self._close()

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
