"""Publishing: from a manifest whose blocks are written to a version everyone sees."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from weightyard.errors import BadSetting, Conflict, ManifestInvalid, Retryable
from weightyard.format import manifest as manifests
from weightyard.format.manifest import Manifest
from weightyard.names import Digest
from weightyard.records import Publication, Version
from weightyard.storage import layout
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.storage.store import FileOptions, Store
from weightyard.transfer.catalogue import ManifestFile, Upload
from weightyard.transfer.durable import make_durable, was_counted
from weightyard.transfer.once import copies_there, read_each_replica, read_whole, write_once
from weightyard.transfer.strict_json import why_not_kept

_SAID_FREELY = ("message", "metrics", "tags", "metadata", "config")


def checked_publication(said: Mapping[str, Any]) -> Publication:
    """What a writer says of its version.

    Raises BadSetting where something is over its bound, or could not be kept as it is.
    """
    try:
        publication = Publication(**said)
    except ValidationError as why:
        first = why.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadSetting(_showable(f"{where}: {first['msg']}")) from None
    for name in _SAID_FREELY:
        if what := why_not_kept(getattr(publication, name)):
            raise BadSetting(f"{name}: {what}")
    return publication


def _showable(text: str) -> str:
    """A command line may give lone surrogates, which no terminal takes: escape them."""
    return text.encode("utf-8", "backslashreplace").decode()


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
    store_manifest(
        store, upload, digest, stored, publication.replication, min_replicas=min_replicas
    )
    version = upload.commit(digest, manifest, publication, key)
    with suppress(Retryable):  # what counts is done; gc removes what is left here
        store.delete(layout.staging_folder(upload.id))
    return version


def store_manifest(
    store: Store,
    upload: Upload,
    digest: Digest,
    stored: bytes,
    replication: int | None,
    *,
    min_replicas: int,
    is_new: bool = False,
) -> None:
    """Have a manifest in the store, whoever else writes it too. Raises as the store does.

    `is_new`: it is probably not there, so do not look first: publishing would find it.
    """
    upload.begin_manifest(ManifestFile(digest, len(stored)))
    options = FileOptions(replication=replication, counts_replicas=True)
    path = layout.manifest(digest)
    # Looking first is worth it: closing a new file may wait half a second for HDFS.
    copies = None if is_new else copies_there(store, path, stored)
    if copies is None:
        try:
            published = write_once(store, upload.id, path, stored, options)
        except Conflict:
            _require_same(store, digest)
        else:
            if published is not None and was_counted(published, min_replicas):
                return
    elif copies >= min_replicas:
        return
    make_durable(store, [path], min_replicas)


def _require_same(store: Store, digest: Digest) -> None:
    """See that the file with this name is the same manifest, compressed by another zstd.

    Raises ManifestInvalid.
    """
    try:
        read_manifest(store, digest)
    except ManifestInvalid as why:
        advice = "run `weightyard check --heal`, then push again"
        raise ManifestInvalid(f"{why}; it is in the way of the same one: {advice}") from None


def read_manifest(store: Store, digest: Digest, deadline: Deadline = NEVER) -> Manifest:
    """A manifest out of the store, checked. Raises FileMissing, ManifestInvalid, UnknownFormat."""
    path, limit_bytes = layout.manifest(digest), manifests.MAX_STORED_BYTES
    try:
        return manifests.decode(read_whole(store, path, limit_bytes, deadline), digest)
    except ManifestInvalid:
        for stored in read_each_replica(store, path, limit_bytes, deadline):
            with suppress(ManifestInvalid):
                return manifests.decode(stored, digest)
        raise
