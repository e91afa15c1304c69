"""Retention: which versions a model's rules let go.

A version stays if any of this holds: it is the newest; it is among the `keep_last` newest; it was
used (or made) within `ttl_s`; an alias is on it; another version names it as its parent; a reader
holds it. Rules only ever take away versions of which all say that they may go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, exists, func, select

from weightyard.errors import NoSuchThing, Protected
from weightyard.names import ModelName, Ref
from weightyard.records import Retention
from weightyard.registry import schema, versions
from weightyard.registry.database import Database, now_ms

_v, _m, _a, _leases = schema.versions, schema.models, schema.aliases, schema.read_leases
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Due:
    """A version that may go, and why."""

    version_row: int
    ref: str
    logical_bytes: int
    why: str


def plan(tx: Connection) -> Iterator[Due]:
    """Versions that may go, the newest of each model first: a child before its parent."""
    gone: set[int] = set()
    after = 0
    while True:
        model = tx.execute(
            select(_m)
            .where(_m.c.id > after, _m.c.retention.is_not(None))
            .order_by(_m.c.id)
            .limit(1)
        ).first()
        if model is None:
            return
        after = model.id
        for due in _due_of_model(tx, model):
            if not _has_child(tx, due.version_row, gone):
                gone.add(due.version_row)
                yield due


def apply(database: Database, who: str) -> Iterator[Due]:
    """Remove what may go, each version in a transaction that looks again."""
    for due in database.read(lambda tx: list(plan(tx))):
        if database.write(partial(_remove, due=due, who=who)):
            yield due


def _remove(tx: Connection, due: Due, who: str) -> bool:
    ref = Ref.parse(due.ref)
    try:
        row = versions.hold(tx, versions.find(tx, ref), alone=True)
        model = versions.model_row(tx, ref.model)
        if not any(still.version_row == row.id for still in _due_of_model(tx, model, row.id)):
            return False
        versions.remove(tx, ref, who, due.why)
    except (NoSuchThing, Protected):  # removed by someone else, or got an alias meanwhile
        return False
    return True


def _due_of_model(tx: Connection, model: Row[Any], version_row: int | None = None) -> Iterator[Due]:
    """By the model's rules alone; parents are left to the caller."""
    rules = Retention.model_validate(model.retention or {})
    conditions, why = _conditions(model.id, rules)
    if not why:
        return
    if version_row is not None:
        conditions = and_(conditions, _v.c.id == version_row)
    before = None
    while True:
        wanted = select(_v.c.id, _v.c.number, _v.c.logical_bytes).where(conditions)
        if before is not None:
            wanted = wanted.where(_v.c.number < before)
        rows = tx.execute(wanted.order_by(_v.c.number.desc()).limit(_BATCH)).all()
        for row in rows:
            name = ModelName(model.project, model.name)
            yield Due(row.id, f"{name}@v{row.number}", row.logical_bytes, why)
        if len(rows) < _BATCH:
            return
        before = rows[-1].number


def _conditions(model_id: int, rules: Retention) -> tuple[ColumnElement[bool], str]:
    why: list[str] = []
    keep_last = rules.keep_last or 1
    kept = _v.alias("kept")
    oldest_kept = (
        select(kept.c.number)
        .where(kept.c.model_id == model_id, kept.c.removed_ms.is_(None))
        .order_by(kept.c.number.desc())
        .limit(1)
        .offset(keep_last - 1)
        .scalar_subquery()
    )
    if rules.keep_last is not None:
        why.append(f"not among the {keep_last} newest")
    may_go = [
        _v.c.model_id == model_id,
        _v.c.removed_ms.is_(None),
        _v.c.number < oldest_kept,
        ~exists().where(_a.c.version_id == _v.c.id),
        ~exists().where(_leases.c.version_id == _v.c.id, _leases.c.until_ms > now_ms()),
    ]
    if rules.ttl_s is not None:
        why.append(f"not used for {rules.ttl_s} s")
        last_use = func.coalesce(_v.c.used_ms, _v.c.created_ms)
        may_go.append(last_use <= now_ms() - rules.ttl_s * 1000)
    return and_(*may_go), "retention: " + " and ".join(why) if why else ""


def _has_child(tx: Connection, version_row: int, gone: set[int]) -> bool:
    children = tx.scalars(
        select(_v.c.id).where(_v.c.parent_id == version_row, _v.c.removed_ms.is_(None))
    )
    return any(child not in gone for child in children)
