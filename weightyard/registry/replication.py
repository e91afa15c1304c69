"""Replication and policy: the store keeps a file as the most demanding version using it asks.

A commit may raise what is asked of a file; gc lowers it when a version that asked for more is gone.
Both only note it in the row of the pack or manifest; `settle` tells the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    case,
    func,
    literal,
    not_,
    or_,
    select,
    update,
)

from weightyard.errors import FileMissing, Unsupported
from weightyard.logs import Log
from weightyard.names import Digest, PackId
from weightyard.registry import schema
from weightyard.registry.database import Database
from weightyard.registry.locking import found
from weightyard.registry.schema import FileState, Settle
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, Store, StorePath

_log = Log(__name__)

_packs, _manifests, _p, _v = schema.packs, schema.manifests, schema.placements, schema.versions
_lb, _vl = schema.list_blocks, schema.version_lists

_KEPT = (FileState.LIVE, FileState.CONDEMNED)

_USUAL_COPIES = 3
"""How many copies HDFS keeps of a file by default, unless it is set up otherwise."""


def _users_of_pack(pack_row: int) -> Select[Any]:
    """Versions that need blocks of a pack, be it as bases of deltas."""
    delta = _p.alias("delta")
    inside = select(_p.c.block_id).where(_p.c.pack_id == pack_row)
    on_top = select(delta.c.block_id).where(delta.c.base_id.in_(inside))
    lists = select(_lb.c.list_id).where(or_(_lb.c.block_id.in_(inside), _lb.c.block_id.in_(on_top)))
    using = select(_vl.c.version_id).where(_vl.c.list_id.in_(lists))
    return select(_v.c.id).where(_v.c.removed_ms.is_(None), _v.c.id.in_(using))


def _users_of_manifest(manifest_row: int) -> Select[Any]:
    return select(_v.c.id).where(_v.c.removed_ms.is_(None), _v.c.manifest_id == manifest_row)


@dataclass(frozen=True, slots=True)
class _Kind:
    table: Table
    path: Callable[[str], StorePath]
    users: Callable[[int], Select[Any]]
    """The versions that use a row."""
    has_policy: bool
    """Whether policies apply. Not to manifests: every load reads one, so they stay on the usual
    disks."""


_KINDS = (
    _Kind(_packs, lambda name: layout.pack(PackId(name)), _users_of_pack, has_policy=True),
    _Kind(
        _manifests, lambda name: layout.manifest(Digest(name)), _users_of_manifest, has_policy=False
    ),
)


def ask(
    tx: Connection,
    table: Table,
    which: ColumnElement[bool],
    copies: int | None,
    policy: str | None = None,
) -> None:
    """Note in rows, which the caller has locked, that one more version uses them and asks for this.

    A version that asks for nothing wants the store's default, which only the store knows: if that
    may be more than the row says, `settle` finds out.
    """
    kept = table.c.replication
    if copies is None:
        may_be_few = update(table).where(which, kept < _USUAL_COPIES)
        tx.execute(may_be_few.values(settle=Settle.REVIEW))
    else:
        is_review = or_(kept.is_(None), table.c.settle == Settle.REVIEW)
        more = update(table).where(which, or_(kept.is_(None), kept < copies))
        settled = case((is_review, literal(Settle.REVIEW)), else_=literal(Settle.ADJUST))
        tx.execute(more.values(replication=copies, settle=settled))
    if policy is not None:
        other = update(table).where(which, table.c.policy.is_distinct_from(policy))
        is_review = table.c.settle == Settle.REVIEW
        settled = case((is_review, literal(Settle.REVIEW)), else_=literal(Settle.ADJUST))
        tx.execute(other.values(policy=policy, settle=settled))


def review_files_of(tx: Connection, version_row: int) -> None:
    """Note that a version no longer asks for anything: its files may need fewer copies now."""
    asked = tx.execute(
        select(_v.c.replication, _v.c.policy, _v.c.manifest_id).where(_v.c.id == version_row)
    ).one()
    if asked.replication is None and asked.policy is None:
        return
    # In the order of ids, as claims lock packs.
    rows = tx.scalars(
        select(_packs.c.id)
        .where(_packs.c.id.in_(packs_of(version_row)))
        .where(or_(_packs.c.replication.is_not(None), _packs.c.policy.is_not(None)))
        .order_by(_packs.c.id)
        .with_for_update()
    ).all()
    for pack_row in rows:
        tx.execute(update(_packs).where(_packs.c.id == pack_row).values(settle=Settle.REVIEW))
    tx.execute(
        update(_manifests)
        .where(_manifests.c.id == asked.manifest_id, _manifests.c.replication.is_not(None))
        .values(settle=Settle.REVIEW)
    )


def packs_of(version_row: int) -> Select[Any]:
    """Row ids of the packs that hold a version's blocks and their bases."""
    mine = (
        select(_lb.c.block_id)
        .join(_vl, _vl.c.list_id == _lb.c.list_id)
        .where(_vl.c.version_id == version_row)
    )
    bases = select(_p.c.base_id).where(_p.c.block_id.in_(mine), _p.c.base_id.is_not(None))
    return select(_p.c.pack_id).where(or_(_p.c.block_id.in_(mine), _p.c.block_id.in_(bases)))


