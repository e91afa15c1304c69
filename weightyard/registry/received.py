"""Files a service received under an upload: which blocks each became, until they are a version."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, insert, select

from weightyard.errors import TooLarge
from weightyard.format.manifest import MAX_FILES
from weightyard.names import FilePath, UploadId
from weightyard.registry import schema, uploads

_f = schema.upload_files


def put(tx: Connection, upload: UploadId, path: FilePath, manifest: bytes) -> None:
    """Keep what a file became; one of the same path is replaced. Raises UploadExpired, TooLarge."""
    opened = uploads.fence(tx, upload)
    here = _f.c.upload_id == opened.row_id
    tx.execute(delete(_f).where(here, _f.c.path == path.text))
    if (tx.scalar(select(func.count()).select_from(_f).where(here)) or 0) >= MAX_FILES:
        raise TooLarge(f"upload {upload} has {MAX_FILES} files, no version has more")
    tx.execute(insert(_f).values(upload_id=opened.row_id, path=path.text, manifest=manifest))


def manifests(tx: Connection, upload: UploadId) -> list[bytes]:
    """What the files became, by path. Raises UploadExpired."""
    opened = uploads.fence(tx, upload)
    return list(
        tx.scalars(select(_f.c.manifest).where(_f.c.upload_id == opened.row_id).order_by(_f.c.path))
    )
