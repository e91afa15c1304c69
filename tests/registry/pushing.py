"""Pushing small versions and reading them back, as the registry's tests need it."""

from __future__ import annotations

from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import Digest, ModelName
from weightyard.records import Publication, Version
from weightyard.registry.registry import Registry
from weightyard.storage.store import Store
from weightyard.transfer.plan import wanted_of
from weightyard.transfer.publish import publish, read_manifest
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

BERT = ModelName("team", "bert")


def push(
    registry: Registry,
    store: Store,
    *contents: bytes,
    model: ModelName = BERT,
    key: str | None = None,
    options: WriteOptions | None = None,
    **said: object,
) -> Version:
    """Publish a state dict of one tensor for each content."""
    publication = Publication.model_validate(said)
    upload = registry.open_upload(model, publication)
    tensors = [StateTensor(f"t{i}", DType.U8, (len(data),)) for i, data in enumerate(contents)]
    split = split_state(tensors, MIB)
    sources = [MemorySource(data) for data in contents]
    ids = Writer(store, upload, options).write([Content(split, sources)])
    return publish(store, upload, manifest_of([split], ids), publication, key or upload.id.hex)


def read_back(registry: Registry, store: Store, version: Version) -> list[bytes]:
    """The contents of a version that was pushed by `push`."""
    manifest = read_manifest(store, Digest(version.digest))
    contents = [bytearray(tensor.shape[0]) for tensor in manifest.tensors]
    wanted = [
        want
        for tensor, into in zip(manifest.tensors, contents, strict=True)
        for box in tensor.boxes
        for want in wanted_of(manifest, box.extents, memoryview(into))
    ]
    Reader(store, registry, threads=1).read(wanted)
    return [bytes(content) for content in contents]
