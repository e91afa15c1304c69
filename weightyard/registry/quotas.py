"""Quotas: how much a project may store, and how many versions it may have."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from sqlalchemy import Connection, delete, func, select

from weightyard.errors import QuotaExceeded
from weightyard.format.pack import Placement
from weightyard.names import BlockId, UploadId
from weightyard.records import Quota
from weightyard.registry import audit, schema, uploads, versions
from weightyard.registry.rows import put_row
from weightyard.registry.schema import FileState

_q, _v, _m = schema.quotas, schema.versions, schema.models

_MOST_UPLOADS = 1024
"""For so many uploads it is remembered what their project stored."""


class Stored:
    """Remembers for uploads what their projects stored when that was last counted. Thread-safe.

    Counting looks at every block of the project, which takes too long for every pack of an upload.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: OrderedDict[UploadId, int] = OrderedDict()

    def known(self, upload: UploadId) -> int | None:
        with self._lock:
            return self._bytes.get(upload)

    def note(self, upload: UploadId, stored_bytes: int) -> None:
        with self._lock:
            self._bytes[upload] = stored_bytes
            while len(self._bytes) > _MOST_UPLOADS:
                self._bytes.popitem(last=False)


def get(tx: Connection, project: str) -> Quota:
    """A project's quota, which may have no limits, and what it uses."""
    row = tx.execute(select(_q).where(_q.c.project == project)).one_or_none()
    return Quota(
        project=project,
        stored_bytes=None if row is None else row.stored_bytes,
        versions=None if row is None else row.versions,
        used_stored_bytes=versions.stored_bytes_of_project(tx, project),
        used_versions=_count(tx, project),
    )


def put(
    tx: Connection, project: str, *, stored_bytes: int | None, versions: int | None, who: str
) -> Quota:
    """Set a project's limits; None lifts one."""
    limits = {"stored_bytes": stored_bytes, "versions": versions}
    if stored_bytes is not None or versions is not None:
        put_row(tx, _q, project=project, **limits)
    else:
        tx.execute(delete(_q).where(_q.c.project == project))
    audit.record(tx, who, "quota.set", project, limits)
    return get(tx, project)


def hold(tx: Connection, project: str) -> None:
    """Lock a project's quota until this transaction ends, so that no other commit takes from it."""
    tx.execute(select(_q.c.project).where(_q.c.project == project).with_for_update())


def require(tx: Connection, project: str, *, more_versions: int = 0) -> int | None:
    """Returns what a project stores, if that is limited.

    Raises QuotaExceeded if it has more than it may, with `more_versions` that are to come. Called
    by a commit when all of the version is in place: what does not fit is rolled back. The quota's
    row is the lock, so that two commits do not both take what is left.
    """
    row = tx.execute(select(_q).where(_q.c.project == project).with_for_update()).one_or_none()
    if row is None:
        return None
    if row.versions is not None and (count := _count(tx, project) + more_versions) > row.versions:
        raise QuotaExceeded(
            f"project {project} would have {count} versions, its quota is {row.versions}: "
            "remove some"
        )
    if row.stored_bytes is None:
        return None
    stored = versions.stored_bytes_of_project(tx, project)
    if stored > row.stored_bytes:
        raise QuotaExceeded(
            f"project {project} would store {stored} bytes, its quota is {row.stored_bytes}: "
            "remove versions"
        )
    return stored


def require_room(
    tx: Connection, upload: UploadId, before: Stored, coming: Sequence[Placement] = ()
) -> None:
    """Raises QuotaExceeded if what an upload has written, with what is `coming`, has no room.

    Asked before more is sent: otherwise the commit would refuse it after all was sent. What other
    uploads write is not counted, as it may never be published.
    """
    u = schema.uploads
    row = tx.execute(
        select(u.c.id, _q.c.project, _q.c.stored_bytes)
        .join(_q, _q.c.project == u.c.project)
        .where(u.c.name == upload.hex, _q.c.stored_bytes.is_not(None))
    ).one_or_none()
    if row is None:
        return
    written = _written(tx, row.id) + _new(tx, coming)
    known = before.known(upload)
    if not written or (known is not None and known + written <= row.stored_bytes):
        return
    # Counted anew before anybody is refused: versions may have been removed since.
    known = versions.stored_bytes_of_project(tx, row.project)
    before.note(upload, known)
    if known + written > row.stored_bytes:
        raise QuotaExceeded(
            f"project {row.project} would store more than {known + written} bytes, its quota is "
            f"{row.stored_bytes}: remove versions, then push again"
        )


def _new(tx: Connection, coming: Sequence[Placement]) -> int:
    """Encoded bytes of those blocks that the yard does not have yet, each counted once.

    Whether the project uses more for the others, only the commit can tell.
    """
    shortest: dict[BlockId, int] = {}
    for placement in coming:
        encoding = placement.encoding
        before = shortest.get(encoding.block, encoding.stored_bytes)
        shortest[encoding.block] = min(before, encoding.stored_bytes)
    known = uploads.find_block_rows(tx, list(shortest))
    return sum(size for block, size in shortest.items() if block not in known)


def _written(tx: Connection, upload_row: int) -> int:
    """Encoded bytes of blocks in packs of an upload, each counted once, as a commit counts them."""
    p, packs = schema.placements, schema.packs
    mine = packs.c.upload_id == upload_row, packs.c.state == FileState.LIVE
    shortest = (
        select(func.min(p.c.stored_bytes).label("stored_bytes"))
        .join(packs, packs.c.id == p.c.pack_id)
        .where(*mine)
        .group_by(p.c.block_id)
        .subquery()
    )
    return int(tx.scalar(select(func.sum(shortest.c.stored_bytes))) or 0)


def _count(tx: Connection, project: str) -> int:
    count = tx.scalar(
        select(func.count())
        .select_from(_v.join(_m))
        .where(_m.c.project == project, _v.c.removed_ms.is_(None))
    )
    return int(count or 0)
