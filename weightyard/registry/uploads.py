"""Uploads: leases under which writers claim blocks that exist and add new ones.

Each function runs inside one transaction of its caller. Locks are taken in one order everywhere:
the upload's row, then pack rows by id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    case,
    delete,
    exists,
    insert,
    or_,
    select,
    union_all,
    update,
)

from weightyard.errors import UploadExpired
from weightyard.format.pack import Placement, entry_bytes, read_entries
from weightyard.names import BlockId, Digest, ModelName, PackId, UploadId
from weightyard.records import Publication
from weightyard.registry import schema
from weightyard.registry.database import is_one_of, now_ms
from weightyard.registry.rows import batches, clock, insert_missing, insert_new
from weightyard.registry.schema import Dedup, FileState, UploadState

_READABLE = (FileState.LIVE, FileState.CONDEMNED)


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An upload whose lease holds, as seen under its lock."""

    row_id: int
    upload: UploadId
    model: ModelName
    author: str
    publication: Publication
    """What its writer said when it began."""
    scope: str | None
    """The project whose packs it claims from and writes; None: those of the whole yard."""


def open_upload(
    tx: Connection,
    upload: UploadId,
    model: ModelName,
    author: str,
    lease_s: float,
    publication: Publication,
) -> None:
    at_ms = clock(tx)
    tx.execute(
        insert(schema.uploads).values(
            name=upload.hex,
            project=model.project,
            model=model.name,
            author=author,
            state=UploadState.OPEN,
            created_ms=at_ms,
            lease_ms=at_ms + int(lease_s * 1000),
            publication=publication.model_dump(mode="json", exclude_defaults=True),
        )
    )


def fence(tx: Connection, upload: UploadId, *, alone: bool = False) -> OpenUpload:
    """The upload, locked against expiry until the transaction ends; `alone`: against all others.

    Raises UploadExpired: a writer that lost its lease learns it here, before anything counts.
    """
    locked = _now(upload).with_for_update(read=not alone, of=schema.uploads)
    return _require_open(tx.execute(locked).one_or_none(), upload)


def join(tx: Connection, upload: UploadId) -> OpenUpload:
    """An upload whose lease holds, for another writer under it. Raises UploadExpired."""
    return _require_open(tx.execute(_now(upload)).one_or_none(), upload)


def _now(upload: UploadId) -> Select[Any]:
    uploads = schema.uploads
    wanted = select(uploads, _dedup(), now_ms().label("now_ms"))
    return wanted.where(uploads.c.name == upload.hex)


def _require_open(row: Row[Any] | None, upload: UploadId) -> OpenUpload:
    if row is not None and row.state == UploadState.COMMITTED:
        raise UploadExpired(f"upload {upload} is over: its version was published")
    if row is None or row.state != UploadState.OPEN:
        state = "unknown" if row is None else row.state
        raise UploadExpired(f"upload {upload} is {state}: push again")
    if row.lease_ms <= row.now_ms:
        raise UploadExpired(f"upload {upload} was silent for too long: push again")
    return _as_open(row, upload)


def find_open(tx: Connection, upload: UploadId) -> OpenUpload:
    """An upload as it is now, without holding it. Raises UploadExpired if it is unknown."""
    row = tx.execute(
        select(schema.uploads, _dedup()).where(schema.uploads.c.name == upload.hex)
    ).one_or_none()
    if row is None:
        raise UploadExpired(f"upload {upload} is unknown: push again")
    return _as_open(row, upload)


def _dedup() -> ColumnElement[Any]:
    return select(schema.registry.c.dedup).scalar_subquery().label("dedup")


def _as_open(row: Row[Any], upload: UploadId) -> OpenUpload:
    said = Publication.model_validate(row.publication or {})
    scope = row.project if row.dedup == Dedup.PROJECT else None
    return OpenUpload(row.id, upload, ModelName(row.project, row.model), row.author, said, scope)


def heartbeat(tx: Connection, upload: UploadId, lease_s: float) -> None:
    opened = fence(tx, upload, alone=True)
    tx.execute(
        update(schema.uploads)
        .where(schema.uploads.c.id == opened.row_id)
        .values(lease_ms=now_ms() + int(lease_s * 1000))
    )


