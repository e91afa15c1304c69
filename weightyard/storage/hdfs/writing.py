"""New files of HDFS, written by the best way that works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from typing_extensions import Buffer

from weightyard.errors import StoreUnavailable, YardError
from weightyard.storage.hdfs.native import Namespace
from weightyard.storage.hdfs.remote import BlockTooSmall
from weightyard.storage.hdfs.sink import CannotWrite, Sink, Way

_MIB = 1024 * 1024


class Writing:
    """A file being written. Dropped without close it stays open: `abort` removes it."""

    def __init__(self, namespace: Namespace, path: str, sink: Sink) -> None:
        self._namespace = namespace
        self._path = path
        self._sink: Sink | None = sink
        self._written = 0

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._open().write(view)
        self._written += len(view)

    def close(self, length_told: Callable[[], int | None] = lambda: None) -> int:
        """Close the file, and see that the NameNode has its length. Returns that.

        `length_told` saves a call just for this, if it knows the length; None: it does not.
        """
        self._open().close()
        length = length_told()
        if length is None:
            length = self._namespace.status(self._path).length
        if length != self._written:
            raise StoreUnavailable(f"{self._path}: wrote {self._written}, has {length} bytes")
        self._sink = None
        return length

    def abort(self) -> None:
        if self._sink is None:
            return
        self._sink.leave()
        self._sink = None
        with suppress(YardError):
            self._namespace.delete(self._path)

    def _open(self) -> Sink:
        if self._sink is None:
            raise ValueError(f"{self._path} is closed")
        return self._sink


def create(
    namespace: Namespace,
    ways: Sequence[Way],
    path: str,
    folder_mode: int,
    replication: int | None,
    planned_bytes: int | None,
) -> Writing:
    """Open a new file, laid out so that what is planned fits one HDFS block."""

    def open_with(block_bytes: int | None) -> Sink:
        *others, last = ways
        for way in others:
            with suppress(CannotWrite):
                return way(path, folder_mode & 0o666, replication, block_bytes)
        return last(path, folder_mode & 0o666, replication, block_bytes)

    def open_planned() -> Sink:
        if planned_bytes is None:
            return open_with(None)
        # HDFS charges a whole block to the quota while one is written, so no larger than
        # needed; and at least 1 MiB, the smallest that a NameNode allows unless told otherwise.
        try:
            return open_with(max(1, -(-planned_bytes // _MIB)) * _MIB)
        except BlockTooSmall:
            return open_with(None)  # the default size is not below the minimum

    namespace.make_folder(path.rpartition("/")[0], folder_mode)  # a new upload's is not there yet
    return Writing(namespace, path, namespace.in_folder(path, folder_mode, open_planned))
