"""Publishing: from a manifest whose blocks are written to a version everyone sees."""

from __future__ import annotations

from contextlib import suppress

from weightyard.errors import Conflict, ManifestInvalid, Retryable
from weightyard.format import manifest as manifests
from weightyard.format.manifest import Manifest
from weightyard.names import Digest
from weightyard.records import Publication, Version
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, Store
from weightyard.transfer.catalogue import ManifestFile, Upload
from weightyard.transfer.durable import make_durable
from weightyard.transfer.once import read_each_replica, read_whole, write_once


def publish(
    store: Store,
    upload: Upload,
    manifest: Manifest,
    publication: Publication,
    key: str,
    *,
    min_replicas: int = 1,
) -> Version:
    """Store the manifest, on so many DataNodes at least, then commit.

    Raises as `Upload.commit` and the store do, UnderReplicated.
    """
    digest, stored = manifests.encode(manifest)
    upload.begin_manifest(ManifestFile(digest, len(stored)))
    options = FileOptions(replication=publication.replication)
    try:
        write_once(store, upload.id, layout.manifest(digest), stored, options)
    except Conflict:
        read_manifest(store, digest)  # the same manifest, compressed by another zstd
    make_durable(store, layout.manifest(digest), min_replicas)
    version = upload.commit(digest, manifest, publication, key)
    with suppress(Retryable):  # what counts is done; gc removes what is left here
        store.delete(layout.staging_folder(upload.id))
    return version


def read_manifest(store: Store, digest: Digest) -> Manifest:
    """A manifest out of the store, checked. Raises FileMissing, ManifestInvalid, UnknownFormat."""
    path = layout.manifest(digest)
    try:
        return manifests.decode(read_whole(store, path, manifests.MAX_STORED_BYTES), digest)
    except ManifestInvalid:
        for stored in read_each_replica(store, path, manifests.MAX_STORED_BYTES):
            with suppress(ManifestInvalid):
                return manifests.decode(stored, digest)
        raise
