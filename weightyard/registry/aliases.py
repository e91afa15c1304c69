"""Aliases: names that move, with every move kept."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, update

from weightyard.errors import AliasMoved, NoSuchThing
from weightyard.names import AliasName, ModelName, Ref
from weightyard.records import AliasMove
from weightyard.registry import outbox, schema, versions
from weightyard.registry.rows import clock, moment, record_event
from weightyard.transfer.catalogue import ANYTHING, Anything
from weightyard.transfer.strict_json import checked_reason

_a, _moves = schema.aliases, schema.alias_moves


def current(tx: Connection, model: ModelName, alias: AliasName) -> int | None:
    """The number of the version an alias is on, or None if there is no such alias."""
    row = versions.model_row(tx, model)
    return tx.scalar(
        select(schema.versions.c.number)
        .join(_a, _a.c.version_id == schema.versions.c.id)
        .where(_a.c.model_id == row.id, _a.c.alias == alias.text)
    )


def move(
    tx: Connection,
    model: ModelName,
    alias: AliasName,
    to: int | None,
    *,
    who: str,
    reason: str = "",
    expect: int | Anything | None = ANYTHING,
) -> AliasMove:
    """Put an alias on a version, or remove it. Raises NoSuchThing, AliasMoved."""
    model_id = versions.model_row(tx, model).id
    # The model's row is the lock for all its aliases, also for one that is not there yet.
    tx.execute(select(schema.models.c.id).where(schema.models.c.id == model_id).with_for_update())
    before = current(tx, model, alias)
    if not isinstance(expect, Anything) and expect != before:
        raise AliasMoved(str(model), alias.text, expect, before)
    if to is None:
        if before is None:
            raise NoSuchThing(f"{model} has no alias {alias}")
        tx.execute(delete(_a).where(_a.c.model_id == model_id, _a.c.alias == alias.text))
    else:
        version_id = versions.hold(tx, versions.find(tx, Ref(model, to))).id
        if before is None:
            tx.execute(
                insert(_a).values(model_id=model_id, alias=alias.text, version_id=version_id)
            )
        else:
            tx.execute(
                update(_a)
                .where(_a.c.model_id == model_id, _a.c.alias == alias.text)
                .values(version_id=version_id)
            )
    at_ms = clock(tx)
    tx.execute(
        insert(_moves).values(
            model_id=model_id,
            alias=alias.text,
            before=before,
            after=to,
            who=who,
            at_ms=at_ms,
            reason=checked_reason(reason),
        )
    )
    moved = AliasMove(
        model=str(model),
        alias=alias.text,
        before=before,
        after=to,
        who=who,
        at=moment(at_ms),
        reason=reason,
        number=tx.scalar(select(func.count()).where(*_of(model_id, alias))),
    )
    detail = {"before": before, "after": to, "reason": reason}
    record_event(tx, who, "alias.moved", f"{model}@{alias}", detail)
    outbox.put_journal(tx, "alias", f"{model}@{alias}", who, detail, at_ms)
    return moved


def log(
    tx: Connection,
    model: ModelName,
    alias: AliasName,
    *,
    as_of: datetime | None = None,
    before: int | None = None,
    limit: int = 1000,
) -> list[AliasMove]:
    """The moves of an alias, newest first; with `before`, those numbered below it.

    With `as_of`, the moves up to that time: the first of them was in force then.
    """
    row = versions.model_row(tx, model)
    number = func.row_number().over(order_by=_moves.c.id).label("number")
    numbered = select(_moves, number).where(*_of(row.id, alias)).subquery()
    wanted = select(numbered)
    if as_of is not None:
        wanted = wanted.where(numbered.c.at_ms <= int(as_of.timestamp() * 1000))
    if before is not None:
        wanted = wanted.where(numbered.c.number < before)
    return [
        AliasMove(
            model=str(model),
            alias=alias.text,
            before=move.before,
            after=move.after,
            who=move.who,
            at=moment(move.at_ms),
            reason=move.reason,
            number=move.number,
        )
        for move in tx.execute(wanted.order_by(numbered.c.number.desc()).limit(limit))
    ]


def _of(model_row: int, alias: AliasName) -> tuple[ColumnElement[bool], ...]:
    return _moves.c.model_id == model_row, _moves.c.alias == alias.text


def rollback(
    tx: Connection, model: ModelName, alias: AliasName, *, who: str, reason: str = ""
) -> AliasMove:
    """Put an alias back on the version it was on before. Repeated, it goes one further back.

    It never goes forward to a version that was rolled back from. Raises NoSuchThing.
    """
    model_id = versions.model_row(tx, model).id
    moves = select(_moves.c.before, _moves.c.after).where(*_of(model_id, alias))
    way = _way(tx.execute(moves.order_by(_moves.c.id)).all())
    if len(way) < 2 or way[-2] is None:
        raise NoSuchThing(f"{model}: alias {alias} was nowhere before: set it on a version")
    before, now = way[-2:]
    undone = "its removal" if now is None else f"the move to v{now}"
    why = reason or f"rollback of {undone}"
    return move(tx, model, alias, before, who=who, reason=why, expect=now)


def _way(moves: Sequence[Row[int | None, int | None]]) -> list[int | None]:
    """The versions an alias was on, up to the present one; leaves out what was rolled back.

    None: it was removed. A move to the version it was already on is no step.
    """
    way: list[int | None] = []
    for before, after in moves:
        if before is not None and way[-1:] != [before]:
            way.append(before)  # the moves to it were lost with entries of the journal
        if way[-2:-1] == [after]:
            way.pop()
        elif way[-1:] != [after]:
            way.append(after)
    return way
