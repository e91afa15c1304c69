"""Pushing small versions and reading them back, as tests of registry and service need it."""

from __future__ import annotations

from functools import cache

from weightyard.codec import encode, encode_delta
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType
from weightyard.format.manifest import Manifest
from weightyard.format.pack import PACK_HEADER, PackBuilder, padding
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import Digest, ModelName, PackId
from weightyard.records import Publication, Version
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue, Placements, Upload
from weightyard.transfer.plan import wanted_of
from weightyard.transfer.publish import publish, read_manifest
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

BERT = ModelName("team", "bert")


def push(
    catalogue: Catalogue,
    store: Store,
    *contents: bytes,
    model: ModelName = BERT,
    key: str | None = None,
    options: WriteOptions | None = None,
    **said: object,
) -> Version:
    """Publish a state dict of one tensor for each content."""
    publication = Publication.model_validate(said)
    upload = catalogue.open_upload(model, publication)
    manifest = write(upload, store, *contents, options=options)
    return publish(store, upload, manifest, publication, key or upload.id.hex)


def write(
    upload: Upload, store: Store, *contents: bytes, options: WriteOptions | None = None
) -> Manifest:
    """Put such a state dict into the store; it is not published."""
    tensors = [StateTensor(f"t{i}", DType.U8, (len(data),)) for i, data in enumerate(contents)]
    split = split_state(tensors, MIB)
    sources = [MemorySource(data) for data in contents]
    ids = Writer(store, upload, options).write([Content(split, sources)])
    return manifest_of([split], ids)


def read_back(catalogue: Placements, store: Store, version: Version) -> list[bytes]:
    """The contents of a version that was pushed by `push`."""
    manifest = read_manifest(store, Digest(version.digest))
    contents = [bytearray(tensor.shape[0]) for tensor in manifest.tensors]
    wanted = [
        want
        for tensor, into in zip(manifest.tensors, contents, strict=True)
        for box in tensor.boxes
        for want in wanted_of(manifest, box.extents, memoryview(into))
    ]
    Reader(store, catalogue, threads=1, settings=_settings()).read(wanted)
    return [bytes(content) for content in contents]


@cache
def _settings() -> Settings:
    """Looking through the environment takes longer than reading a few small tensors."""
    return Settings()


def made_pack(*blocks: tuple[bytes, bytes | None]) -> tuple[PackBuilder, bytes]:
    """A pack of blocks, each on a base or not: how it is laid out, and its bytes."""
    pack = PackBuilder(PackId.new())
    content = bytearray(PACK_HEADER)
    for data, base in blocks:
        encoded = encode(data) if base is None else encode_delta(data, base, block_id(base))
        pack.add(encoded.encoding)
        for segment in encoded.segments:
            content += segment
            content += padding(memoryview(segment).nbytes)
    return pack, bytes(content + pack.finish())


def write_pack(upload: Upload, store: Store, *blocks: tuple[bytes, bytes | None]) -> None:
    """Put such a pack into the store."""
    pack, content = made_pack(*blocks)
    upload.begin_pack(pack.pack)
    with store.stage(layout.staging(upload.id, pack.pack.hex)) as stage:
        stage.write(content)
        store.publish(stage.close(), layout.pack(pack.pack))
    upload.add_pack(pack.pack, pack.pack_bytes, pack.placements)


def push_delta(
    catalogue: Catalogue, store: Store, data: bytes, base: bytes, *, model: ModelName = BERT
) -> Version:
    """Publish a version whose only block is stored as a delta."""
    upload = catalogue.open_upload(model, Publication())
    upload.claim([block_id(base)])
    write_pack(upload, store, (data, base))
    split = split_state([StateTensor("t0", DType.U8, (len(data),))], MIB)
    manifest = manifest_of([split], [[block_id(data)]])
    return publish(store, upload, manifest, Publication(), upload.id.hex)
