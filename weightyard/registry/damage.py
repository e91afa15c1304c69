"""Damage: what is known to be wrong in the store, and which versions it touches.

Placements in damaged packs are neither read nor claimed, so that a push of the same content writes
it anew. Each function runs inside one transaction of its caller.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Table, and_, exists, func, or_, select, update

from weightyard.registry import schema
from weightyard.registry.database import now_ms
from weightyard.registry.rows import record_event
from weightyard.registry.schema import FileState

READABLE = (FileState.LIVE, FileState.CONDEMNED)

SHOWN_VERSIONS = 100
"""How many versions a finding names."""

_v, _m, _p, _packs = schema.versions, schema.models, schema.placements, schema.packs
_vl, _lb = schema.version_lists, schema.list_blocks


def mark(tx: Connection, table: Table, row_id: int, who: str, why: str) -> bool:
    """Say that a pack or manifest is damaged; False if it is not in use any more."""
    return _move(tx, table, row_id, READABLE, FileState.DAMAGED, who, why)


def unmark(tx: Connection, table: Table, row_id: int, who: str) -> bool:
    """Say that a damaged pack or manifest is whole again."""
    return _move(tx, table, row_id, (FileState.DAMAGED,), FileState.LIVE, who, "")


def _move(
    tx: Connection,
    table: Table,
    row_id: int,
    before: tuple[FileState, ...],
    after: FileState,
    who: str,
    why: str,
) -> bool:
    name = tx.scalar(
        update(table)
        .where(table.c.id == row_id, table.c.state.in_(before))
        .values(state=after, state_ms=now_ms())
        .returning(table.c.name)
    )
    if name is None:
        return False
    kind = "pack" if table is _packs else "manifest"
    what = "damaged" if after is FileState.DAMAGED else "healed"
    record_event(tx, who, f"{kind}.{what}", name, {"reason": why})
    return True


def mark_versions(tx: Connection) -> None:
    """Mark every version that needs a block which cannot be read, and no other."""
    lost = select(_lb.c.list_id).where(~is_readable(_lb.c.block_id))
    damaged = select(_vl.c.version_id).where(_vl.c.list_id.in_(lost))
    tx.execute(
        update(_v)
        .where(_v.c.damaged_ms.is_(None), _v.c.removed_ms.is_(None), _v.c.id.in_(damaged))
        .values(damaged_ms=now_ms())
    )
    unmark_versions(tx)


def unmark_versions(tx: Connection) -> None:
    """Take the mark off versions whose blocks can all be read (again)."""
    still = exists().where(
        _vl.c.version_id == _v.c.id,
        _lb.c.list_id == _vl.c.list_id,
        ~is_readable(_lb.c.block_id),
    )
    tx.execute(
        update(_v)
        .where(_v.c.damaged_ms.is_not(None), ~still)
        .values(damaged_ms=None)
        .execution_options(synchronize_session=False)
    )


def is_readable(block: ColumnElement[int]) -> ColumnElement[bool]:
    """Whether a block lies in a pack that can be read; for a delta, its base must too."""
    base, base_packs = _p.alias("base"), _packs.alias("base_packs")
    has_base = exists().where(
        base.c.block_id == _p.c.base_id,
        base.c.base_id.is_(None),
        base_packs.c.id == base.c.pack_id,
        base_packs.c.state.in_(READABLE),
    )
    return exists().where(
        _p.c.block_id == block,
        _packs.c.id == _p.c.pack_id,
        _packs.c.state.in_(READABLE),
        or_(_p.c.base_id.is_(None), has_base),
    )


def without_placement(tx: Connection) -> list[tuple[str, int]]:
    """Damaged versions, and how many blocks of each lie in no pack, not even in a damaged one.

    A delta counts as well if that is so of its base.
    """
    base = _p.alias("base")
    in_damaged = exists().where(
        or_(
            _p.c.block_id == _lb.c.block_id,
            _p.c.block_id.in_(
                select(base.c.base_id).where(
                    base.c.block_id == _lb.c.block_id, base.c.base_id.is_not(None)
                )
            ),
        ),
        _packs.c.id == _p.c.pack_id,
        _packs.c.state == FileState.DAMAGED,
    )
    rows = tx.execute(
        select(_m.c.project, _m.c.name, _v.c.number, func.count(_lb.c.block_id.distinct()))
        .join(_v, _v.c.model_id == _m.c.id)
        .join(_vl, _vl.c.version_id == _v.c.id)
        .join(_lb, _lb.c.list_id == _vl.c.list_id)
        .where(_v.c.damaged_ms.is_not(None), _v.c.removed_ms.is_(None))
        .where(~is_readable(_lb.c.block_id), ~in_damaged)
        .group_by(_m.c.project, _m.c.name, _v.c.number)
        .order_by(_m.c.project, _m.c.name, _v.c.number)
    )
    return [(f"{project}/{name}@v{number}", blocks) for project, name, number, blocks in rows]


def touched_by_pack(tx: Connection, pack_row: int) -> tuple[str, ...]:
    """Versions that need a block of a pack, whether or not it lies elsewhere too."""
    inside = exists().where(
        _p.c.pack_id == pack_row,
        or_(_p.c.block_id == _lb.c.block_id, _p.c.base_id == _lb.c.block_id),
    )
    lists = select(_lb.c.list_id).where(inside)
    return _refs(tx, _v.c.id.in_(select(_vl.c.version_id).where(_vl.c.list_id.in_(lists))))


def touched_by_manifest(tx: Connection, manifest_row: int) -> tuple[str, ...]:
    return _refs(tx, _v.c.manifest_id == manifest_row)


def damaged_versions(tx: Connection) -> tuple[str, ...]:
    return _refs(tx, _v.c.damaged_ms.is_not(None))


def _refs(tx: Connection, which: ColumnElement[bool]) -> tuple[str, ...]:
    rows = tx.execute(
        select(_m.c.project, _m.c.name, _v.c.number)
        .join(_v, and_(_v.c.model_id == _m.c.id, _v.c.removed_ms.is_(None)))
        .where(which)
        .order_by(_m.c.project, _m.c.name, _v.c.number)
        .limit(SHOWN_VERSIONS)
    )
    return tuple(f"{project}/{name}@v{number}" for project, name, number in rows)
