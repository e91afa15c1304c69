"""Models over REST: list, make, show, remove; retention and quotas."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from weightyard.names import ModelName
from weightyard.records import Model, Quota, Retention, Role
from weightyard.service.auth import Caller, GuardedRoute, needs
from weightyard.service.etags import IfNoneMatch, record_tag, tagged
from weightyard.service.openapi import CACHED
from weightyard.service.paging import After, Limit, Named, Project, page
from weightyard.service.problems import RESPONSES
from weightyard.service.state import Yard
from weightyard.wire import Limits, ModelMade, Page

router = APIRouter(route_class=GuardedRoute, tags=["models"], responses=RESPONSES)


@router.get("/models")
@needs(Role.READ)
async def list_models(
    yard: Yard,
    caller: Caller,
    limit: Limit = 100,
    after: After = None,
    kind: Annotated[Literal["model", "run", "all"], Query()] = "model",
) -> Page[Model]:
    """The models one may read, by name."""
    found = await yard.ask(
        yard.registry.models,
        projects=caller.projects,
        kind=None if kind == "all" else kind,
        after=ModelName.parse(after) if after is not None else None,
        limit=limit,
    )
    return page(found, limit, lambda model: model.name)


@router.post("/models", status_code=201)
@needs(Role.WRITE)
async def make_model(yard: Yard, caller: Caller, body: ModelMade) -> Model:
    """Make a model without versions, or find it. The first upload makes one as well."""
    name = ModelName.parse(body.name)
    caller.require_model(Role.WRITE, name)
    return await yard.ask(yard.registry.create_model, name, who=caller.who)


@router.get("/models/{project}/{name}", response_model=Model, responses=CACHED)
@needs(Role.READ)
async def show_model(
    yard: Yard, model: Named, response: Response, if_none_match: IfNoneMatch = None
) -> Model | Response:
    """A model: its newest version, its aliases, its retention."""
    found = await yard.ask(yard.registry.model, model)
    return tagged(response, record_tag(found), if_none_match) or found


@router.delete("/models/{project}/{name}", status_code=204)
@needs(Role.ADMIN)
async def remove_model(yard: Yard, caller: Caller, model: Named) -> None:
    """Remove a model that has no versions any more."""
    await yard.ask(yard.registry.remove_model, model, who=caller.who)


@router.put("/models/{project}/{name}/retention")
@needs(Role.ADMIN)
async def set_retention(yard: Yard, caller: Caller, model: Named, body: Retention) -> Model:
    """Say which versions gc may remove by itself."""
    await yard.ask(yard.registry.set_retention, model, body, who=caller.who)
    return await yard.ask(yard.registry.model, model)


@router.delete("/models/{project}/{name}/retention", status_code=204)
@needs(Role.ADMIN)
async def clear_retention(yard: Yard, caller: Caller, model: Named) -> None:
    """Have gc keep all versions of a model."""
    await yard.ask(yard.registry.set_retention, model, None, who=caller.who)


@router.get("/quotas/{project}")
@needs(Role.READ)
async def show_quota(yard: Yard, project: Project) -> Quota:
    """How much a project may store, and how much it does."""
    return await yard.ask(yard.registry.quota, ModelName(project, "any").project)


@router.put("/quotas/{project}")
@needs(Role.ADMIN, everywhere=True)
async def set_quota(yard: Yard, caller: Caller, project: Project, body: Limits) -> Quota:
    """Limit what a project may store; a limit that is left out is lifted."""
    return await yard.ask(
        yard.registry.set_quota,
        ModelName(project, "any").project,
        stored_bytes=body.stored_bytes,
        versions=body.versions,
        who=caller.who,
    )
