"""Read leases: a reader that takes long holds one, so that gc leaves its version alone.

A lease counts until gc finds it expired and removes it; then it cannot be renewed any more. Ids are
random. SQLite, or a rebuilt registry, would give a new lease the number of one that ended, and the
former holder could renew or release it.
"""

from __future__ import annotations

import secrets
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from weightyard.errors import NoSuchThing, Refused
from weightyard.names import Ref
from weightyard.records import MAX_HOLDER, MAX_LEASE_S, ReadLease
from weightyard.registry import schema, versions
from weightyard.registry.database import now_ms
from weightyard.registry.rows import clock, moment

_leases = schema.read_leases

_ID_BITS = 53
"""As many as every reader of JSON keeps exactly in a whole number."""


def take(tx: Connection, ref: Ref, holder: str, seconds: float, author: str) -> ReadLease:
    """Hold a version's bytes for a while, whatever happens to the version. Raises NoSuchThing."""
    if not holder or len(holder) > MAX_HOLDER:
        raise Refused(f"a lease names its holder in 1 to {MAX_HOLDER} characters")
    row = versions.find(tx, ref)
    v = schema.versions
    # One statement notes the use and locks the row. With a shared lock first, two readers would
    # each wait for the other's when they note the use.
    there = update(v).where(v.c.id == row.id, v.c.removed_ms.is_(None)).values(used_ms=now_ms())
    if not tx.execute(there).rowcount:
        raise NoSuchThing(f"no version {ref}: it was just removed")
    until_ms = clock(tx) + _millis(seconds)
    lease_id = secrets.randbits(_ID_BITS)
    tx.execute(
        insert(_leases).values(
            id=lease_id, version_id=row.id, holder=holder, until_ms=until_ms, author=author
        )
    )
    return ReadLease(
        id=lease_id,
        ref=f"{row.project}/{row.name}@v{row.number}",
        holder=holder,
        until=moment(until_ms),
        author=author,
    )


def renew(tx: Connection, lease_id: int, seconds: float) -> ReadLease:
    """Have a lease last so long from now. Raises NoSuchThing if it was given up or has ended."""
    until_ms = clock(tx) + _millis(seconds)
    row = tx.execute(
        update(_leases).where(_leases.c.id == lease_id).values(until_ms=until_ms).returning(_leases)
    ).one_or_none()
    if row is None:
        raise NoSuchThing(f"read lease {lease_id} has ended: resolve the version again")
    return _as_lease(tx, row)


def find(tx: Connection, lease_id: int) -> ReadLease:
    """A lease that was not given up. Raises NoSuchThing."""
    row = tx.execute(select(_leases).where(_leases.c.id == lease_id)).one_or_none()
    if row is None:
        raise no_such_lease(lease_id)
    return _as_lease(tx, row)


def no_such_lease(lease_id: int) -> NoSuchThing:
    return NoSuchThing(f"there is no read lease {lease_id}")


def _as_lease(tx: Connection, row: Row[Any]) -> ReadLease:
    """Removed versions count as well: outliving that is what a lease is for."""
    v, m = schema.versions, schema.models
    project, name, number = tx.execute(
        select(m.c.project, m.c.name, v.c.number)
        .join(v, v.c.model_id == m.c.id)
        .where(v.c.id == row.version_id)
    ).one()
    return ReadLease(
        id=row.id,
        ref=f"{project}/{name}@v{number}",
        holder=row.holder,
        until=moment(row.until_ms),
        author=row.author,
    )


def release(tx: Connection, lease_id: int) -> None:
    """Give a lease up. One that is not there is no error."""
    tx.execute(delete(_leases).where(_leases.c.id == lease_id))


def drop_expired(tx: Connection) -> int:
    """Remove leases that ended. Waits for a renewal in another transaction, which then counts."""
    return tx.execute(delete(_leases).where(_leases.c.until_ms <= now_ms())).rowcount


def _millis(seconds: float) -> int:
    if not 0 < seconds <= MAX_LEASE_S:
        raise Refused(f"a lease lasts up to {MAX_LEASE_S:.0f} s, not {seconds}")
    return int(seconds * 1000)
