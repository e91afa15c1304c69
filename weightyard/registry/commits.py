"""Commit: the one transaction that makes a version visible."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import itemgetter
from typing import Any

from blake3 import blake3
from sqlalchemy import Connection, exists, func, insert, select, update
from sqlalchemy.exc import NoResultFound

from weightyard.errors import (
    BlockMissing,
    KeyReused,
    NoSuchThing,
    UploadExpired,
    VersionMoved,
)
from weightyard.format.manifest import Manifest
from weightyard.names import AliasName, BlockId, Digest, ModelName, Ref, UploadId
from weightyard.records import Publication, Version
from weightyard.registry import (
    aliases,
    damage,
    outbox,
    quotas,
    replication,
    runs,
    schema,
    uploads,
    versions,
)
from weightyard.registry.database import is_one_of, now_ms
from weightyard.registry.rows import batches, clock, insert_missing, record_event
from weightyard.registry.schema import FileState, UploadState
from weightyard.registry.uploads import Reading


def commit(
    tx: Connection,
    upload: UploadId,
    digest: Digest,
    manifest: Manifest,
    publication: Publication,
    key: str,
    reading: Reading | None = None,
) -> Version:
    """Make an upload's version visible. This transaction is the only commit point.

    Raises as `weightyard.transfer.catalogue.Upload.commit`.
    """
    if done := _done_before(tx, key, digest, upload):  # the answer was lost, not the work
        return done
    try:
        opened = uploads.fence(tx, upload, alone=True)  # one that expired fails here, loudly
    except UploadExpired:
        # Another commit of this upload may have ended it while this one waited for the lock.
        if done := _done_before(tx, key, digest, upload):
            return done
        raise
    if publication.checkpoint is not None:
        runs.require_ranks(tx, upload, opened.row_id, publication.checkpoint.ranks)
    # Must come before anything refers to them.
    blocks = _require_placements(tx, opened.row_id, manifest, reading)
    manifest_row = _require_manifest(tx, opened.row_id, digest, publication)
    edges = insert_lists(tx, manifest, blocks)
    parent = _hold_parent(tx, publication)
    # Before a new model is made, as telling of that takes the lock of events and journal: in the
    # other order two commits could each wait for the other.
    quotas.hold(tx, opened.model.project)
    model_row, number = _next_number(tx, opened.model, opened.author, publication)
    version_row = _insert_version(
        tx, model_row, number, manifest_row, parent, opened.author, manifest, publication
    )
    insert_missing(
        tx,
        schema.version_lists,
        [{"version_id": version_row, "list_id": edge} for edge in edges],
    )
    _share_lists(tx, manifest_row, version_row)
    damage.unmark_versions(tx)
    quotas.require(tx, opened.model.project)
    tx.execute(
        insert(schema.commits).values(key=key, upload_id=opened.row_id, version_id=version_row)
    )
    pinned = select(schema.pins.c.pack_id).where(schema.pins.c.upload_id == opened.row_id)
    mine = schema.packs.c.id.in_(pinned)
    replication.ask(tx, schema.packs, mine, publication.replication, publication.policy)
    record_event(tx, opened.author, "version.published", f"{opened.model}@v{number}")
    version = versions.get(tx, version_row)
    outbox.put_journal(tx, "published", version.ref, opened.author, _told(version, publication))
    outbox.put_record(tx, version)
    if publication.alias is not None:
        alias = AliasName(publication.alias)
        aliases.move(tx, opened.model, alias, number, who=opened.author, reason="published")
        version = versions.get(tx, version_row)
    uploads.close(tx, opened.row_id, UploadState.COMMITTED)
    return version


def _told(version: Version, publication: Publication) -> dict[str, Any]:
    """What the journal tells of a new version; the rest is in its record."""
    checkpoint = publication.checkpoint
    of_run = {} if checkpoint is None else {"generation": checkpoint.generation}
    return {"digest": version.digest, **of_run}


def find_done(tx: Connection, key: str, upload: UploadId) -> Version | None:
    """The version a commit under this key made, if there was one. Raises KeyReused."""
    commits, u = schema.commits, schema.uploads
    row = tx.execute(
        select(commits.c.version_id, u.c.name)
        .join(u, u.c.id == commits.c.upload_id)
        .where(commits.c.key == key)
    ).one_or_none()
    if row is None:
        return None
    try:
        version = versions.get(tx, row.version_id)
    except NoResultFound:
        raise NoSuchThing("the version was published, and removed since") from None
    if row.name != upload.hex:
        raise KeyReused(f"the key was used for {version.ref}, by another upload: take a new one")
    return version


def _done_before(tx: Connection, key: str, digest: Digest, upload: UploadId) -> Version | None:
    version = find_done(tx, key, upload)
    if version is not None and version.digest != digest.hex:
        raise KeyReused(
            f"the key was used for {version.ref}, which has other content: take a new one"
        )
    return version


def _require_placements(
    tx: Connection, upload_row: int, manifest: Manifest, reading: Reading | None
) -> dict[BlockId, int]:
    """Row ids of the manifest's blocks, each in live packs this upload holds.

    `check` may have found a pack damaged since it was claimed or written.
    """
    wanted = [block.id for block in manifest.blocks]
    columns = schema.placements.c.block_id, schema.blocks.c.hash
    found = uploads.lying(tx, wanted, reading, *columns, or_written_by=upload_row)
    bases = uploads.standalone_packs(tx, found)
    held = uploads.usable(found, bases, uploads.held_packs(tx, upload_row))
    by_hash = {block.raw: block for block in wanted}
    rows = {by_hash[one.hash]: one.block_id for one in held}
    if missing := next((block for block in wanted if block not in rows), None):
        raise BlockMissing(f"block {missing} is not held by the upload: claim or write it first")
    return rows


def _require_manifest(
    tx: Connection, upload_row: int, digest: Digest, publication: Publication
) -> int:
    manifests, pins = schema.manifests, schema.manifest_pins
    row = tx.execute(
        select(manifests.c.id)
        .join(pins, pins.c.manifest_id == manifests.c.id)
        .where(manifests.c.name == digest.hex, pins.c.upload_id == upload_row)
        .with_for_update(of=manifests)
    ).one_or_none()
    if row is None:
        raise BlockMissing(f"manifest {digest} is not held by the upload: write it first")
    tx.execute(
        update(manifests)
        .where(manifests.c.id == row.id)
        .values(state=FileState.LIVE, state_ms=now_ms())
    )
    replication.ask(tx, manifests, manifests.c.id == row.id, publication.replication)
    return int(row.id)


def block_lists(manifest: Manifest) -> list[tuple[int, ...]]:
    """The manifest's blocks as lists of their numbers: one for each tensor, one for the rest of
    each file.

    A tensor that did not change has the same list as before; tensors in one bundle share one.
    """
    lists: dict[tuple[int, ...], None] = {}
    of_tensors: dict[int, set[int]] = {}
    for tensor in manifest.tensors:
        numbers = {extent.block for box in tensor.boxes for extent in box.extents}
        lists[tuple(sorted(numbers))] = None
        if tensor.file is not None:
            of_tensors.setdefault(tensor.file, set()).update(numbers)
    for index, file in enumerate(manifest.files):
        rest = {extent.block for extent in file.extents} - of_tensors.get(index, set())
        lists[tuple(sorted(rest))] = None
    lists.pop((), None)
    return list(lists)


def insert_lists(tx: Connection, manifest: Manifest, blocks: dict[BlockId, int]) -> list[int]:
    """Row ids of the manifest's lists, inserted where they are new."""
    by_digest: dict[bytes, Sequence[BlockId]] = {}
    all_ids = [block.id for block in manifest.blocks]
    for numbers in block_lists(manifest):
        ids = sorted(all_ids[number] for number in numbers)
        by_digest[blake3(b"".join(block.raw for block in ids)).digest()] = ids
    known = _lock_lists(tx, list(by_digest))
    # Repeated if gc removed a list after it was found to be there, and before it was locked.
    while new := sorted(by_digest.keys() - known.keys()):
        insert_missing(tx, schema.lists, [{"digest": digest} for digest in new])
        added = _lock_lists(tx, new)
        edges = [
            {"list_id": list_row, "block_id": blocks[block]}
            for digest, list_row in added.items()
            for block in by_digest[digest]
        ]
        # In the order of blocks: each block's row is locked for its edge, always in this order, and
        # neighbours lie on one page.
        edges.sort(key=itemgetter("block_id"))
        insert_missing(tx, schema.list_blocks, edges)
        known |= added
    return sorted(known.values())