def abandon(tx: Connection, upload: UploadId) -> None:
    """Expire an upload now. One that is not open is left as it is."""
    uploads = schema.uploads
    row = tx.execute(
        select(uploads.c.id, uploads.c.state).where(uploads.c.name == upload.hex).with_for_update()
    ).one_or_none()
    if row is not None and row.state == UploadState.OPEN:
        close(tx, row.id, UploadState.EXPIRED)


def close(tx: Connection, row_id: int, state: UploadState) -> None:
    """End an upload and free what it pinned. Its lease ends now, unless it has ended before."""
    uploads = schema.uploads
    ended_ms = case((uploads.c.lease_ms < now_ms(), uploads.c.lease_ms), else_=now_ms())
    tx.execute(update(uploads).where(uploads.c.id == row_id).values(state=state, lease_ms=ended_ms))
    tx.execute(delete(schema.pins).where(schema.pins.c.upload_id == row_id))
    tx.execute(delete(schema.manifest_pins).where(schema.manifest_pins.c.upload_id == row_id))
    tx.execute(delete(schema.upload_files).where(schema.upload_files.c.upload_id == row_id))
    tx.execute(delete(schema.upload_ranks).where(schema.upload_ranks.c.upload_id == row_id))


@dataclass(frozen=True, slots=True)
class Reading:
    """The blocks that a token may know of: those of versions in its projects, and its own."""

    projects: tuple[str, ...]
    author: str

    def allows(self, block: ColumnElement[Any]) -> ColumnElement[bool]:
        """Whether a block, by its row id, is one. The query must have `packs` in its FROM."""
        p, u = schema.placements.alias("delta"), schema.uploads
        is_base = exists().where(p.c.base_id == block, self._in_versions(p.c.block_id))
        mine = select(u.c.id).where(u.c.author == self.author, u.c.project.in_(self.projects))
        return or_(self._in_versions(block), is_base, schema.packs.c.upload_id.in_(mine))

    def _in_versions(self, block: ColumnElement[Any]) -> ColumnElement[bool]:
        """Whether a version in these projects has a block. Removed ones count until gc lets go.

        Until then a reader may hold one by a lease, or an upload may have claimed its blocks.
        """
        lb, vl, v, m = schema.list_blocks, schema.version_lists, schema.versions, schema.models
        return exists().where(
            lb.c.block_id == block,
            vl.c.list_id == lb.c.list_id,
            v.c.id == vl.c.version_id,
            m.c.id == v.c.model_id,
            m.c.project.in_(self.projects),
        )


def find_placements(
    tx: Connection,
    blocks: Sequence[BlockId],
    reading: Reading | None = None,
    for_project: str | None = None,
) -> dict[BlockId, list[Placement]]:
    """Where blocks lie, in packs that can be read; those of bases are not included.

    With `reading`, packs of other projects are told only for blocks that its own projects' packs
    lack. With `for_project`: what a claim of an upload of this project would find.
    """
    may = () if reading is None else (reading.allows(schema.blocks.c.id),)
    if for_project is not None:
        apart = tx.scalar(select(schema.registry.c.dedup)) == Dedup.PROJECT
        return _find(tx, blocks, _claimable(for_project if apart else None), *may)
    if reading is None:
        return _find(tx, blocks)
    own = or_(schema.packs.c.project.is_(None), schema.packs.c.project.in_(reading.projects))
    found = _find(tx, blocks, *may, own)
    return found | _find(tx, [block for block in blocks if block not in found], *may)


def _find(
    tx: Connection, blocks: Sequence[BlockId], *allowed: ColumnElement[bool]
) -> dict[BlockId, list[Placement]]:
    b, p, packs = schema.blocks, schema.placements, schema.packs
    found: dict[BlockId, list[Placement]] = {}
    for batch in batches(dict.fromkeys(blocks)):
        rows = tx.execute(
            select(packs.c.name, p.c.encoding)
            .select_from(b.join(p, p.c.block_id == b.c.id).join(packs))
            .where(
                is_one_of(tx, b.c.hash, [block.raw for block in batch]),
                packs.c.state.in_(_READABLE),
                *allowed,
            )
        ).all()
        by_name = {name: PackId(name) for name in {pack for pack, _ in rows}}
        found |= _by_block((entry, by_name[pack]) for pack, entry in rows)
    return found


