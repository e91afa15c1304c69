"""Known: the names of the blocks of files on this host, since this user hashed them before.

A file with the same stamp is not read to find out the same names again (docs/design/0013). The
cache has one small record for each file; losing it costs a reading.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from weightyard.closing import Closing
from weightyard.errors import YardError
from weightyard.format.block import MIB
from weightyard.logs import Log
from weightyard.names import BlockId
from weightyard.transfer.private import keep_newest, private_folder, read_small, write_small
from weightyard.transfer.source import FileSource, Span
from weightyard.transfer.stamp import Stamp, marking_devices

_log = Log(__name__)

FOLDER_NAME = "known"

LEAST_BYTES = MIB
"""Of a file that is remembered: to hash a shorter one takes hardly longer than to look it up."""

SETTLED_NS = 60_000_000_000
"""How long ago a file must have been changed to be remembered. The system has then written it to
the disk by itself, and a later write cannot have the same time by its clock."""

_FORMAT = 1
_MAX_RECORDS = 4096
_MAX_RECORD_BYTES = 16 << 20
_MAX_BYTES = 256 << 20
"""Of all records together."""

_CHECK_BYTES = 16


class _Block(msgspec.Struct, frozen=True, array_like=True):
    """A block of a file: where its bytes are, and its name."""

    start: int
    length: int
    name: bytes


class _Record(msgspec.Struct, frozen=True, array_like=True):
    format: int
    stamp: Stamp
    blocks: tuple[_Block, ...]


class KnownFile(FileSource):
    """A file whose blocks may be known. Thread-safe."""

    def __init__(self, path: Path, records: Path, *, rehash: bool) -> None:
        looked_ns = time.time_ns()
        super().__init__(path)
        self._record = records / f"{self.stamp.device:x}-{self.stamp.inode:x}"
        self._recalled = {} if rehash else _recall(self._record, self.stamp)
        self.names = dict(self._recalled)
        self._shows_changes = bool(self._recalled) or self._settle(looked_ns)

    def _settle(self, now_ns: int) -> bool:
        """Whether every later change of the file will show in its stamp. Before anything is read.

        A write through a mapping shows if it is the first to its page since the page was written to
        the disk. The system did that long ago, as a rule; it is asked to finish it now.
        """
        if self.length < LEAST_BYTES or now_ns - self.stamp.changed_ns < SETTLED_NS:
            return False
        if self.stamp.device not in marking_devices():
            return False
        with suppress(OSError, YardError), self._opened() as file:
            os.fdatasync(file)
            return True
        return False

    def keep(self) -> bool:
        """Remember what was learned, unless the file has changed. Returns whether it did.

        Raises OSError, YardError.
        """
        names = dict(self.names or {})
        if not self._recalled.items() <= names.items():
            self._record.unlink(missing_ok=True)  # it said what was wrong
            return False
        if names == self._recalled or not self._shows_changes:
            return False
        if Stamp.of(self._path.stat()) != self.stamp:
            return False
        private_folder(self._record.parent)
        blocks = tuple(_Block(*span, name.raw) for span, name in sorted(names.items()))
        body = msgspec.msgpack.encode(_Record(_FORMAT, self.stamp, blocks))
        write_small(self._record, _check(body) + body)
        return True


class KnownFiles(Closing):
    """Opens files, and remembers on closing what was learned of them. Never fails a push."""

    def __init__(self, cache: Path, *, rehash: bool = False) -> None:
        """`rehash`: believe nothing that was remembered, but remember."""
        self._records = cache.expanduser().absolute() / FOLDER_NAME
        self._rehash = rehash
        self._opened: list[KnownFile] = []

    def open(self, path: Path) -> FileSource:
        """Raises what `FileSource` raises."""
        file = KnownFile(path, self._records, rehash=self._rehash)
        self._opened.append(file)
        return file

    def close(self) -> None:
        opened, self._opened = self._opened, []
        try:
            kept = [file.keep() for file in opened]
            if any(kept):
                keep_newest(self._records, _MAX_RECORDS, _MAX_BYTES)
        except (YardError, OSError) as why:
            _log.info("node.cannot_remember", folder=self._records, reason=why)


def _recall(record: Path, stamp: Stamp) -> dict[Span, BlockId]:
    """What is known of a file that has this stamp."""
    stored = read_small(record, _MAX_RECORD_BYTES) or b""
    check, body = stored[:_CHECK_BYTES], stored[_CHECK_BYTES:]
    # A name that the disk changed could be that of another block, which the store has.
    if check != _check(body):
        return {}
    with suppress(YardError, msgspec.DecodeError):
        found = msgspec.msgpack.decode(body, type=_Record)
        if (found.format, found.stamp) == (_FORMAT, stamp):
            return {(one.start, one.length): BlockId.of(one.name) for one in found.blocks}
    return {}


def _check(body: bytes) -> bytes:
    return blake3(body).digest(_CHECK_BYTES)
