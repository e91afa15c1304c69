"""Chores: the uploads under which a registry itself writes into its store.

So a file that a crash leaves in staging belongs to a row, by which gc finds it.
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
"""No token has this name. gc moves blocks of all projects: no token may read them as its own
(`uploads.Reading`)."""


@contextmanager
def small_files(database: Database, store: Store, chore: str) -> Iterator[UploadId]:
    """An upload for files that need no rows of their own; forgotten when all went well.

    A write that was retried may have left its first attempt in staging. Then the row stays, and by
    it gc finds the file.
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
