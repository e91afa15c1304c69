"""Sink: the interface of a way to write a new HDFS file."""

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
        """Make the file whole. After StoreUnavailable it may be whole, or not."""

    @abstractmethod
    def leave(self) -> None:
        """Give up what it holds. Never raises; idempotent."""


class CannotWrite(Exception):
    """This way to write does not work here for any file: take the next one."""


Way = Callable[[str, int, int | None, int | None], Sink]
"""Opens a new file, given path, mode, replication and block size; None: HDFS's default.

Raises CannotWrite, FileMissing (its folder), AlreadyThere and what else HDFS refuses.
"""
