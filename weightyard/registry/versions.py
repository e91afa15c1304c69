"""Models and versions: finding, listing, removing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import (
    BigInteger,
    Connection,
    Row,
    Select,
    bindparam,
    func,
    literal,
    literal_column,
    select,
    tuple_,
    update,
)

from weightyard.errors import Changed, Conflict, NoSuchThing, Protected, Refused
from weightyard.logs import Log
from weightyard.names import Digest, ModelName, Ref, Step
from weightyard.records import Model, Retention, Version, tellable
from weightyard.registry import outbox, schema
from weightyard.registry.database import now_ms
from weightyard.registry.rows import clock, insert_missing, moment, record_event, some
from weightyard.registry.schema import FileState
from weightyard.transfer.publish import checked_publication
from weightyard.transfer.strict_json import checked_reason

_log = Log(__name__)

_USE_NOTED_MS = 60_000

_v, _m, _a = schema.versions, schema.models, schema.aliases
_parent, _parent_model = _v.alias("parent"), _m.alias("parent_model")
_other = _v.alias("other")


def ensure_model(tx: Connection, model: ModelName, who: str, kind: str = "model") -> bool:
    """Make a model unless there is one, of whatever kind. Returns whether it was made.

    A removed one is made again: it goes on with the next number, and may be of another kind.
    """
    there = select(_m).where(_m.c.project == model.project, _m.c.name == model.name)
    row = tx.execute(there).one_or_none()
    if row is not None and row.removed_ms is None:
        return False
    insert_missing(
        tx,
        _m,
        [
            {
                "project": model.project,
                "name": model.name,
                "kind": kind,
                "created_ms": clock(tx),
                "created_by": who,
                "last_number": 0,
            }
        ],
    )
    removed = (_m.c.project == model.project, _m.c.name == model.name, _m.c.removed_ms.is_not(None))
    tx.execute(update(_m).where(*removed).values(removed_ms=None, kind=kind))
    row = tx.execute(there).one()
    made = {"kind": row.kind, "created_ms": row.created_ms}
    outbox.put_journal(tx, "model", str(model), row.created_by, made)
    return True


def model_row(tx: Connection, model: ModelName) -> Row[Any]:
    """The model's row. Raises NoSuchThing."""
    named = {"of_project": model.project, "named": model.name}
    row = tx.execute(_MODEL, named).one_or_none()
    if row is None or row.removed_ms is not None:
        raise NoSuchThing(f"no model {model}")
    return row


def list_models(
    tx: Connection,
    *,
    projects: Sequence[str] | None = None,
    kind: str | None = "model",
    after: ModelName | None = None,
    limit: int = 1000,
) -> list[Model]:
    """Models by name, of these projects; with `after`, those after that name."""
    wanted = select(_m).where(_m.c.removed_ms.is_(None))
    wanted = wanted.order_by(_m.c.project, _m.c.name).limit(limit)
    if projects is not None:
        wanted = wanted.where(_m.c.project.in_(projects))
    if kind is not None:
        wanted = wanted.where(_m.c.kind == kind)
    if after is not None:
        wanted = wanted.where(
            (_m.c.project > after.project)
            | ((_m.c.project == after.project) & (_m.c.name > after.name))
        )
    rows = tx.execute(wanted).all()
    return _as_models(tx, rows)


def get_model(tx: Connection, model: ModelName) -> Model:
    return _as_models(tx, [model_row(tx, model)])[0]


def _as_models(tx: Connection, rows: Sequence[Row[Any]]) -> list[Model]:
    ids = [row.id for row in rows]
    counts = {
        model_id: (latest, count)
        for model_id, latest, count in tx.execute(
            select(_v.c.model_id, func.max(_v.c.number), func.count())
            .where(_v.c.model_id.in_(ids), _v.c.removed_ms.is_(None))
            .group_by(_v.c.model_id)
        )
    }
    a = schema.aliases
    aliases: dict[int, dict[str, int]] = {}
    for model_id, alias, number in tx.execute(
        select(a.c.model_id, a.c.alias, _v.c.number)
        .join(_v, _v.c.id == a.c.version_id)
        .where(a.c.model_id.in_(ids))
        .order_by(a.c.alias)
    ):
        aliases.setdefault(model_id, {})[alias] = number
    steps = _steps(tx, {row.id: counts[row.id][0] for row in rows if row.id in counts})
    return [
        Model(
            name=f"{row.project}/{row.name}",
            kind=row.kind,
            created=moment(row.created_ms),
            created_by=row.created_by,
            latest=counts.get(row.id, (None, 0))[0],
            versions=counts.get(row.id, (None, 0))[1],
            aliases=aliases.get(row.id, {}),
            retention=rules_of(row),
            generation=row.generation if row.kind == "run" else None,
            latest_step=steps.get(row.id),
        )
        for row in rows
    ]


