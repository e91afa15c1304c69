"""Cost: what a version takes, what it shares, and what removing it would give back. All in SQL."""

from __future__ import annotations

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Select,
    func,
    or_,
    select,
    union,
)

from weightyard.names import Ref
from weightyard.records import Cost
from weightyard.registry import schema, versions
from weightyard.registry.rows import some
from weightyard.registry.schema import Dedup, FileState

_v, _m, _b, _p, _packs = (
    schema.versions,
    schema.models,
    schema.blocks,
    schema.placements,
    schema.packs,
)
_lb, _vl = schema.list_blocks, schema.version_lists

SHOWN = 20
"""For how many other versions a cost says how much is shared with them."""

BESIDE = 16
"""To find these, so many versions of the same model before and after this one are looked at, …"""

FOUND = 32
"""… and so many others that have blocks of it."""

_OTHER_FILES = 3
"""Its manifest, its record, and the entry of the journal that tells of it."""

WAYS = 100_000
"""How many pairs of a block and a version that has it are looked at to find those others."""


def cost(tx: Connection, ref: Ref, *, copies: int = 1, shown: int = SHOWN) -> Cost:
    """What a version costs; `copies` is how often the store keeps a pack unless asked otherwise.

    A block that lies in several places, such as one stored whole and as a delta, counts in all of
    them; a reader takes one: standalone before delta, then the shortest. Raises NoSuchThing.
    """
    row = versions.find(tx, ref)
    mine = _blocks_of(row.id)
    best = _best(select(mine.c.block_id))
    bases = _best(_missing_bases(mine, best), standalone=True)
    each = _placements(select(mine.c.block_id), row.project).subquery()
    kept = func.coalesce(each.c.replication, copies)
    stored, replicated, packs = tx.execute(
        select(
            func.coalesce(func.sum(each.c.stored_bytes), 0),
            func.coalesce(func.sum(each.c.stored_bytes * kept), 0),
            func.count(each.c.pack_id.distinct()),
        )
    ).one()
    read = _sum(tx, select(func.sum(best.c.stored_bytes)))
    shared, is_complete = _shared_with(tx, row.id, mine, shown) if shown else ({}, False)
    return Cost(
        ref=f"{row.project}/{row.name}@v{row.number}",
        logical_bytes=row.logical_bytes,
        unique_bytes=_sum(
            tx,
            select(func.sum(_b.c.raw_bytes)).where(
                _b.c.id.in_(select(mine.c.block_id)), ~_others_need(_b.c.id, row.id)
            ),
        ),
        stored_bytes=int(stored),
        unique_stored_bytes=_freed(tx, row.id, row.project),
        replicated_bytes=int(replicated),
        packs=packs,
        namenode_objects=2 * (packs + _OTHER_FILES),
        cold_load_bytes=read + _sum(tx, select(func.sum(bases.c.stored_bytes))),
        shared_with=shared,
        shared_with_is_complete=is_complete,
    )


def freed_by_removing(tx: Connection, ref: Ref) -> int:
    """Stored bytes of blocks nobody else needs: what removing the version frees, in time."""
    row = versions.find(tx, ref)
    return _freed(tx, row.id, row.project)


def _freed(tx: Connection, version_row: int, project: str) -> int:
    """Stored bytes of its blocks and of its deltas' bases, as far as nobody else needs them."""
    mine = _blocks_of(version_row)
    bases = select(_p.c.base_id).where(
        _p.c.block_id.in_(select(mine.c.block_id)), _p.c.base_id.is_not(None)
    )
    all_mine = union(select(mine.c.block_id), bases).subquery()
    alone = select(_b.c.id).where(
        _b.c.id.in_(select(all_mine.c.block_id)), ~_others_need(_b.c.id, version_row)
    )
    return _sum(tx, select(func.sum(_placements(alone, project).subquery().c.stored_bytes)))


def _blocks_of(version_row: int) -> CTE:
    return (
        select(_lb.c.block_id)
        .join(_vl, _vl.c.list_id == _lb.c.list_id)
        .where(_vl.c.version_id == version_row)
        .distinct()
        .cte("mine")
    )


def _placements(blocks: Select[tuple[int]], project: str) -> Select[tuple[int, int, int]]:
    """All placements of blocks; if projects share nothing, those in packs of this project."""
    readable = _packs.c.state.in_((FileState.LIVE, FileState.CONDEMNED))
    own = or_(_packs.c.project.is_(None), _packs.c.project == project)
    return (
        select(_p.c.pack_id, _p.c.stored_bytes, _packs.c.replication)
        .join(_packs, _packs.c.id == _p.c.pack_id)
        .where(readable, own, _p.c.block_id.in_(blocks))
    )


def _best(blocks: Select[tuple[int]], *, standalone: bool = False) -> CTE:
    """For each block the placement a reader takes."""
    readable = _packs.c.state.in_((FileState.LIVE, FileState.CONDEMNED))
    order = (_p.c.base_id.is_not(None), _p.c.stored_bytes, _p.c.pack_id, _p.c.offset)
    ranked = (
        select(
            _p.c.block_id,
            _p.c.base_id,
            _p.c.pack_id,
            _p.c.stored_bytes,
            func.row_number().over(partition_by=_p.c.block_id, order_by=order).label("rank"),
        )
        .join(_packs, _packs.c.id == _p.c.pack_id)
        .where(readable, _p.c.block_id.in_(blocks))
    )
    if standalone:
        ranked = ranked.where(_p.c.base_id.is_(None))
    inner = ranked.subquery()
    return select(inner).where(inner.c.rank == 1).cte()


