"""Retention: which versions a model's rules allow to be removed.

A version stays if any of this holds: it is the newest; it is among the `keep_last` newest; it was
used (or made) within `ttl_s`; its step is a multiple of `keep_every`; it is among the best by the
metric of `keep_best`; an alias is on it; another version names it as its parent; a reader holds it.
So a version goes only if all rules of its model allow it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, exists, func, or_, select, update

from weightyard.names import ModelName
from weightyard.records import Retention
from weightyard.registry import outbox, schema, versions
from weightyard.registry.database import Database, is_one_of, now_ms
from weightyard.registry.locking import lock
from weightyard.registry.rows import batches, record_events

_v, _m, _a, _leases = schema.versions, schema.models, schema.aliases, schema.read_leases
_BATCH = 5000
"""How many versions one query looks at."""
_REMOVED_AT_ONCE = 200
"""How many versions one transaction removes: others wait for its locks."""


@dataclass(frozen=True, slots=True)
class Due:
    """A version that may go, and why."""

    version_row: int
    model_row: int
    ref: str
    logical_bytes: int
    why: str


def plan(tx: Connection, only: ModelName | None = None) -> Iterator[Due]:
    """Versions that may go, the newest of each model first: a child before its parent.

    With `only`, those of that model. Raises NoSuchThing if there is no such model.
    """
    wanted = select(_m).where(_m.c.retention.is_not(None)).order_by(_m.c.id).limit(1)
    if only is not None:
        wanted = wanted.where(_m.c.id == versions.model_row(tx, only).id)
    gone: set[int] = set()
    after = 0
    while True:
        model = tx.execute(wanted.where(_m.c.id > after)).first()
        if model is None:
            return
        after = model.id
        for batch in _due_of_model(tx, model):
            yield from _without_children(tx, batch, gone)


def not_understood(tx: Connection) -> list[str]:
    """Models whose rules do not count as they are not valid, such as a number over its bound."""
    rows = tx.execute(select(_m).where(_m.c.retention.is_not(None)).order_by(_m.c.id))
    return [
        f"{row.project}/{row.name}: its retention is not understood, so nothing goes: set it again"
        for row in rows
        if row.retention and versions.rules_of(row) is None
    ]


def apply(database: Database, who: str, only: ModelName | None = None) -> Iterator[Due]:
    """Remove what may go, some versions in each transaction, which looks at them once more."""
    for model, dues in groupby(
        database.read(lambda tx: list(plan(tx, only))), key=lambda due: due.model_row
    ):
        for batch in batches(dues, _REMOVED_AT_ONCE):
            yield from database.write(partial(_remove, model_row=model, dues=batch, who=who))


def _remove(tx: Connection, model_row: int, dues: Sequence[Due], who: str) -> list[Due]:
    """Remove versions that are still due once they are locked, without those that others hold."""
    model = tx.execute(select(_m).where(_m.c.id == model_row)).one()
    rules = versions.rules_of(model) or Retention()
    conditions, why = _conditions(model.id, rules)
    if not why:
        return []
    mine = is_one_of(tx, _v.c.id, [due.version_row for due in dues])
    locked = set(lock(tx, _v, and_(conditions, mine)))
    locked -= _best(tx, model.id, rules)  # only now, as their metrics cannot change any more
    due_still = [due for due in dues if due.version_row in locked]
    going = list(_without_children(tx, due_still, set()))
    gone = is_one_of(tx, _v.c.id, [due.version_row for due in going])
    tx.execute(update(_v).where(gone).values(removed_ms=now_ms()))
    told = [(due.ref, {"reason": why}) for due in going]
    record_events(tx, who, "version.removed", told)
    outbox.put_journals(tx, "removed", who, told)
    return going


def _due_of_model(tx: Connection, model: Row[Any]) -> Iterator[list[Due]]:
    """Versions due by the model's rules, the newest first; the caller looks at their children."""
    rules = versions.rules_of(model) or Retention()
    conditions, why = _conditions(model.id, rules)
    if not why:
        return
    best = _best(tx, model.id, rules)
    name = ModelName(model.project, model.name)
    wanted = select(_v.c.id, _v.c.number, _v.c.logical_bytes).where(conditions)
    wanted = wanted.order_by(_v.c.number.desc()).limit(_BATCH)
    rows = tx.execute(wanted).all()
    while rows:
        yield [
            Due(row.id, model.id, f"{name}@v{row.number}", row.logical_bytes, why)
            for row in rows
            if row.id not in best
        ]
        rows = tx.execute(wanted.where(_v.c.number < rows[-1].number)).all()


def _without_children(tx: Connection, dues: Sequence[Due], gone: set[int]) -> Iterator[Due]:
    """Those of `dues` whose children are all in `gone`; each is then added to `gone` itself."""
    rows = [due.version_row for due in dues]
    children: dict[int, list[int]] = {}
    for child, parent in tx.execute(
        select(_v.c.id, _v.c.parent_id).where(
            is_one_of(tx, _v.c.parent_id, rows), _v.c.removed_ms.is_(None)
        )
    ):
        children.setdefault(parent, []).append(child)
    for due in dues:
        if gone.issuperset(children.get(due.version_row, ())):
            gone.add(due.version_row)
            yield due


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
    if rules.keep_every is not None:
        why.append(f"not at a multiple of {rules.keep_every} steps")
        may_go.append(or_(_v.c.step.is_(None), _v.c.step % rules.keep_every != 0))
    if (best := rules.keep_best) is not None:
        why.append(f"not among the {best.count} best by {best.metric}")
    return and_(*may_go), "retention: " + " and ".join(why) if why else ""


def _best(tx: Connection, model_id: int, rules: Retention) -> set[int]:
    """Row ids of the versions `keep_best` keeps; of equal ones the newer.

    Not by SQL: the name of a metric may be any text, which cannot be put into a JSON path.
    """
    if (best := rules.keep_best) is None:
        return set()
    sign = 1.0 if best.mode == "max" else -1.0
    there = select(_v.c.id, _v.c.number, _v.c.metrics)
    rows = tx.execute(there.where(_v.c.model_id == model_id, _v.c.removed_ms.is_(None)))
    measured = (
        (sign * value, row.number, row.id)
        for row in rows
        if math.isfinite(value := row.metrics.get(best.metric, math.nan))
    )
    return {row_id for _, _, row_id in heapq.nlargest(best.count, measured)}
