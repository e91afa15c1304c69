"""Sweeping up after uploads that ended: what they left in staging, and packs they never finished.

Every such file has a row. A writer that was only suspended may come back and still rename a file it
had staged. So each run of gc looks again at what was swept, until another grace time, and at least
a day, has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, delete, or_, select, update

from weightyard.names import Digest, PackId, UploadId
from weightyard.registry import schema
from weightyard.registry.database import Database, now_ms
from weightyard.registry.locking import found, is_older, lock, move
from weightyard.registry.needs import Needs
from weightyard.registry.schema import FileState, UploadState
from weightyard.storage import layout
from weightyard.storage.store import Store

_packs, _manifests, _uploads = schema.packs, schema.manifests, schema.uploads

_ENDED = (UploadState.EXPIRED, UploadState.COMMITTED)

_AWAY_MS = 24 * 3600 * 1000
"""How long a writer may be away (a laptop that was shut) and come back, however short the grace."""


class Counter(Protocol):
    def count(self, **more: int) -> None: ...


def sweep(database: Database, store: Store, grace_ms: int, tally: Counter) -> None:
    """Remove what uploads left that ended at least a grace time ago."""
    away_ms = max(grace_ms, _AWAY_MS)
    due = ended_for(grace_ms)
    for some in found(database, _uploads, due, among=_uploads.c.state.in_(_ENDED)):
        for row in _rows(database, select(_uploads).where(some).order_by(_uploads.c.id)):
            _sweep_upload(database, store, row, tally)
            database.write(partial(_swept, row_id=row.id, after_ms=grace_ms + away_ms))
    _look_again_at_packs(database, store, away_ms)
    _look_again_at_manifests(database, store, away_ms)


def ended_for(grace_ms: int) -> ColumnElement[bool]:
    return and_(_uploads.c.state.in_(_ENDED), _uploads.c.lease_ms <= now_ms() - grace_ms)


def unfinished_packs(upload: ColumnElement[bool]) -> ColumnElement[bool]:
    """Packs that never became live, begun by uploads that fit."""
    begun = select(_uploads.c.id).where(upload)
    return and_(_packs.c.state == FileState.WRITING, _packs.c.upload_id.in_(begun))


def _sweep_upload(database: Database, store: Store, upload: Row[Any], tally: Counter) -> None:
    folder = layout.staging_folder(UploadId(upload.name))
    if not store.delete(folder):  # not there, or not empty
        for file in store.list(folder):
            store.delete(file.path)
            tally.count(staged_removed=1)
        store.delete(folder)
    unfinished = and_(_packs.c.upload_id == upload.id, _packs.c.state == FileState.WRITING)
    for pack in _rows(database, select(_packs).where(unfinished).order_by(_packs.c.id)):
        store.delete(layout.pack(PackId(pack.name)))
        only = and_(unfinished, _packs.c.id == pack.id)
        database.write(partial(move, table=_packs, where=only, to=FileState.GONE))
        tally.count(unfinished_removed=1)


def _swept(tx: Connection, row_id: int, after_ms: int) -> None:
    """Be done with an upload; only after a while if it expired: its writer may still be there."""
    nobody_left = or_(
        _uploads.c.state == UploadState.COMMITTED,
        _uploads.c.lease_ms <= now_ms() - after_ms,
    )
    tx.execute(
        update(_uploads)
        .where(_uploads.c.id == row_id, _uploads.c.state.in_(_ENDED), nobody_left)
        .values(state=UploadState.SWEPT)
    )


def _look_again_at_packs(database: Database, store: Store, away_ms: int) -> None:
    """Delete files that came late, and forget packs that are old enough.

    Only a pack that was never live can have a writer that still has its file in staging.
    """
    is_gone = _packs.c.state == FileState.GONE
    never_live = and_(is_gone, _packs.c.bytes == 0)
    for some in found(database, _packs, never_live, among=is_gone):
        for pack in _rows(database, select(_packs).where(some)):
            store.delete(layout.pack(PackId(pack.name)))
    old = and_(is_gone, is_older(_packs, away_ms), ~Needs().pinned_pack())
    for some in found(database, _packs, old, among=is_gone):
        database.write(partial(_forget_packs, which=some))


def _forget_packs(tx: Connection, which: ColumnElement[bool]) -> None:
    gone = lock(tx, _packs, which)
    tx.execute(delete(_packs).where(_packs.c.id.in_(gone)))


def _look_again_at_manifests(database: Database, store: Store, away_ms: int) -> None:
    """Delete files that came late. Rows stay, as versions refer to them.

    One that is old enough loses its upload, so that it is not looked at any more.
    """
    gone = and_(_manifests.c.state == FileState.GONE, _manifests.c.upload_id.is_not(None))

    def look(tx: Connection, which: ColumnElement[bool]) -> None:
        # Under the lock: a writer that wants this very manifest waits, then writes it anew.
        for row_id in lock(tx, _manifests, which):
            row = tx.execute(select(_manifests).where(_manifests.c.id == row_id)).one()
            store.delete(layout.manifest(Digest(row.name)))
            old = and_(_manifests.c.id == row_id, is_older(_manifests, away_ms))
            tx.execute(update(_manifests).where(old).values(upload_id=None))

    for one in found(database, _manifests, gone, among=gone, size=1):
        database.write(partial(look, which=one))


def _rows(database: Database, statement: Select[Any]) -> Sequence[Row[Any]]:
    return database.read(lambda tx: tx.execute(statement).all())