def _by_block(entries: Iterable[tuple[bytes, PackId]]) -> dict[BlockId, list[Placement]]:
    found: dict[BlockId, list[Placement]] = {}
    for placement in read_entries(list(entries)):
        found.setdefault(placement.encoding.block, []).append(placement)
    return found


def _claimable(scope: str | None) -> ColumnElement[bool]:
    """Whether an upload of this scope may claim from a row of `packs`."""
    return schema.packs.c.project.is_not_distinct_from(scope)


def revive(tx: Connection, upload: UploadId, blocks: Sequence[BlockId]) -> None:
    """Make condemned packs that hold these blocks, for this upload, live again.

    To be run in a transaction of its own before `claim`. Within that, shared locks would have to
    become exclusive, and two claims of the same pack would wait for each other.
    """
    b, p, packs = schema.blocks, schema.placements, schema.packs
    mine = _claimable(find_open(tx, upload).scope)
    is_condemned = packs.c.state == FileState.CONDEMNED
    if tx.scalar(select(packs.c.id).where(is_condemned).limit(1)) is None:
        return
    for batch in batches(dict.fromkeys(blocks)):
        wanted = select(b.c.id).where(is_one_of(tx, b.c.hash, [block.raw for block in batch]))
        bases = select(p.c.base_id).where(p.c.block_id.in_(wanted), p.c.base_id.is_not(None))
        # One list of blocks: with two, joined by OR, SQLite would read all placements.
        held_in = select(p.c.pack_id).where(p.c.block_id.in_(union_all(wanted, bases)))
        # Materialized: else PostgreSQL would look for the blocks anew for each condemned pack.
        holding = held_in.cte("holding").prefix_with("MATERIALIZED", dialect="postgresql")
        condemned = tx.scalars(
            select(packs.c.id)
            .where(is_condemned, packs.c.id.in_(select(holding.c.pack_id)), mine)
            .order_by(packs.c.id)
            .with_for_update()
        ).all()
        if condemned:
            tx.execute(
                update(packs)
                .where(packs.c.id.in_(condemned), is_condemned)
                .values(state=FileState.LIVE, state_ms=now_ms())
            )


def claim(
    tx: Connection, upload: UploadId, blocks: Sequence[BlockId], reading: Reading | None = None
) -> Mapping[BlockId, Sequence[Placement]]:
    """Placements in live packs; these are pinned for the upload in this very transaction."""
    opened = fence(tx, upload)
    found = lying(tx, blocks, reading, schema.placements.c.encoding)
    bases = standalone_packs(tx, found)
    wanted = {one.pack_id for one in found}.union(*bases.values())
    live = pin_live(tx, opened.row_id, wanted, _claimable(opened.scope))
    return _by_block((one.encoding, live[one.pack_id]) for one in usable(found, bases, live.keys()))


def lying(
    tx: Connection,
    blocks: Sequence[BlockId],
    reading: Reading | None,
    *columns: ColumnElement[Any],
    or_written_by: int | None = None,
) -> list[Row[Any]]:
    """Placements of blocks, in packs of any state: `pack_id`, `base_id` and these columns.

    With `reading`, only of blocks that it allows, or that an upload (by its row id) wrote. The
    caller picks the packs that count (`usable`): SQL that names a few packs of many blocks might go
    through all that lies in them.
    """
    b, p = schema.blocks, schema.placements
    rows = select(p.c.pack_id, p.c.base_id, *columns).join_from(p, b, b.c.id == p.c.block_id)
    if reading is not None:  # a pack may also have blocks of other projects
        allowed = reading.allows(p.c.block_id)
        if or_written_by is not None:
            allowed = or_(allowed, schema.packs.c.upload_id == or_written_by)
        rows = rows.join(schema.packs).where(allowed)
    found: list[Row[Any]] = []
    for batch in batches(dict.fromkeys(blocks)):
        wanted = is_one_of(tx, b.c.hash, [block.raw for block in batch])
        found += tx.execute(rows.where(wanted)).all()
    return found


