"""Runs: models whose versions are checkpoints, and who may commit the next one.

A run has a generation, which grows when a process takes the run over. Each commit looks at it,
under the lock that also gives out the version's number. So a process whose run was taken over while
it wrote, and which does not know that yet, publishes nothing.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, Select, select, update

from weightyard.errors import Conflict, NoSuchThing, RanksMissing, Refused, RunTakenOver
from weightyard.names import ModelName, UploadId
from weightyard.records import Publication, Run
from weightyard.registry import outbox, schema, uploads, versions
from weightyard.registry.rows import insert_missing, record_event

RUN = "run"
MODEL = "model"

_m, _ranks = schema.models, schema.upload_ranks


def get(tx: Connection, name: ModelName) -> Run:
    """Raises NoSuchThing."""
    model = versions.get_model(tx, name)
    if model.kind != RUN:
        raise NoSuchThing(f"no run {name}: it is a model")
    return Run.model_validate(model.model_dump())


def begin_generation(
    tx: Connection, name: ModelName, *, expect: int | None, key: str, who: str
) -> Run:
    """Raises as `weightyard.transfer.catalogue.Catalogue.begin_generation`."""
    # Locked before it is made anew: of two that would make a removed run again, the second waits
    # and finds it made.
    before = tx.execute(_row(name).with_for_update()).one_or_none()
    versions.ensure_model(tx, name, who, RUN)
    row = tx.execute(_row(name).with_for_update()).one()
    if row.kind != RUN:
        raise Conflict(f"{name} is a model, so no run can have its name: choose another")
    was_removed = before is not None and before.removed_ms is not None
    if row.generation_key == key and not was_removed:
        return get(tx, name)  # the answer was lost, not the work
    # As callers see it: a removed run begins at 0 again for them. The row's number never goes back.
    current = 0 if was_removed else row.generation
    if expect is not None and expect != current:
        raise RunTakenOver(str(name), expect, current)
    began = {"generation": row.generation + 1}
    taken = {**began, "generation_key": key, "removed_ms": None}
    tx.execute(update(_m).where(_m.c.id == row.id).values(taken))
    record_event(tx, who, "run.generation", str(name), began)
    outbox.put_journal(tx, "generation", str(name), who, began)
    return get(tx, name)


def lock_for_version(
    tx: Connection, name: ModelName, publication: Publication, who: str
) -> Row[Any]:
    """The row of the model that gets the version, locked: the lock decides races for its number.

    A new model is made here; a run was made by whoever took it over. Raises Conflict, RunTakenOver:
    a process whose run was taken over learns it here.
    """
    if publication.checkpoint is None:
        versions.ensure_model(tx, name, who, MODEL)
    row = tx.execute(_row(name).with_for_update()).one_or_none()
    _require_fits(name, row, publication)
    assert row is not None
    return row


def require_may_begin(tx: Connection, name: ModelName, publication: Publication) -> None:
    """Check the same before anything is written, without a lock. Raises Conflict, RunTakenOver."""
    _require_fits(name, tx.execute(_row(name)).one_or_none(), publication)


def _require_fits(name: ModelName, row: Row[Any] | None, publication: Publication) -> None:
    if row is None or row.removed_ms is not None:
        kind, generation = None, 0
    else:
        kind, generation = row.kind, row.generation
    checkpoint = publication.checkpoint
    if checkpoint is None:
        if kind == RUN:
            raise Conflict(f"{name} is a run and gets checkpoints only: push to another name")
    elif kind == MODEL:
        raise Conflict(f"{name} is a model and gets no checkpoints: choose another name")
    elif checkpoint.generation != generation:
        raise RunTakenOver(str(name), checkpoint.generation, generation)


def _row(name: ModelName) -> Select[Any]:
    return select(_m).where(_m.c.project == name.project, _m.c.name == name.name)


def finish_rank(tx: Connection, upload: UploadId, rank: int) -> None:
    """Raises as `weightyard.transfer.catalogue.Upload.finish_rank`."""
    opened = uploads.fence(tx, upload)
    checkpoint = opened.publication.checkpoint
    if checkpoint is None:
        raise Refused(f"upload {upload} writes no checkpoint: it has no ranks")
    if not 0 <= rank < checkpoint.ranks:
        raise Refused(f"upload {upload} has ranks 0 to {checkpoint.ranks - 1}, not {rank}")
    insert_missing(tx, _ranks, [{"upload_id": opened.row_id, "rank": rank}])


def require_ranks(tx: Connection, upload: UploadId, upload_row: int, ranks: int) -> None:
    """Require that all ranks of an upload have finished. Raises RanksMissing."""
    finished = set(tx.scalars(select(_ranks.c.rank).where(_ranks.c.upload_id == upload_row)))
    if missing := [rank for rank in range(ranks) if rank not in finished]:
        raise RanksMissing(upload.hex, missing, ranks)
