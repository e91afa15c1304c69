"""Sink: what a way to write a new file of HDFS has to offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Sink(ABC):
    """Where a new file's bytes go. Call order: write … write → close; leave at any time."""

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append bytes; the memory is the caller's again. Raises StoreUnavailable, StoreFull."""

    @abstractmethod
    def close(self) -> None:
        """Make the file whole. Raises StoreUnavailable: it may be, or not."""

    @abstractmethod
    def leave(self) -> None:
        """Give up what it holds. Never raises; idempotent."""


class CannotWrite(Exception):
    """This way to write does not work here, for no file: the next one is to be taken."""


Way = Callable[[str, int, int | None, int | None], Sink]
"""Opens a new file, of path, mode, replication and block size; None: as HDFS has it.

Raises CannotWrite, FileMissing (its folder), AlreadyThere and what else HDFS refuses.
"""