def rules_of(model: Row[Any]) -> Retention | None:
    """A model's rules; None if it has none, or invalid ones: then nothing goes."""
    try:
        return Retention.model_validate(model.retention) if model.retention else None
    except ValidationError:
        _log.warning("retention.not_understood", model=f"{model.project}/{model.name}")
        return None


def _steps(tx: Connection, latest: Mapping[int, int]) -> dict[int, int]:
    """The steps of these versions (model row id → number), without those that have none."""
    named = tuple_(_v.c.model_id, _v.c.number).in_(list(latest.items()))
    wanted = select(_v.c.model_id, _v.c.step).where(named, _v.c.step.is_not(None))
    return {row.model_id: row.step for row in tx.execute(wanted)} if latest else {}


_COMMA: Any = literal_column("','")  # a str would be a parameter, bound anew every time
_ALIASES = (
    select(func.aggregate_strings(_a.c.alias, _COMMA))
    .where(_a.c.version_id == _v.c.id)
    .scalar_subquery()
    .label("aliases")
)
"""Names of aliases, in no order; NULL if there are none. None of them has a comma in it."""


def _selected() -> Select[Any]:
    return _with_removed().where(_v.c.removed_ms.is_(None))


def _with_removed() -> Select[Any]:
    return (
        select(
            _v,
            _m.c.project,
            _m.c.name,
            schema.manifests.c.name.label("digest"),
            schema.manifests.c.state.label("manifest_state"),
            _parent.c.number.label("parent_number"),
            _parent_model.c.project.label("parent_project"),
            _parent_model.c.name.label("parent_name"),
            _ALIASES,
        )
        .join(_m, _m.c.id == _v.c.model_id)
        .join(schema.manifests, schema.manifests.c.id == _v.c.manifest_id)
        .outerjoin(_parent, _parent.c.id == _v.c.parent_id)
        .outerjoin(_parent_model, _parent_model.c.id == _parent.c.model_id)
    )


# Built once: building them takes longer than the database takes to answer. Each also finds the
# model: another statement for that would take as long again.
_MODEL = select(_m).where(_m.c.project == bindparam("of_project"), _m.c.name == bindparam("named"))
_ITS_ID = (
    _MODEL.with_only_columns(_m.c.id).where(_m.c.removed_ms.is_(None)).correlate().scalar_subquery()
)
_OF_MODEL = _selected().where(_v.c.model_id == _ITS_ID)
_NUMBERED = _OF_MODEL.where(_v.c.number == bindparam("numbered"))
_NEWEST_OF_SOME = _OF_MODEL.order_by(_v.c.number.desc()).limit(1)
_NEWEST_OF_CONTENT = _NEWEST_OF_SOME.where(schema.manifests.c.name == bindparam("of_content"))
_NEWEST_OF_STEP = _NEWEST_OF_SOME.where(_v.c.step == bindparam("of_step"))
# These two select one row before anything is joined. With IN, or ORDER BY over the join, SQLite may
# go through all versions of the model.
_NEWEST = _selected().where(
    _v.c.id
    == select(_other.c.id)
    .where(_other.c.model_id == _ITS_ID, _other.c.removed_ms.is_(None))
    .order_by(_other.c.number.desc())
    .limit(1)
    .scalar_subquery()
)
_ON_ALIAS = _selected().where(
    _v.c.id
    == select(_a.c.version_id)
    .where(_a.c.model_id == _ITS_ID, _a.c.alias == bindparam("on_alias"))
    .scalar_subquery()
)
_LEASED = _with_removed().where(
    _m.c.project == bindparam("of_project"),
    _m.c.name == bindparam("named"),
    _v.c.number == bindparam("numbered"),
    some(schema.read_leases.c.version_id == _v.c.id),
)
_BY_ROW = _selected().where(_v.c.id == bindparam("by_row"))