def settle(database: Database, store: Store) -> int:
    """Tell the store of files that are to be kept otherwise; returns how many there were."""
    if not database.read(_is_anything_waiting):
        return 0
    usual = store.stat(layout.YARD).replication  # written without asking for any number
    done = 0
    for kind in _KINDS:
        waiting = kind.table.c.settle.is_not(None)
        for one in found(database, kind.table, waiting, among=waiting, size=1):
            done += _settle_one(database, store, kind, one, usual)
    return done


def _is_anything_waiting(tx: Connection) -> bool:
    return any(
        tx.scalar(select(kind.table.c.id).where(kind.table.c.settle.is_not(None)).limit(1))
        for kind in _KINDS
    )


def _settle_one(
    database: Database, store: Store, kind: _Kind, which: ColumnElement[bool], usual: int
) -> bool:
    row = database.write(partial(_wanted, kind=kind, which=which, usual=usual))
    if row is None:
        return False
    name, copies, policy = row
    try:
        store.adjust(kind.path(name), FileOptions(replication=copies or usual, policy=policy))
    except FileMissing:
        pass  # there is nothing to adjust; `check` reports the missing file
    except Unsupported as why:  # asked of files that were there: a writer would have failed
        _log.warning("replication.unsupported", path=kind.path(name), reason=why)
    database.write(partial(_settled, kind=kind, name=name, copies=copies, policy=policy))
    return True


def _wanted(
    tx: Connection, kind: _Kind, which: ColumnElement[bool], usual: int
) -> tuple[str, int | None, str | None] | None:
    """How a file should be kept; None if it is not in use any more, or has no such row."""
    table = kind.table
    row = tx.execute(select(table).where(which).with_for_update()).one_or_none()
    if row is None:
        return None
    if row.state not in _KEPT:
        tx.execute(update(table).where(table.c.id == row.id).values(settle=None))
        return None
    if row.settle != Settle.REVIEW:
        return row.name, row.replication, row.policy
    users = kind.users(row.id)
    policy = _newest_policy(tx, users) if kind.has_policy else None
    copies = row.replication
    as_many = users.where(_v.c.replication >= copies).limit(1)
    if copies is not None and tx.scalar(as_many) is None:
        copies = tx.scalar(users.with_only_columns(func.max(_v.c.replication)))
    if copies is not None and copies <= usual:
        asks_nothing = users.where(_v.c.replication.is_(None)).limit(1)
        copies = None if tx.scalar(asks_nothing) is not None else copies
    tx.execute(
        update(table)
        .where(table.c.id == row.id)
        .values(replication=copies, policy=policy, settle=Settle.ADJUST)
    )
    return row.name, copies, policy


def _newest_policy(tx: Connection, users: Select[Any]) -> str | None:
    wanted = users.with_only_columns(_v.c.policy).where(_v.c.policy.is_not(None))
    return tx.scalar(wanted.order_by(_v.c.id.desc()).limit(1))


def _settled(
    tx: Connection, kind: _Kind, name: str, copies: int | None, policy: str | None
) -> None:
    """Note that the store was told, unless something else was asked for meanwhile."""
    table = kind.table
    one = table.c.name == name
    same = and_(
        table.c.replication.is_not_distinct_from(copies),
        table.c.policy.is_not_distinct_from(policy),
    )
    told = update(table).where(one, same, table.c.settle == Settle.ADJUST)
    tx.execute(told.values(settle=None))
    # Another process has told the store what was asked since. This one may have told it the old
    # value after that, so it is to be told again.
    overtaken = update(table).where(one, not_(same), table.c.settle.is_(None))
    tx.execute(overtaken.values(settle=Settle.ADJUST))
