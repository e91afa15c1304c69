"""Sources: bytes to be stored, wherever they are now."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from typing_extensions import Buffer

from weightyard.errors import Conflict, NoSuchThing, NotAllowed, StoreFull
from weightyard.format.splitting import Piece


class Source(ABC):
    """A run of bytes that does not change while it is written. Thread-safe."""

    length: int

    @abstractmethod
    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill the buffer. Raises Conflict if the source turns out shorter than it was."""

    def read_at(self, offset: int, length: int) -> bytes:
        """A copy of some bytes."""
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def view(self, offset: int, length: int) -> memoryview | None:
        """The bytes themselves if they are in memory, else None."""
        return None


class MemorySource(Source):
    """Bytes in memory; they are never copied."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        self.length = self._data.nbytes

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = self._data[offset : offset + len(into)]

    def view(self, offset: int, length: int) -> memoryview | None:
        return self._data[offset : offset + length]


class FileSource(Source):
    """A file of this machine. Opened for each read, so that a folder may have any number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with translated(path):
            self.length = path.stat().st_size

    def read_into(self, offset: int, into: memoryview) -> None:
        with translated(self._path):
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_size != self.length:
                    raise Conflict(f"{self._path} changed while it was read: push it again")
                rest = into
                while rest and (done := os.preadv(file, [rest], offset)):
                    offset += done
                    rest = rest[done:]
                if rest:
                    raise Conflict(f"{self._path} became shorter while it was read: push it again")
            finally:
                os.close(file)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns what the system says of a file of this machine into the error tree, naming it."""
    try:
        yield
    except PermissionError as why:
        raise NotAllowed(f"{path}: {why.strerror}") from why
    except OSError as why:
        if why.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFull(f"{path}: {why.strerror}") from why
        raise NoSuchThing(f"{path}: {why.strerror}") from why


def piece_bytes(piece: Piece, sources: Sequence[Source]) -> memoryview:
    """The raw bytes of a piece: a view where they lie in one place in memory, else a copy."""
    if len(piece.parts) == 1:
        (part,) = piece.parts
        if (view := sources[part.source].view(part.start, part.length)) is not None:
            return view
    raw = np.empty(piece.raw_bytes, np.uint8).data  # not zeroed first: it is filled whole
    at = 0
    for part in piece.parts:
        sources[part.source].read_into(part.start, raw[at : at + part.length])
        at += part.length
    return raw
