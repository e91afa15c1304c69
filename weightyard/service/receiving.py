"""Receiving files from those who cannot reach the store: split, encoded and packed here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightyard.errors import PackInvalid, Refused, UnderReplicated
from weightyard.format import manifest as manifests
from weightyard.format.assembly import manifest_of
from weightyard.format.block import Codec
from weightyard.format.manifest import Manifest
from weightyard.format.pack import Placement
from weightyard.format.splitting import Part, Piece, Split, split_file
from weightyard.names import FilePath, PackId
from weightyard.records import Publication
from weightyard.registry.registry import RegistryUpload
from weightyard.service.ranges import Span
from weightyard.service.sending import wanted_in
from weightyard.service.state import Service
from weightyard.storage import layout
from weightyard.storage.store import Store
from weightyard.transfer.reader import Reader, read_pack_index
from weightyard.transfer.source import FileSource
from weightyard.transfer.writer import Content, WriteOptions, Writer
from weightyard.wire import ReceivedFile

_MAX_CONFIG_BYTES = 1 << 20


def min_replicas(yard: Service, publication: Publication) -> int:
    return min(yard.min_replicas, publication.replication or yard.min_replicas)


def store_file(
    yard: Service,
    upload: RegistryUpload,
    publication: Publication,
    path: FilePath,
    file: Path,
) -> ReceivedFile:
    """Put a file into the store and remember for the upload which blocks it became."""
    source = FileSource(file)
    split = split_file(path, source.length, source.read_at, yard.bound.block_bytes)
    options = WriteOptions(
        replication=publication.replication,
        policy=publication.policy,
        min_replicas=min_replicas(yard, publication),
        threads=2,
        lanes=1,
    )
    writer = Writer(yard.store, upload, options)
    blocks = writer.write([Content(split, [source])])
    _, stored = manifests.encode(manifest_of([split], blocks))
    upload.put_file(path, stored)
    report = writer.report
    return ReceivedFile(
        path=path.text,
        bytes=source.length,
        new_bytes=report.new_bytes,
        stored_bytes=report.stored_bytes,
        packs_written=report.packs_written,
    )


def assemble(received: Sequence[bytes]) -> Manifest:
    """One version from the files received, each kept as a manifest of its own. Raises Refused."""
    if not received:
        raise Refused("no file was sent for this upload: PUT …/files/{path} first")
    files = [manifests.decode(stored, None) for stored in received]
    return manifest_of([_as_split(file) for file in files], [_blocks(file) for file in files])


def _as_split(file: Manifest) -> Split:
    pieces = tuple(Piece((Part(0, 0, block.raw_bytes),), Codec.RAW) for block in file.blocks)
    return Split(file.block_bytes, pieces, file.files, file.tensors)


def _blocks(file: Manifest) -> list[Any]:
    return [block.id for block in file.blocks]


def config_in(yard: Service, manifest: Manifest) -> dict[str, Any] | None:
    """The model's config.json, if it has one that is a JSON object of a sensible size."""
    for file in manifest.files:
        if file.path == "config.json" and 0 < file.bytes <= _MAX_CONFIG_BYTES:
            text = memoryview(bytearray(file.bytes))
            wanted = wanted_in(manifest, file, Span(0, file.bytes), text)
            Reader(yard.store, yard.registry, threads=2).read(wanted)
            try:
                config = json.loads(bytes(text), parse_constant=_refuse)
            except (ValueError, RecursionError):
                return None
            return config if isinstance(config, dict) else None
    return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def check_pack(
    store: Store,
    pack: PackId,
    pack_bytes: int,
    placements: Sequence[Placement],
    replicas: int,
) -> None:
    """Hold what a client says of a pack against the pack in the store: length, index, copies.

    Raises PackInvalid, FileMissing, UnderReplicated.
    """
    location = store.locate(layout.pack(pack))
    if location.length != pack_bytes:
        raise PackInvalid(f"pack {pack} has {location.length} bytes, not {pack_bytes}")
    found = min((len(span.replicas) for span in location.spans), default=replicas)
    if found < replicas:
        raise UnderReplicated(f"pack {pack} is on {found} DataNodes, {replicas} are required")
    if read_pack_index(store, pack) != tuple(placements):
        raise PackInvalid(f"pack {pack} does not hold what was said")
