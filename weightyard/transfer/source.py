"""Sources: bytes to be stored, wherever they are now."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from typing_extensions import Buffer

from weightyard.errors import (
    AlreadyThere,
    Conflict,
    NoSuchThing,
    NotAllowed,
    StoreFull,
    StoreUnavailable,
    YardError,
)
from weightyard.format.block import MIB, block_id_of
from weightyard.format.splitting import Piece
from weightyard.names import BlockId
from weightyard.transfer.stamp import Stamp

_PASSING_BYTES = MIB
"""How much is read at a time of a file that is only looked at: it fits a core's own cache."""

_BY_ERRNO: dict[int, type[YardError]] = {
    errno.ENOENT: NoSuchThing,
    errno.ENOTDIR: NoSuchThing,
    errno.ELOOP: NoSuchThing,
    errno.EISDIR: NoSuchThing,
    errno.ENAMETOOLONG: NoSuchThing,
    errno.EEXIST: AlreadyThere,
    errno.EACCES: NotAllowed,
    errno.EPERM: NotAllowed,
    errno.EROFS: NotAllowed,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EFBIG: StoreFull,
}


Span: TypeAlias = tuple[int, int]
"""Where a run of bytes begins, and its length."""


class Source(ABC):
    """A run of bytes, which should not change while it is written. Thread-safe.

    If it does, what is stored is a mixture or nothing, but every block is what its name says.
    """

    length: int
    names: dict[Span, BlockId] | None = None
    """The blocks that runs of its bytes are, where that may be believed without reading them. Who
    hashes a run adds it; who finds that one of them is wrong clears them all."""

    @abstractmethod
    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill the buffer. Raises Conflict if the source is seen to have changed."""

    def read_at(self, offset: int, length: int) -> bytes:
        """A copy of some bytes."""
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def view(self, offset: int, length: int) -> memoryview | None:
        """The bytes themselves if they are in memory, else None. Others may change them."""
        return None

    def passing(self, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes in order, to be looked at once: each part is overwritten by the next.

        Raises Conflict if the source is seen to have changed.
        """
        view = self.view(offset, length)
        if view is None:
            view = np.empty(length, np.uint8).data
            self.read_into(offset, view)
        yield view


class MemorySource(Source):
    """Bytes in memory, of which no copy is kept."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        self.length = self._data.nbytes

    def read_into(self, offset: int, into: memoryview) -> None:
        # Not by assigning memoryviews, which keeps Python's other threads from running meanwhile.
        part = np.frombuffer(self._data[offset : offset + len(into)], np.uint8)
        np.copyto(np.frombuffer(into, np.uint8), part)

    def view(self, offset: int, length: int) -> memoryview | None:
        return self._data[offset : offset + length]


class FileSource(Source):
    """A file of this machine. Opened for each read, so that a folder may have any number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with translated(path):
            self.stamp = Stamp.of(path.stat())
        self.length = self.stamp.bytes

    def read_into(self, offset: int, into: memoryview) -> None:
        with self._opened() as file:
            self._fill(file, offset, into)

    def passing(self, offset: int, length: int) -> Iterator[memoryview]:
        memory = np.empty(min(length, _PASSING_BYTES), np.uint8).data
        with self._opened() as file:
            for start in range(0, length, _PASSING_BYTES):
                into = memory[: length - start]
                self._fill(file, offset + start, into)
                yield into

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with translated(self._path):
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield file
            finally:
                os.close(file)

    def _fill(self, file: int, offset: int, into: memoryview) -> None:
        rest = into
        while rest and (done := os.preadv(file, [rest], offset)):
            offset += done
            rest = rest[done:]
        # Looked at last, so that a change while it was read is noticed too. Not by the whole stamp:
        # a new name or mode changes that as well.
        now = Stamp.of(os.fstat(file))
        if rest or (now.bytes, now.modified_ns) != (self.stamp.bytes, self.stamp.modified_ns):
            raise Conflict(f"{self._path} changed while it was read: push it again")


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns the system's errors about a file of this machine into ours, which name the file.

    Those that are not about the file, such as a failing disk or too many open files, are Retryable.
    """
    try:
        yield
    except OSError as why:
        kind = _BY_ERRNO.get(why.errno or 0, StoreUnavailable)
        raise kind(f"{path}: {why.strerror or why}") from why


def piece_view(piece: Piece, sources: Sequence[Source]) -> memoryview | None:
    """The raw bytes of a piece where they lie, if that is one place in memory."""
    if len(piece.parts) != 1:
        return None
    (part,) = piece.parts
    return sources[part.source].view(part.start, part.length)


def known_id(piece: Piece, sources: Sequence[Source]) -> BlockId | None:
    """The name of the block a piece becomes, if it is known without reading it."""
    if len(piece.parts) != 1:
        return None
    (part,) = piece.parts
    return (sources[part.source].names or {}).get((part.start, part.length))


def learn_id(piece: Piece, sources: Sequence[Source], block: BlockId) -> None:
    """Have the source of a piece know the name of the block it becomes."""
    if len(piece.parts) == 1:
        (part,) = piece.parts
        if (names := sources[part.source].names) is not None:
            names[part.start, part.length] = block


def piece_id(piece: Piece, sources: Sequence[Source]) -> BlockId:
    """The name of the block a piece becomes. No copy of its bytes is kept."""
    if (known := known_id(piece, sources)) is not None:
        return known
    block = block_id_of(
        passing
        for part in piece.parts
        for passing in sources[part.source].passing(part.start, part.length)
    )
    learn_id(piece, sources, block)
    return block


def piece_bytes(piece: Piece, sources: Sequence[Source]) -> memoryview:
    """The raw bytes of a piece: a view where they lie in one place in memory, else a copy."""
    if (view := piece_view(piece, sources)) is not None:
        return view
    raw = np.empty(piece.raw_bytes, np.uint8).data  # not zeroed first: it is filled whole
    read_piece(piece, sources, raw)
    return raw


def read_piece(piece: Piece, sources: Sequence[Source], into: memoryview) -> None:
    """Copy the raw bytes of a piece into memory that is exactly as long."""
    at = 0
    for part in piece.parts:
        sources[part.source].read_into(part.start, into[at : at + part.length])
        at += part.length