def _share_lists(tx: Connection, manifest_row: int, version_row: int) -> None:
    """Give this version's lists to versions of the same content that have none.

    Those were brought back by `rebuild` without their manifest, and are whole from here on.
    """
    v, vl, other = schema.versions, schema.version_lists, schema.version_lists.alias("other")
    missing = (
        select(v.c.id, vl.c.list_id)
        .join(vl, vl.c.version_id == version_row)
        .where(
            v.c.manifest_id == manifest_row,
            v.c.id != version_row,
            v.c.removed_ms.is_(None),
            ~exists().where(other.c.version_id == v.c.id),
        )
    )
    tx.execute(insert(vl).from_select(["version_id", "list_id"], missing))


def _lock_lists(tx: Connection, digests: Sequence[bytes]) -> dict[bytes, int]:
    """Lists that are there, kept from being collected until this transaction ends."""
    lists = schema.lists
    return {
        digest: row_id
        for batch in batches(digests)
        for row_id, digest in tx.execute(
            select(lists.c.id, lists.c.digest)
            .where(is_one_of(tx, lists.c.digest, batch))
            .order_by(lists.c.id)
            .with_for_update(read=True)
        ).all()
    }


def name_parent(tx: Connection, publication: Publication) -> Publication:
    """The same with its parent named by number: an alias may have moved on by the commit.

    Raises NoSuchThing.
    """
    if publication.parent is None:
        return publication
    parent = versions.resolve(tx, Ref.parse(publication.parent))
    return publication.model_copy(update={"parent": parent.ref})