def usable(
    found: Sequence[Row[Any]], bases: Mapping[int, set[int]], packs: Set[int]
) -> list[Row[Any]]:
    """The placements found that lie in these packs, and whose bases do, too."""
    held: set[int | None] = {base for base, at in bases.items() if not at.isdisjoint(packs)}
    held.add(None)
    return [one for one in found if one.pack_id in packs and one.base_id in held]


def standalone_packs(tx: Connection, found: Sequence[Row[Any]]) -> dict[int, set[int]]:
    """For each base of placements, the packs in which it lies whole."""
    p = schema.placements
    whole = select(p.c.block_id, p.c.pack_id).where(p.c.base_id.is_(None))
    packs: dict[int, set[int]] = {}
    for batch in batches(sorted({one.base_id for one in found if one.base_id is not None})):
        for base, pack in tx.execute(whole.where(is_one_of(tx, p.c.block_id, batch))):
            packs.setdefault(base, set()).add(pack)
    return packs


def pin_live(
    tx: Connection, upload_row: int, pack_rows: Iterable[int], *which: ColumnElement[bool]
) -> dict[int, PackId]:
    """Pin these packs, without those that are not live once they are locked; returns names."""
    packs = schema.packs
    live: dict[int, PackId] = {}
    for batch in batches(sorted(pack_rows)):
        rows = tx.execute(
            select(packs.c.id, packs.c.name, packs.c.state)
            .where(is_one_of(tx, packs.c.id, batch), *which)
            .order_by(packs.c.id)
            .with_for_update(read=True)
        ).all()
        live |= {pack: PackId(name) for pack, name, state in rows if state == FileState.LIVE}
    insert_missing(tx, schema.pins, [{"upload_id": upload_row, "pack_id": pack} for pack in live])
    return live


def held_packs(tx: Connection, upload_row: int) -> set[int]:
    """Live packs an upload holds, by row ids."""
    packs, pins = schema.packs, schema.pins
    held = select(pins.c.pack_id).join(packs).where(pins.c.upload_id == upload_row)
    return set(tx.scalars(held.where(packs.c.state == FileState.LIVE)))


def doubtful_packs(tx: Connection, upload: UploadId, wanted: int) -> list[PackId]:
    """Packs an upload holds which may lie on fewer DataNodes than wanted.

    These are packs of which fewer copies were asked for, and packs of which the store has yet to be
    told how many there should be.
    """
    packs, pins, u = schema.packs, schema.pins, schema.uploads
    held = (
        select(packs.c.name)
        .join(pins, pins.c.pack_id == packs.c.id)
        .join(u, u.c.id == pins.c.upload_id)
        .where(u.c.name == upload.hex)
    )
    may_be_few = or_(packs.c.replication < wanted, packs.c.settle.is_not(None))
    return [PackId(name) for name in tx.scalars(held.where(may_be_few).order_by(packs.c.id))]


def begin_pack(
    tx: Connection,
    upload: UploadId,
    pack: PackId,
    replication: int | None,
    policy: str | None,
) -> None:
    opened = fence(tx, upload)
    insert_pack(tx, opened, pack, replication, policy, opened.scope)


def insert_pack(
    tx: Connection,
    opened: OpenUpload,
    pack: PackId,
    replication: int | None,
    policy: str | None,
    project: str | None,
) -> None:
    """The row of a pack that will be written; those of `project`, or all, may claim from it."""
    insert_missing(
        tx,
        schema.packs,
        [
            {
                "name": pack.hex,
                "state": FileState.WRITING,
                "state_ms": clock(tx),
                "upload_id": opened.row_id,
                "bytes": 0,
                "replication": replication,
                "policy": policy,
                "project": project,
            }
        ],
    )


def awaits_pack(tx: Connection, upload: UploadId, pack: PackId) -> bool:
    """Whether a pack that this upload began is still to be added. Raises UploadExpired."""
    opened = fence(tx, upload)
    packs = schema.packs
    state = tx.scalar(
        select(packs.c.state).where(packs.c.name == pack.hex, packs.c.upload_id == opened.row_id)
    )
    if state not in (FileState.WRITING, FileState.LIVE):
        raise UploadExpired(f"pack {pack} was not begun by upload {upload}")
    return bool(state == FileState.WRITING)


