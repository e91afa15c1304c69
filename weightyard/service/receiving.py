"""Receiving, from clients that cannot reach the store: finished packs, and files to be packed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightyard.errors import (
    AlreadyThere,
    BlockMissing,
    PackInvalid,
    Refused,
)
from weightyard.format import manifest as manifests
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, Codec, Encoding
from weightyard.format.manifest import Manifest
from weightyard.format.pack import HEADER_BYTES, Placement, check_header
from weightyard.format.splitting import Part, Piece, Split
from weightyard.names import Digest, FilePath, PackId
from weightyard.records import Publication
from weightyard.registry.upload import RegistryUpload
from weightyard.service.ranges import Span
from weightyard.service.sending import wanted_in
from weightyard.service.state import Service
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, Store
from weightyard.transfer.durable import (
    REPLICAS_TIMEOUT_S,
    least_replicas,
    require_replicas,
    too_few,
)
from weightyard.transfer.folder import split_source
from weightyard.transfer.gather import MAX_CONFIG_BYTES, parsed_config
from weightyard.transfer.plan import Wanted
from weightyard.transfer.publish import store_manifest
from weightyard.transfer.reader import Reader, pack_index, read_pack_index
from weightyard.transfer.source import FileSource
from weightyard.transfer.verifying import require_block
from weightyard.transfer.writer import Content, WriteOptions, Writer
from weightyard.wire import ReceivedFile

_PIECE_BYTES = MIB


def store_file(
    yard: Service,
    upload: RegistryUpload,
    publication: Publication,
    path: FilePath,
    file: Path,
) -> ReceivedFile:
    """Put a file into the store and remember for the upload which blocks it became."""
    source = FileSource(file)
    split = split_source(path, source, yard.bound.block_bytes)
    options = WriteOptions(
        replication=publication.replication,
        policy=publication.policy,
        min_replicas=least_replicas(yard.store, publication.replication),
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
    """One manifest from those of the files received, each of which has its own. Raises Refused."""
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
        if file.path == "config.json" and 0 < file.bytes <= MAX_CONFIG_BYTES:
            text = memoryview(bytearray(file.bytes))
            wanted = wanted_in(manifest, file.extents, Span(0, file.bytes), text)
            Reader(yard.store, yard.registry, threads=2).read(wanted)
            return parsed_config(bytes(text))
    return None


def store_pack(
    yard: Service, upload: RegistryUpload, publication: Publication, pack: PackId, file: Path
) -> None:
    """Put a client's pack into the store, after every block was decoded and its id checked.

    Raises PackInvalid, UnknownFormat, BlockCorrupt, BlockMissing.
    """
    source = FileSource(file)
    check_header(source.read_at(0, min(HEADER_BYTES, source.length)))
    placements = pack_index(pack, source.length, source.read_at)
    base_of = _held_bases(yard, upload, placements)
    stored = bytearray(max((one.encoding.stored_bytes for one in placements), default=0))
    for placement in placements:
        encoding = placement.encoding
        part = memoryview(stored)[: encoding.stored_bytes]
        source.read_into(placement.offset, part)
        require_block(encoding, part, base_of(encoding))
    options = FileOptions(publication.replication, source.length, publication.policy)
    # A staging name that was not used before: a request that was cut off may have left a file.
    with yard.store.stage(layout.staging(upload.id, secrets.token_hex(16)), options) as stage:
        for start in range(0, source.length, _PIECE_BYTES):
            stage.write(source.read_at(start, min(_PIECE_BYTES, source.length - start)))
        staged = stage.close()
    path, replicas = layout.pack(pack), least_replicas(yard.store, publication.replication)
    try:
        yard.store.publish(staged, path)
    except AlreadyThere:  # it was sent before, and only the answer was lost
        yard.store.delete(staged.path)
    require_replicas(yard.store, path, replicas, REPLICAS_TIMEOUT_S)
    check_pack(yard.store, pack, source.length, placements, replicas)


def _held_bases(
    yard: Service, upload: RegistryUpload, placements: Sequence[Placement]
) -> Callable[[Encoding], memoryview | None]:
    """Returns a reader of deltas' bases, for those that the caller may read and that lie whole.

    They are claimed, and so held for the upload.
    """
    wanted = {placement.encoding.base for placement in placements} - {None}
    held = upload.claim([base for base in wanted if base is not None]) if wanted else {}
    reader = Reader(yard.store, yard.registry, threads=2)

    def base_of(encoding: Encoding) -> memoryview | None:
        if encoding.base is None:
            return None
        if not any(is_whole(found, encoding.raw_bytes) for found in held.get(encoding.base, ())):
            raise BlockMissing(f"base {encoding.base} of block {encoding.block} is not there")
        raw = memoryview(bytearray(encoding.raw_bytes))
        reader.read([Wanted(encoding.base, 0, raw)])
        return raw

    def is_whole(found: Placement, raw_bytes: int) -> bool:
        return found.encoding.base is None and found.encoding.raw_bytes == raw_bytes

    return base_of


def put_manifest(
    yard: Service, upload: RegistryUpload, publication: Publication, digest: Digest, file: Path
) -> None:
    """Put a client's manifest into the store. Raises ManifestInvalid, UnknownFormat."""
    stored = file.read_bytes()
    manifests.decode(stored, digest)
    replicas = least_replicas(yard.store, publication.replication)
    copies = publication.replication
    store_manifest(yard.store, upload, digest, stored, copies, min_replicas=replicas)


def check_pack(
    store: Store,
    pack: PackId,
    pack_bytes: int,
    placements: Sequence[Placement],
    replicas: int,
) -> None:
    """Compare what a client says of a pack with the pack in the store: length, index, copies.

    Raises PackInvalid, FileMissing, UnderReplicated.
    """
    location = store.locate(layout.pack(pack))
    if location.length != pack_bytes:
        raise PackInvalid(f"pack {pack} has {location.length} bytes, not {pack_bytes}")
    found = min((len(span.replicas) for span in location.spans), default=replicas)
    if found < replicas:
        raise too_few(f"pack {pack}", found, replicas)
    if read_pack_index(store, pack) != tuple(placements):
        raise PackInvalid(f"pack {pack} does not hold what was said")