def _missing_bases(mine: CTE, best: CTE) -> Select[tuple[int]]:
    """Bases of its deltas that are no blocks of the version, and so are fetched besides."""
    return (
        select(best.c.base_id)
        .where(best.c.base_id.is_not(None), best.c.base_id.not_in(select(mine.c.block_id)))
        .distinct()
    )


def _others_need(block: ColumnElement[int], version_row: int) -> ColumnElement[bool]:
    delta = _p.alias("delta")
    on_top = some(delta.c.base_id == block, _in_others(delta.c.block_id, version_row))
    return or_(_in_others(block, version_row), on_top)


def _in_others(block: ColumnElement[int], version_row: int) -> ColumnElement[bool]:
    lists, edge, other = _lb.alias("lists_of"), _vl.alias("edge_of"), _v.alias("other")
    is_there = some(
        other.c.id == edge.c.version_id,
        other.c.removed_ms.is_(None),
        _may_share(other.c.model_id, version_row),
    )
    in_use = some(
        edge.c.list_id == lists.c.list_id,
        edge.c.version_id != version_row,
        is_there,
        first=edge.c.version_id.desc(),
    )
    return some(lists.c.block_id == block, in_use)


def _may_share(model: ColumnElement[int], version_row: int) -> ColumnElement[bool]:
    """Whether a model may share blocks with a version. If dedup is by project: one of its project.

    So the cost of a version does not tell what another project has.
    """
    own, mine, theirs = _v.alias("own"), _m.alias("own_model"), _m.alias("other_model")
    dedup = select(schema.registry.c.dedup).scalar_subquery()
    return or_(
        dedup == Dedup.YARD,
        some(
            theirs.c.id == model,
            own.c.id == version_row,
            mine.c.id == own.c.model_id,
            mine.c.project == theirs.c.project,
        ),
    )


def _shared_with(
    tx: Connection, version_row: int, mine: CTE, shown: int
) -> tuple[dict[str, int], bool]:
    """Raw bytes in common with the versions that share most, among those looked at; and whether
    these are all that share any."""
    ways, found = _ways(mine), _found(version_row, mine)
    near = _candidates(version_row, found)
    common = (
        select(near.c.version_id, _lb.c.block_id)
        .join_from(near, _vl, _vl.c.version_id == near.c.version_id)
        .join(_lb, _lb.c.list_id == _vl.c.list_id)
        .where(_lb.c.block_id.in_(select(mine.c.block_id)))
        .distinct()
        .subquery()
    )
    shared_bytes = func.sum(_b.c.raw_bytes).label("shared_bytes")
    totals = (
        select(common.c.version_id, shared_bytes)
        .join(_b, _b.c.id == common.c.block_id)
        .group_by(common.c.version_id)
        .subquery()
    )
    rows = tx.execute(
        select(_m.c.project, _m.c.name, _v.c.number, totals.c.shared_bytes)
        .join_from(totals, _v, _v.c.id == totals.c.version_id)
        .join(_m, _m.c.id == _v.c.model_id)
        .order_by(totals.c.shared_bytes.desc(), _v.c.id.desc())
        .limit(shown + 1)
    ).all()
    shared = {f"{project}/{name}@v{number}": int(size) for project, name, number, size in rows}
    is_complete = len(rows) <= shown and _is_less(tx, ways, WAYS) and _is_less(tx, found, FOUND)
    return dict(list(shared.items())[:shown]), is_complete


def _is_less(tx: Connection, some: Select[tuple[int]], most: int) -> bool:
    return (tx.scalar(select(func.count()).select_from(some.subquery())) or 0) < most


def _candidates(version_row: int, found: Select[tuple[int]]) -> CTE:
    """Versions to look at: neighbours of the same model, and those found by its blocks."""
    own = select(_v.c.model_id, _v.c.number).where(_v.c.id == version_row).cte("own")
    beside = (_v.c.model_id == own.c.model_id, *_is_seen_beside(version_row))
    older = select(_v.c.id).where(*beside, _v.c.number < own.c.number).order_by(_v.c.number.desc())
    newer = select(_v.c.id).where(*beside, _v.c.number > own.c.number).order_by(_v.c.number)
    parts = (older.limit(BESIDE), newer.limit(BESIDE), found)
    each = [select(part.subquery().c.id.label("version_id")) for part in parts]
    return union(*each).cte("near")


def _is_seen_beside(version_row: int) -> tuple[ColumnElement[bool], ...]:
    return _v.c.id != version_row, _v.c.removed_ms.is_(None)


def _ways(mine: CTE) -> Select[tuple[int]]:
    """Versions that have its blocks, each as often as there are pairs of list and block.

    Thousands of versions that share thousands of lists make more pairs than can be looked at. So
    there is a limit; where there are fewer, every version that shares is found.
    """
    return (
        select(_vl.c.version_id)
        .join_from(_lb, _vl, _vl.c.list_id == _lb.c.list_id)
        .where(_lb.c.block_id.in_(select(mine.c.block_id)))
        .limit(WAYS)
    )


def _found(version_row: int, mine: CTE) -> Select[tuple[int]]:
    """The newest versions that have blocks of this one."""
    ways = _ways(mine).subquery()
    # Materialized, so that PostgreSQL begins with these few. Else it goes through all versions from
    # the newest, and for each of them through all pairs.
    reached = (
        select(ways.c.version_id)
        .distinct()
        .cte("reached")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    return (
        select(_v.c.id)
        .join_from(reached, _v, _v.c.id == reached.c.version_id)
        .where(*_is_seen_beside(version_row), _may_share(_v.c.model_id, version_row))
        .order_by(reached.c.version_id.desc())
        .limit(FOUND)
    )


def _sum(tx: Connection, statement: Select[tuple[int]]) -> int:
    return int(tx.scalar(statement) or 0)
