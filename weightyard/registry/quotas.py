"""Quotas: how much a project may store, and how many versions it may have."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, insert, select

from weightyard.errors import QuotaExceeded
from weightyard.records import Quota
from weightyard.registry import audit, schema, versions

_q, _v, _m = schema.quotas, schema.versions, schema.models


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
    tx.execute(delete(_q).where(_q.c.project == project))
    limits = {"stored_bytes": stored_bytes, "versions": versions}
    if stored_bytes is not None or versions is not None:
        tx.execute(insert(_q).values(project=project, **limits))
    audit.record(tx, who, "quota.set", project, limits)
    return get(tx, project)


def require(tx: Connection, project: str, *, more_versions: int = 0) -> None:
    """Raises QuotaExceeded if a project has more than it may, counting versions to come.

    Called by a commit when all of the version is in place: what does not fit is rolled back. The
    quota's row is the lock, so that two commits do not both take what is left.
    """
    row = tx.execute(select(_q).where(_q.c.project == project).with_for_update()).one_or_none()
    if row is None:
        return
    if row.versions is not None and (count := _count(tx, project) + more_versions) > row.versions:
        raise QuotaExceeded(
            f"project {project} would have {count} versions, its quota is {row.versions}: "
            "remove some"
        )
    if row.stored_bytes is not None:
        stored = versions.stored_bytes_of_project(tx, project)
        if stored > row.stored_bytes:
            raise QuotaExceeded(
                f"project {project} would store {stored} bytes, its quota is {row.stored_bytes}: "
                "remove versions"
            )


def _count(tx: Connection, project: str) -> int:
    count = tx.scalar(
        select(func.count())
        .select_from(_v.join(_m))
        .where(_m.c.project == project, _v.c.removed_ms.is_(None))
    )
    return int(count or 0)
