"""Examining files: every byte of every replica, compared with what it should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from weightyard.errors import (
    BlockCorrupt,
    Damaged,
    FileMissing,
    ManifestInvalid,
    PackInvalid,
    ReplicasDamaged,
    Retryable,
    StaleLocation,
    UnknownFormat,
    YardError,
)
from weightyard.format import manifest as manifests
from weightyard.format.pack import HEADER_BYTES, Placement, check_header
from weightyard.names import Digest, PackId
from weightyard.storage import layout
from weightyard.storage.store import Location, Read, Replica, Store
from weightyard.transfer.reader import pack_index
from weightyard.transfer.verifying import require_block, require_stored


@dataclass(slots=True)
class Copy:
    """One replica of a file, as examined."""

    replica: Replica | None
    """None: the store cannot be told which one to read, or did not say which one it read."""
    flaw: str | None = None
    """What is wrong with it, in short."""
    bad: set[int] = field(default_factory=set)
    """Offsets of the blocks that are wrong in it."""
    is_reachable: bool = True

    @property
    def name(self) -> str:
        return self.replica.datanode if self.replica is not None else "some replica"


@dataclass(frozen=True, slots=True)
class Examined:
    """What examining a file found."""

    copies: Sequence[Copy]
    read_bytes: int

    @property
    def bad(self) -> frozenset[int]:
        """Offsets of blocks that no replica has right."""
        readable = [copy.bad for copy in self.copies if copy.is_reachable]
        return frozenset(set.intersection(*readable)) if readable else frozenset()

    @property
    def is_complete(self) -> bool:
        """Whether every replica was read. One that cannot be reached now may be whole."""
        return bool(self.copies) and all(copy.is_reachable for copy in self.copies)

    @property
    def is_flawless(self) -> bool:
        """Whether every replica that was read is as it should be from end to end."""
        reached = [copy for copy in self.copies if copy.is_reachable]
        return bool(reached) and all(copy.flaw is None for copy in reached)


def examine_pack(store: Store, pack: PackId, placements: Sequence[Placement]) -> Examined:
    """Read all of a pack from each replica: blocks, header and footer.

    Every replica's checksums are checked; a block's id only until one replica has it right.

    Raises FileMissing, and what the store raises if it cannot say where the pack is.
    """
    location = store.locate(layout.pack(pack))
    ordered = sorted(placements, key=lambda placement: placement.offset)
    copies: list[Copy] = []
    proven: set[int] = set()
    done = 0
    for replica in _replicas(location):
        reading = _CopyOfPack(store, location, replica, pack, ordered, proven)
        copies.append(reading.examine())
        done += reading.read_bytes
    return Examined(copies, done)


def examine_manifest(store: Store, digest: Digest) -> Examined:
    """Read a manifest from each replica and check it whole. Raises FileMissing."""
    location = store.locate(layout.manifest(digest))
    copies: list[Copy] = []
    for replica in _replicas(location):
        copy = Copy(replica)
        try:
            manifests.decode(_read(store, location, copy, 0, location.length), digest)
        except (ManifestInvalid, ReplicasDamaged, UnknownFormat) as why:
            copy.flaw = str(why)
            copy.bad.add(0)
        except Retryable as why:
            copy.flaw, copy.is_reachable = str(why), False
        copies.append(copy)
    return Examined(copies, location.length * len(copies))


def read_good_block(store: Store, placement: Placement) -> memoryview:
    """The stored bytes of a block, from a replica that has them right.

    Raises BlockCorrupt or what the last replica said, if none has.
    """
    location = store.locate(layout.pack(placement.pack))
    encoding = placement.encoding
    failed: YardError = BlockCorrupt(f"block {encoding.block}: no replica has it")
    for replica in _replicas(location):
        try:
            stored = _read(store, location, Copy(replica), placement.offset, encoding.stored_bytes)
            _check_block(placement, stored, whole=encoding.base is None)
        except (Retryable, Damaged) as why:
            failed = why
        else:
            return stored
    raise failed


def read_good_manifest(store: Store, digest: Digest) -> bytes | None:
    """A manifest's stored bytes from a replica that has them right, or None."""
    location = store.locate(layout.manifest(digest))
    for replica in _replicas(location):
        try:
            stored = _read(store, location, Copy(replica), 0, location.length)
            manifests.decode(stored, digest)
        except (Retryable, ManifestInvalid, ReplicasDamaged):
            continue
        return bytes(stored)
    return None


class _CopyOfPack:
    """Examines one replica of a pack."""

    def __init__(
        self,
        store: Store,
        location: Location,
        replica: Replica | None,
        pack: PackId,
        placements: Sequence[Placement],
        proven: set[int],
    ) -> None:
        self.read_bytes = 0
        self._store = store
        self._location = location
        self._pack = pack
        self._placements = placements
        self._proven = proven
        self._copy = Copy(replica)

    def examine(self) -> Copy:
        copy = self._copy
        try:
            for check in (self._check_blocks, self._check_head, self._check_footer):
                check()
        except Retryable as why:
            copy.flaw, copy.is_reachable = str(why), False
        except FileMissing:  # shorter than it was when it was located
            copy.flaw = "ends too early"
        return copy

    def _check_blocks(self) -> None:
        for placement in self._placements:
            encoding = placement.encoding
            if placement.end > self._location.length:
                self._found(placement.offset, f"block {encoding.block} lies past the end")
                continue
            whole = encoding.base is None and placement.offset not in self._proven
            try:
                _check_block(placement, self._read(placement.offset, encoding.stored_bytes), whole)
            except (BlockCorrupt, ReplicasDamaged) as why:
                self._found(placement.offset, str(why))
            else:
                self._proven.add(placement.offset)

    def _check_head(self) -> None:
        try:
            check_header(self._read(0, min(HEADER_BYTES, self._location.length)))
        except (PackInvalid, ReplicasDamaged, UnknownFormat) as why:
            self._found(None, str(why))

    def _check_footer(self) -> None:
        try:
            found = pack_index(self._pack, self._location.length, self._read)
            if found != tuple(self._placements):
                self._found(None, "its footer is not what the registry knows of it")
        except (PackInvalid, ReplicasDamaged, UnknownFormat) as why:
            self._found(None, str(why))

    def _found(self, offset: int | None, flaw: str) -> None:
        if offset is not None:
            self._copy.bad.add(offset)
        self._copy.flaw = self._copy.flaw or flaw

    def _read(self, offset: int, length: int) -> memoryview:
        self.read_bytes += length
        return _read(self._store, self._location, self._copy, offset, length)


def _check_block(placement: Placement, stored: memoryview, whole: bool) -> None:
    """Check a block's checksums; with `whole` also that the raw bytes fit its id and fold."""
    check = require_block if whole else require_stored
    check(placement.encoding, stored)


def _replicas(location: Location) -> Iterator[Replica | None]:
    """The replicas to read one by one; None where they cannot be told apart."""
    if len(location.spans) == 1:
        yield from location.spans[0].replicas
    else:
        yield None


def _read(store: Store, location: Location, copy: Copy, offset: int, length: int) -> memoryview:
    into = np.empty(length, np.uint8).data
    try:
        served = store.read(location, [Read(offset, into)], replica=copy.replica)
    except StaleLocation:
        served = store.read(store.locate(location.path), [Read(offset, into)], replica=copy.replica)
    copy.replica = served.replica if copy.replica is not None else None
    return into
