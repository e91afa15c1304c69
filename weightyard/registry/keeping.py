"""Keeping: how many copies of a version there shall be, and on what kind of disk."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, or_, select, update

from weightyard.names import Ref
from weightyard.records import Version
from weightyard.registry import outbox, replication, schema, versions
from weightyard.registry.rows import record_event
from weightyard.registry.schema import Settle

_packs, _p, _v = schema.packs, schema.placements, schema.versions
_lb, _vl = schema.list_blocks, schema.version_lists


def keep(tx: Connection, ref: Ref, *, copies: int | None, policy: str | None, who: str) -> Version:
    """Ask for copies, a policy, or both, for a version; what is None stays as it is.

    Its packs are kept at least so from now on, and less where nobody asks for more any longer;
    `replication.settle` tells the store. Raises NoSuchThing.
    """
    row = versions.hold(tx, versions.find(tx, ref), alone=True)
    asked: dict[str, Any] = {"replication": copies, "policy": policy}
    changes = {name: value for name, value in asked.items() if value is not None}
    replication.review_packs_of(tx, row.id)  # those that were kept for its sake alone
    tx.execute(update(_v).where(_v.c.id == row.id).values(**changes))
    mine = (
        select(_lb.c.block_id)
        .join(_vl, _vl.c.list_id == _lb.c.list_id)
        .where(_vl.c.version_id == row.id)
    )
    bases = select(_p.c.base_id).where(_p.c.block_id.in_(mine), _p.c.base_id.is_not(None))
    holding = _packs.c.id.in_(
        select(_p.c.pack_id).where(or_(_p.c.block_id.in_(mine), _p.c.block_id.in_(bases)))
    )
    # In the order of ids, as claims lock packs.
    tx.execute(select(_packs.c.id).where(holding).order_by(_packs.c.id).with_for_update())
    for column, value, differs in (
        (
            _packs.c.replication,
            copies,
            or_(_packs.c.replication.is_(None), _packs.c.replication < copies),
        ),
        (_packs.c.policy, policy, _packs.c.policy.is_distinct_from(policy)),
    ):
        if value is not None:
            values = {column.name: value, "settle": Settle.REVIEW}
            tx.execute(update(_packs).where(holding, differs).values(values))
    version = versions.get(tx, row.id)
    record_event(tx, who, "version.kept", version.ref, changes)
    outbox.put_journal(tx, "annotated", version.ref, who, changes)
    return version