def find(tx: Connection, ref: Ref) -> Row[Any]:
    """The row of the version a ref means. Raises NoSuchThing."""
    values: dict[str, Any] = {"of_project": ref.model.project, "named": ref.model.name}
    match ref.selector:
        case None:
            wanted = _NEWEST
        case int(number):
            wanted, values["numbered"] = _NUMBERED, number
        case Digest(hex=digest):
            wanted, values["of_content"] = _NEWEST_OF_CONTENT, digest
        case Step(number=step):
            wanted, values["of_step"] = _NEWEST_OF_STEP, step
        case alias:
            wanted, values["on_alias"] = _ON_ALIAS, str(alias)
    row = tx.execute(wanted, values).one_or_none()
    if row is None:
        model_row(tx, ref.model)
        raise NoSuchThing(f"no version {ref}")
    return row


def resolve(tx: Connection, ref: Ref) -> Version:
    return _as_version(find(tx, ref))


def resolve_readable(tx: Connection, model: ModelName, number: int) -> Version:
    """A version whose content can be read: also a removed one, as long as a reader holds it.

    Such a one is for those who took a lease on it before. Raises NoSuchThing.
    """
    try:
        return resolve(tx, Ref(model, number))
    except NoSuchThing:
        values = {"of_project": model.project, "named": model.name, "numbered": number}
        row = tx.execute(_LEASED, values).one_or_none()
        if row is None:
            raise
        return _as_version(row)


def get(tx: Connection, version_row: int) -> Version:
    """A version by its row id, which the caller knows to be there."""
    return _as_version(tx.execute(_BY_ROW, {"by_row": version_row}).one())


def list_versions(
    tx: Connection, model: ModelName, *, before: int | None = None, limit: int = 1000
) -> list[Version]:
    """Versions of a model, the newest first; with `before`, those below that number."""
    wanted = _selected().where(_v.c.model_id == model_row(tx, model).id)
    if before is not None:
        # As a BigInteger, since it may be more than the column's type can hold.
        wanted = wanted.where(_v.c.number < literal(before, BigInteger))
    rows = tx.execute(wanted.order_by(_v.c.number.desc()).limit(limit))
    return [_as_version(row) for row in rows]


def _as_version(row: Row[Any]) -> Version:
    parent = f"{row.parent_project}/{row.parent_name}@v{row.parent_number}"
    return Version(
        model=f"{row.project}/{row.name}",
        number=row.number,
        digest=row.digest,
        created=moment(row.created_ms),
        author=row.author,
        message=row.message,
        parent=parent if row.parent_number is not None else None,
        step=row.step,
        metrics=row.metrics,
        tags=row.tags,
        metadata=tellable(row.metadata),
        structure=tellable(row.structure),
        aliases=tuple(sorted(row.aliases.split(","))) if row.aliases else (),
        files=row.files,
        tensors=row.tensors,
        logical_bytes=row.logical_bytes,
        replication=row.replication,
        policy=row.policy,
        last_used=moment(row.used_ms),
        damaged=row.manifest_state == FileState.DAMAGED or row.damaged_ms is not None,
    )


def annotate(
    tx: Connection, ref: Ref, who: str, changes: Mapping[str, Any], expect: str | None = None
) -> Version:
    """Change what may change of a version: message, metrics, tags, metadata.

    With `expect`, only if its `etag` is this one. Raises NoSuchThing, Changed, and BadSetting for
    values that a push would not accept either.
    """
    row = hold(tx, find(tx, ref), alone=True)
    if expect is not None and (now := get(tx, row.id)).etag != expect:
        raise Changed(f"{now.ref} was changed meanwhile: read it again")
    allowed = {"message", "metrics", "tags", "metadata"}
    if wrong := set(changes) - allowed:
        raise Conflict(f"{sorted(wrong)} of a version cannot change")
    if not changes:
        return get(tx, row.id)
    changes = checked_publication(changes).model_dump(include=set(changes))
    tx.execute(update(_v).where(_v.c.id == row.id).values(**changes))
    subject = f"{row.project}/{row.name}@v{row.number}"
    record_event(tx, who, "version.annotated", subject, dict(changes))
    version = get(tx, row.id)
    outbox.put_journal(tx, "annotated", subject, who, dict(changes))
    return version


def is_use_noted(tx: Connection, ref: Ref) -> bool:
    """Whether a version's use was noted so recently that it need not be noted again."""
    used_ms = find(tx, ref).used_ms
    return used_ms is not None and used_ms > clock(tx) - _USE_NOTED_MS


def mark_used(tx: Connection, ref: Ref) -> None:
    tx.execute(update(_v).where(_v.c.id == find(tx, ref).id).values(used_ms=now_ms()))


