"""Replicas as files on a DataNode's disk, and how to damage one."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightyard.errors import ClusterFailed
from weightyard.testing.cluster.daemon import Daemon

_CRC32C = 2
_META_HEADER = struct.Struct(">hBi")
"""Version, checksum type, bytes per checksum: what a block's .meta file begins with."""


@dataclass(frozen=True, slots=True)
class ReplicaFile:
    """One replica of one HDFS block, as it lies on disk."""

    datanode: Daemon
    block_index: int
    """Which block of the file it is, from 0."""
    block_id: int
    path: Path
    meta: Path
    """The DataNode's checksums of it."""


def find_replica_files(
    located: dict[str, Any], datanodes: Iterable[Daemon]
) -> Iterator[ReplicaFile]:
    """The replica files of every block of a `LocatedBlocks` answer."""
    for index, block in enumerate(located["locatedBlocks"]):
        block_id = block["block"]["blockId"]
        stamp = block["block"]["generationStamp"]
        for datanode in datanodes:
            for path in datanode.folder.glob(f"*/current/*/current/*/**/blk_{block_id}"):
                meta = path.with_name(f"{path.name}_{stamp}.meta")
                yield ReplicaFile(datanode, index, block_id, path, meta)


def damage(replica: ReplicaFile, offset: int = 0, length: int = 1, *, hide: bool = False) -> None:
    """Flip every bit of some bytes of a replica on disk, while its DataNode runs.

    HDFS's own clients notice by the DataNode's checksums and read another replica. Java's clients
    report this one to the NameNode if another is right; hdfs-native reports nothing. A reader that
    asks for no checksums gets the wrong bytes. With `hide` the checksums are made to fit, as if the
    damage had been done before they were computed: then nobody notices.
    """
    with replica.path.open("r+b") as file:
        file.seek(offset)
        was = file.read(length)
        if len(was) != length:
            raise ClusterFailed(f"{replica.path} ends before byte {offset + length}")
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in was))
    if hide:
        _renew_checksums(replica, offset, length)


def _renew_checksums(replica: ReplicaFile, offset: int, length: int) -> None:
    with replica.meta.open("r+b") as meta, replica.path.open("rb") as data:
        _, kind, chunk_bytes = _META_HEADER.unpack(meta.read(_META_HEADER.size))
        if kind != _CRC32C:
            raise ClusterFailed(f"{replica.meta} has checksums of type {kind}, not CRC32C")
        for chunk in range(offset // chunk_bytes, (offset + length - 1) // chunk_bytes + 1):
            data.seek(chunk * chunk_bytes)
            meta.seek(_META_HEADER.size + 4 * chunk)
            meta.write(struct.pack(">I", _crc32c(data.read(chunk_bytes))))


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
