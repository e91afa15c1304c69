"""Files that a service received under an upload: the blocks of each, until there is a version."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from weightyard.errors import TooLarge
from weightyard.format.manifest import MAX_FILES
from weightyard.names import FilePath, UploadId
from weightyard.registry import schema, uploads
from weightyard.registry.rows import put_row

_f = schema.upload_files


def put(tx: Connection, upload: UploadId, path: FilePath, manifest: bytes) -> None:
    """Note what a file became, in place of one of the same path. Raises UploadExpired, TooLarge."""
    opened = uploads.fence(tx, upload)
    here = _f.c.upload_id == opened.row_id
    others = select(func.count()).select_from(_f).where(here, _f.c.path != path.text)
    if (tx.scalar(others) or 0) >= MAX_FILES:
        raise TooLarge(f"upload {upload} has {MAX_FILES} files, no version has more")
    put_row(tx, _f, upload_id=opened.row_id, path=path.text, manifest=manifest)


def manifests(tx: Connection, upload: UploadId) -> list[bytes]:
    """What the files became, by path. Raises UploadExpired."""
    opened = uploads.fence(tx, upload)
    return list(
        tx.scalars(select(_f.c.manifest).where(_f.c.upload_id == opened.row_id).order_by(_f.c.path))
    )