def hold(tx: Connection, row: Row[Any], *, alone: bool = False) -> Row[Any]:
    """Lock a version, so that it stays until the transaction ends; with `alone`, for this one only.

    Raises NoSuchThing if it was removed since it was found.
    """
    there = select(_v.c.id).where(_v.c.id == row.id, _v.c.removed_ms.is_(None))
    if tx.scalar(there.with_for_update(read=not alone)) is None:
        raise NoSuchThing(f"no version {row.project}/{row.name}@v{row.number}")
    return row


def why_protected(
    tx: Connection, row: Row[Any], projects: Sequence[str] | None = None
) -> str | None:
    """What keeps a version from being removed, or None. Names versions of these projects only."""
    a = schema.aliases
    held = tx.scalars(select(a.c.alias).where(a.c.version_id == row.id).order_by(a.c.alias)).all()
    if held:
        return f"alias {', '.join(held)} is on it: move or remove the alias first"
    child = tx.execute(
        _selected().where(_v.c.parent_id == row.id).order_by(_v.c.id).limit(1)
    ).first()
    if child is not None and projects is not None and child.project not in projects:
        return "a version in a project that you may not read names it as its parent"
    if child is not None:
        return f"{child.project}/{child.name}@v{child.number} names it as its parent"
    return None


def remove(
    tx: Connection,
    ref: Ref,
    who: str,
    reason: str = "",
    *,
    projects: Sequence[str] | None = None,
) -> Version:
    """Take a version out of sight. Its bytes go when gc finds that nobody needs them.

    `projects`: those whose versions an error may name. Raises NoSuchThing, Protected.
    """
    checked_reason(reason)
    row = hold(tx, find(tx, ref), alone=True)
    if why := why_protected(tx, row, projects):
        raise Protected(f"{ref.model}@v{row.number}: {why}")
    version = _as_version(row)
    tx.execute(update(_v).where(_v.c.id == row.id).values(removed_ms=now_ms()))
    record_event(tx, who, "version.removed", version.ref, {"reason": reason})
    outbox.put_journal(tx, "removed", version.ref, who, {"reason": reason})
    return version


def remove_model(tx: Connection, model: ModelName, who: str) -> None:
    """Remove a model that has no versions. Its numbers are not given out again.

    The history of its aliases stays, for a model of that name that is made later.
    Raises Protected while it has versions.
    """
    row = model_row(tx, model)
    tx.execute(select(_m.c.id).where(_m.c.id == row.id).with_for_update())
    there = select(_v.c.number).where(_v.c.model_id == row.id, _v.c.removed_ms.is_(None))
    if some := tx.scalars(there.order_by(_v.c.number.desc()).limit(10)).all():
        shown = ", ".join(f"v{number}" for number in some)
        raise Protected(f"{model} has versions ({shown}): remove them first")
    tx.execute(update(_m).where(_m.c.id == row.id).values(removed_ms=now_ms(), retention=None))
    record_event(tx, who, "model.removed", str(model))
    outbox.put_journal(tx, "model-removed", str(model), who, {})


def set_retention(tx: Connection, model: ModelName, retention: Retention | None, who: str) -> None:
    """Raises NoSuchThing, Refused."""
    row = model_row(tx, model)
    if retention is not None and retention.keep_every is not None and row.kind != "run":
        raise Refused(f"{model} is no run, so its versions have no steps: leave out keep_every")
    rules = None if retention is None else retention.model_dump(exclude_none=True)
    there = update(_m).where(_m.c.id == row.id, _m.c.removed_ms.is_(None))
    if not tx.execute(there.values(retention=rules)).rowcount:
        raise NoSuchThing(f"no model {model}: it was just removed")
    record_event(tx, who, "model.retention", str(model), rules)
    outbox.put_journal(tx, "retention", str(model), who, rules or {})


def stored_bytes_of_project(tx: Connection, project: str) -> int:
    """Encoded bytes of all blocks that versions of a project need, each counted once."""
    p, lb, vl = schema.placements, schema.list_blocks, schema.version_lists
    needed = (
        select(lb.c.block_id)
        .join(vl, vl.c.list_id == lb.c.list_id)
        .join(_v, _v.c.id == vl.c.version_id)
        .join(_m, _m.c.id == _v.c.model_id)
        .where(_m.c.project == project, _v.c.removed_ms.is_(None))
        .distinct()
    )
    shortest = (
        select(func.min(p.c.stored_bytes).label("stored_bytes"))
        .where(p.c.block_id.in_(needed))
        .group_by(p.c.block_id)
        .subquery()
    )
    return int(tx.scalar(select(func.coalesce(func.sum(shortest.c.stored_bytes), 0))) or 0)
