"""Replication and policy: the store keeps a pack as the most demanding version using it asks.

Commit raises at once (`commits`); gc lowers, when a version that asked for more is gone. Both only
say so in the pack's row; `settle` tells the store.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, or_, select, update

from weightyard.errors import FileMissing
from weightyard.names import PackId
from weightyard.registry import schema
from weightyard.registry.database import Database
from weightyard.registry.locking import found
from weightyard.registry.schema import FileState, Settle
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, Store

_packs, _p, _v = schema.packs, schema.placements, schema.versions
_lb, _vl = schema.list_blocks, schema.version_lists

_KEPT = (FileState.LIVE, FileState.CONDEMNED)


def review_packs_of(tx: Connection, version_row: int) -> None:
    """Note that a version's packs may be kept less well from now on, if it asked for something."""
    asked = tx.execute(select(_v.c.replication, _v.c.policy).where(_v.c.id == version_row)).one()
    if asked.replication is None and asked.policy is None:
        return
    mine = (
        select(_lb.c.block_id)
        .join(_vl, _vl.c.list_id == _lb.c.list_id)
        .where(_vl.c.version_id == version_row)
    )
    bases = select(_p.c.base_id).where(_p.c.block_id.in_(mine), _p.c.base_id.is_not(None))
    holding = select(_p.c.pack_id).where(or_(_p.c.block_id.in_(mine), _p.c.block_id.in_(bases)))
    # In the order of ids, as claims lock packs.
    rows = tx.scalars(
        select(_packs.c.id)
        .where(_packs.c.id.in_(holding))
        .where(or_(_packs.c.replication.is_not(None), _packs.c.policy.is_not(None)))
        .order_by(_packs.c.id)
        .with_for_update()
    ).all()
    for pack_row in rows:
        tx.execute(update(_packs).where(_packs.c.id == pack_row).values(settle=Settle.REVIEW))


def settle(database: Database, store: Store) -> int:
    """Tell the store how to keep the packs of which that changed; returns how many."""
    unsettled = _packs.c.settle.is_not(None)
    default: int | None = None
    done = 0
    for one in found(database, _packs, unsettled, among=unsettled, size=1):
        row = database.write(partial(_wanted, which=one))
        if row is None:
            continue
        name, replication, policy = row
        if replication is None and default is None:
            default = store.stat(layout.YARD).replication  # as files are that nobody asked for
        options = FileOptions(replication=replication or default, policy=policy)
        with suppress(FileMissing):  # `check` says so; there is nothing to adjust
            store.adjust(layout.pack(PackId(name)), options)
        database.write(partial(_settled, name=name, replication=replication, policy=policy))
        done += 1
    return done


def _wanted(
    tx: Connection, which: ColumnElement[bool]
) -> tuple[str, int | None, str | None] | None:
    """How a pack should be kept; None if it does not matter any more."""
    row = tx.execute(select(_packs).where(which).with_for_update()).one_or_none()
    if row is None:
        return None
    if row.state not in _KEPT:
        tx.execute(update(_packs).where(_packs.c.id == row.id).values(settle=None))
        return None
    if row.settle != Settle.REVIEW:
        return row.name, row.replication, row.policy
    asked = _asked(row.id)
    policy = tx.scalar(
        asked.with_only_columns(_v.c.policy)
        .where(_v.c.policy.is_not(None))
        .order_by(_v.c.id.desc())
        .limit(1)
    )
    highest = row.replication
    as_much = asked.where(_v.c.replication >= highest).limit(1)
    if highest is not None and tx.scalar(as_much) is None:
        highest = tx.scalar(asked.with_only_columns(func.max(_v.c.replication)))
    tx.execute(
        update(_packs)
        .where(_packs.c.id == row.id)
        .values(replication=highest, policy=policy, settle=Settle.ADJUST)
    )
    return row.name, highest, policy


def _asked(pack_row: int) -> Select[Any]:
    """Versions that need blocks of a pack, as bases too."""
    delta = _p.alias("delta")
    inside = select(_p.c.block_id).where(_p.c.pack_id == pack_row)
    on_top = select(delta.c.block_id).where(delta.c.base_id.in_(inside))
    lists = select(_lb.c.list_id).where(or_(_lb.c.block_id.in_(inside), _lb.c.block_id.in_(on_top)))
    using = select(_vl.c.version_id).where(_vl.c.list_id.in_(lists))
    return select(_v.c.id).where(_v.c.removed_ms.is_(None), _v.c.id.in_(using))


def _settled(tx: Connection, name: str, replication: int | None, policy: str | None) -> None:
    """The store was told, unless something else was asked for meanwhile."""
    same = (
        _packs.c.replication.is_not_distinct_from(replication),
        _packs.c.policy.is_not_distinct_from(policy),
        _packs.c.settle == Settle.ADJUST,
    )
    tx.execute(update(_packs).where(_packs.c.name == name, *same).values(settle=None))
