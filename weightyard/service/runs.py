"""Runs over REST: taking one over, the ranks of a checkpoint, retention of checkpoints.

Whoever may write a run may set its retention; that of a model only admins may set.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Header, Path
from fastapi.openapi.models import Example

from weightyard.names import ModelName
from weightyard.records import MAX_RANKS, Model, Retention, Role, Run
from weightyard.registry.registry import LEASE_S
from weightyard.service.auth import Caller, GuardedRoute, Opened, Principal, needs
from weightyard.service.paging import Named
from weightyard.service.problems import RESPONSES
from weightyard.service.state import Service, Yard
from weightyard.wire import GenerationWanted, OpenedUpload, Page

router = APIRouter(route_class=GuardedRoute, tags=["runs"], responses=RESPONSES)

_RUN = "/runs/{project}/{name}"

_GENERATIONS: dict[str, Example] = {
    "whatever it is at": {"value": {}},
    "only if it is at generation 2": {"value": {"expect": 2}},
}
_RETENTIONS: dict[str, Example] = {
    "the newest three, every thousandth step, the two best": {
        "value": {
            "keep_last": 3,
            "keep_every": 1000,
            "keep_best": {"metric": "loss", "mode": "min", "count": 2},
        }
    }
}


@router.get(_RUN)
@needs(Role.READ)
async def show_run(yard: Yard, model: Named) -> Run:
    """A run: its generation, and its newest checkpoint."""
    return await yard.ask(yard.registry.run, model)


@router.post(_RUN + "/generations", status_code=201)
@needs(Role.WRITE)
async def begin_generation(
    yard: Yard,
    caller: Caller,
    model: Named,
    body: Annotated[GenerationWanted | None, Body(openapi_examples=_GENERATIONS)] = None,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=128,
            description="Repeating this with the same key takes the run over only once",
        ),
    ] = None,
) -> Run:
    """Take a run over, or begin a new one. Whoever had it before cannot commit any more."""
    expect = None if body is None else body.expect
    key = None if idempotency_key is None else caller.own_key(idempotency_key)
    return await yard.ask(
        yard.registry.begin_generation, model, expect=expect, key=key, who=caller.who
    )


@router.get("/uploads/{upload}")
@needs(Role.WRITE)
async def join_upload(yard: Yard, opened: Opened) -> OpenedUpload:
    """An upload that another process of the same writer opened. 410 if it has ended."""
    await yard.ask(yard.registry.join_upload, opened.upload)
    return OpenedUpload(
        id=opened.upload.hex,
        model=str(opened.model),
        lease_s=LEASE_S,
        block_bytes=yard.bound.block_bytes,
    )


@router.put("/uploads/{upload}/ranks/{rank}", status_code=204)
@needs(Role.WRITE)
async def finish_rank(
    yard: Yard,
    opened: Opened,
    rank: Annotated[int, Path(ge=0, lt=MAX_RANKS, examples=[0])],
) -> None:
    """Say that all packs of a checkpoint's rank are added. May be repeated."""
    upload = yard.registry.resume_upload(opened.upload, opened.publication)
    await yard.ask(upload.finish_rank, rank)


@router.put(_RUN + "/retention")
@needs(Role.WRITE)
async def set_retention(
    yard: Yard,
    caller: Caller,
    model: Named,
    body: Annotated[Retention, Body(openapi_examples=_RETENTIONS)],
) -> Model:
    """Say which checkpoints of a run may go."""
    await yard.ask(yard.registry.run, model)
    await yard.ask(yard.registry.set_retention, model, body, who=caller.who)
    return await yard.ask(yard.registry.model, model)


@router.delete(_RUN + "/retention", status_code=204)
@needs(Role.WRITE)
async def clear_retention(yard: Yard, caller: Caller, model: Named) -> None:
    """Keep all checkpoints of a run."""
    await yard.ask(yard.registry.run, model)
    await yard.ask(yard.registry.set_retention, model, None, who=caller.who)


@router.post(_RUN + "/retention/apply")
@needs(Role.WRITE)
async def apply_to_run(yard: Yard, caller: Caller, model: Named) -> Page[str]:
    """Remove now the checkpoints that the run's retention lets go; the answer has their refs."""
    await yard.ask(yard.registry.run, model)
    return await _apply(yard, caller, model)


@router.post("/models/{project}/{name}/retention/apply")
@needs(Role.ADMIN)
async def apply_to_model(yard: Yard, caller: Caller, model: Named) -> Page[str]:
    """Remove now the versions that the model's retention lets go; the answer has their refs."""
    return await _apply(yard, caller, model)


async def _apply(yard: Service, caller: Principal, model: ModelName) -> Page[str]:
    return Page(items=await yard.ask(yard.registry.apply_retention, model, who=caller.who))