def add_pack(
    tx: Connection,
    upload: UploadId,
    pack: PackId,
    pack_bytes: int,
    placements: Sequence[Placement],
) -> None:
    opened = fence(tx, upload)
    packs = schema.packs
    row = tx.execute(
        select(packs.c.id, packs.c.state, packs.c.upload_id)
        .where(packs.c.name == pack.hex)
        .with_for_update()
    ).one_or_none()
    if row is None or row.upload_id != opened.row_id:
        raise UploadExpired(f"pack {pack} was not begun by upload {upload}")
    if row.state == FileState.LIVE:
        return  # the answer was lost, not the work
    if row.state != FileState.WRITING:
        raise UploadExpired(f"pack {pack} is {row.state}: push again")
    insert_placements(tx, row.id, placements)
    tx.execute(
        update(packs)
        .where(packs.c.id == row.id)
        .values(state=FileState.LIVE, state_ms=now_ms(), bytes=pack_bytes)
    )
    tx.execute(insert(schema.pins).values(upload_id=opened.row_id, pack_id=row.id))


def insert_placements(tx: Connection, pack_row: int, placements: Sequence[Placement]) -> None:
    sizes = {p.encoding.block: p.encoding.raw_bytes for p in placements}
    sizes |= {p.encoding.base: p.encoding.raw_bytes for p in placements if p.encoding.base}
    ids = block_rows(tx, sizes)
    insert_new(
        tx,
        schema.placements,
        [
            {
                "pack_id": pack_row,
                "offset": placement.offset,
                "block_id": ids[placement.encoding.block],
                "base_id": ids[placement.encoding.base] if placement.encoding.base else None,
                "stored_bytes": placement.encoding.stored_bytes,
                "encoding": entry_bytes(placement),
            }
            for placement in placements
        ],
    )


def block_rows(tx: Connection, sizes: Mapping[BlockId, int]) -> dict[BlockId, int]:
    """Row ids of blocks, inserted where they are new; in order, so that no two writers deadlock."""
    blocks = schema.blocks
    found: dict[BlockId, int] = {}
    # Repeated if gc removed a row after it was found to be there, and before it was locked.
    while missing := sorted(sizes.keys() - found.keys()):
        insert_missing(
            tx, blocks, [{"hash": block.raw, "raw_bytes": sizes[block]} for block in missing]
        )
        found |= find_block_rows(tx, missing, hold=True)
    return found


def find_block_rows(
    tx: Connection, wanted: Sequence[BlockId], *, hold: bool = False
) -> dict[BlockId, int]:
    """Row ids of known blocks; with `hold`, their rows stay until the transaction ends."""
    blocks = schema.blocks
    rows = select(blocks.c.id, blocks.c.hash)
    if hold:
        rows = rows.order_by(blocks.c.id).with_for_update(read=True, key_share=True)
    found: dict[BlockId, int] = {}
    for batch in batches(wanted):
        by_hash = {block.raw: block for block in batch}
        known = tx.execute(rows.where(is_one_of(tx, blocks.c.hash, list(by_hash)))).all()
        found |= {by_hash[raw]: row_id for row_id, raw in known}
    return found


def begin_manifest(
    tx: Connection,
    upload: UploadId,
    digest: Digest,
    stored_bytes: int,
    replication: int | None = None,
) -> None:
    """Hold a manifest for the upload, whether it is new or there already."""
    opened = fence(tx, upload)
    manifests = schema.manifests
    insert_missing(
        tx,
        manifests,
        [
            {
                "name": digest.hex,
                "state": FileState.WRITING,
                "state_ms": clock(tx),
                "upload_id": opened.row_id,
                "bytes": stored_bytes,
                "replication": replication,
            }
        ],
    )
    row = tx.execute(
        select(manifests.c.id, manifests.c.state)
        .where(manifests.c.name == digest.hex)
        .with_for_update()
    ).one()
    if row.state in (FileState.DELETING, FileState.GONE, FileState.CONDEMNED):
        # Its file may be gone, or about to go: this upload writes it (again) before it commits.
        tx.execute(
            update(manifests)
            .where(manifests.c.id == row.id)
            .values(
                state=FileState.WRITING,
                state_ms=now_ms(),
                upload_id=opened.row_id,
                replication=replication,
            )
        )
    insert_missing(tx, schema.manifest_pins, [{"upload_id": opened.row_id, "manifest_id": row.id}])
