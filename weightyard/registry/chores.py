"""Chores: what a registry writes into its store by itself is under an upload, too.

So a file that a crash leaves in staging has a row, and gc finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, delete

from weightyard.names import ModelName, UploadId
from weightyard.records import Publication
from weightyard.registry import schema, uploads
from weightyard.registry.database import Database
from weightyard.storage import layout
from weightyard.storage.store import Store

LEASE_S = 900.0

_NOBODY = ""
"""No token has this name, so what gc moved from all projects is none's own (`uploads.Reading`)."""


@contextmanager
def small_files(database: Database, store: Store, chore: str) -> Iterator[UploadId]:
    """An upload for files that need no rows of their own; forgotten when all went well.

    A write that was tried again may have left its first attempt in staging: then the row stays,
    and gc finds the file by it.
    """
    upload = UploadId.new()
    database.write(lambda tx: open_chore(tx, upload, chore))
    yield upload
    is_empty = store.delete(layout.staging_folder(upload))
    database.write(lambda tx: _forget(tx, upload) if is_empty else uploads.abandon(tx, upload))


def open_chore(tx: Connection, upload: UploadId, chore: str) -> None:
    model = ModelName("weightyard", chore)
    uploads.open_upload(tx, upload, model, _NOBODY, LEASE_S, Publication())


def _forget(tx: Connection, upload: UploadId) -> None:
    tx.execute(delete(schema.uploads).where(schema.uploads.c.name == upload.hex))