def _hold_parent(tx: Connection, publication: Publication) -> int | None:
    """The parent's row id; it cannot be removed before this transaction ends."""
    if publication.parent is None:
        return None
    return int(versions.hold(tx, versions.find(tx, Ref.parse(publication.parent))).id)


def _next_number(
    tx: Connection, model: ModelName, author: str, publication: Publication
) -> tuple[int, int]:
    """Take the model's next number; the lock on its row decides races."""
    models = schema.models
    row = runs.lock_for_version(tx, model, publication, author)
    expected = publication.expect_latest
    if expected is not None and expected != (newest := _newest(tx, row.id)):
        raise VersionMoved(str(model), expected, newest)
    tx.execute(
        update(models)
        .where(models.c.id == row.id)
        .values(last_number=row.last_number + 1, removed_ms=None)
    )
    return row.id, row.last_number + 1


def _newest(tx: Connection, model_row: int) -> int:
    """The number `@latest` means; 0: there is no version, or none any more."""
    v = schema.versions
    there = v.c.model_id == model_row, v.c.removed_ms.is_(None)
    return tx.scalar(select(func.max(v.c.number)).where(*there)) or 0


def _insert_version(
    tx: Connection,
    model_row: int,
    number: int,
    manifest_row: int,
    parent_row: int | None,
    author: str,
    manifest: Manifest,
    publication: Publication,
) -> int:
    tensors = [tensor for tensor in manifest.tensors if tensor.tied is None]
    dtypes: dict[str, int] = {}
    for tensor in tensors:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
    structure = {
        "config": publication.config,
        "parameters": sum(prod(tensor.shape) for tensor in tensors),
        "dtypes": dtypes,
    }
    in_files = sum(file.bytes for file in manifest.files)
    of_state = sum(
        extent.length
        for tensor in tensors
        if tensor.file is None
        for box in tensor.boxes
        for extent in box.extents
    )
    row = tx.execute(
        insert(schema.versions)
        .values(
            model_id=model_row,
            number=number,
            manifest_id=manifest_row,
            parent_id=parent_row,
            author=author,
            message=publication.message,
            metrics=publication.metrics,
            tags=publication.tags,
            metadata=publication.metadata,
            structure=structure,
            files=len(manifest.files),
            tensors=len(manifest.tensors),
            logical_bytes=in_files + of_state,
            replication=publication.replication,
            policy=publication.policy,
            created_ms=clock(tx),
            step=None if publication.checkpoint is None else publication.checkpoint.step,
        )
        .returning(schema.versions.c.id)
    ).one()
    return int(row.id)
