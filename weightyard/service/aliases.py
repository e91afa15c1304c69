"""Aliases over REST: show, move, remove, their log, and rollback."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import AwareDatetime

from weightyard.errors import NoSuchThing
from weightyard.names import AliasName
from weightyard.records import Alias, AliasMove, Role
from weightyard.service.auth import Caller, GuardedRoute, needs
from weightyard.service.etags import (
    IfMatch,
    IfNoneMatch,
    alias_tag,
    expected_number,
    tagged,
)
from weightyard.service.openapi import CACHED, TAGGED
from weightyard.service.paging import After, Limit, Named, Why, number_after, page
from weightyard.service.problems import RESPONSES
from weightyard.service.state import Yard
from weightyard.wire import AliasTarget, Page, Reason

router = APIRouter(
    prefix="/models/{project}/{name}/aliases/{alias}",
    route_class=GuardedRoute,
    tags=["aliases"],
    responses=RESPONSES,
)


async def _alias_name(alias: Annotated[str, Path(examples=["prod"])]) -> AliasName:
    return AliasName(alias)


Aliased = Annotated[AliasName, Depends(_alias_name)]


@router.get("", response_model=Alias, responses=CACHED)
@needs(Role.READ)
async def show_alias(
    yard: Yard, model: Named, alias: Aliased, response: Response, if_none_match: IfNoneMatch = None
) -> Alias | Response:
    """Where an alias is. Its ETag goes into the If-Match of a move."""
    number = await yard.ask(yard.registry.alias, model, alias)
    if number is None:
        raise NoSuchThing(f"{model} has no alias {alias}")
    found = Alias(model=str(model), alias=alias.text, version=number)
    return tagged(response, alias_tag(number), if_none_match) or found


@router.put("", responses=TAGGED)
@needs(Role.WRITE)
async def move_alias(
    yard: Yard,
    caller: Caller,
    model: Named,
    alias: Aliased,
    body: AliasTarget,
    response: Response,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> AliasMove:
    """Put an alias on a version. `If-None-Match: *`: only if there is no such alias yet."""
    moved = await yard.ask(
        yard.registry.move_alias,
        model,
        alias,
        body.version,
        who=caller.who,
        reason=body.reason,
        expect=expected_number(if_match, if_none_match),
    )
    tagged(response, alias_tag(body.version))
    return moved


@router.delete("")
@needs(Role.WRITE)
async def remove_alias(
    yard: Yard,
    caller: Caller,
    model: Named,
    alias: Aliased,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
    reason: Why = "",
) -> AliasMove:
    """Remove an alias; its history stays."""
    return await yard.ask(
        yard.registry.move_alias,
        model,
        alias,
        None,
        who=caller.who,
        reason=reason,
        expect=expected_number(if_match, if_none_match),
    )


@router.get("/log")
@needs(Role.READ)
async def alias_log(
    yard: Yard,
    model: Named,
    alias: Aliased,
    limit: Limit = 100,
    after: After = None,
    as_of: Annotated[AwareDatetime | None, Query(description="Moves up to this time")] = None,
) -> Page[AliasMove]:
    """The moves of an alias, the newest first."""
    before = number_after(after)
    moves = await yard.ask(
        yard.registry.alias_log, model, alias, as_of=as_of, before=before, limit=limit
    )
    return page(moves, limit, lambda move: move.number)


@router.post("/rollback")
@needs(Role.WRITE)
async def roll_back(
    yard: Yard, caller: Caller, model: Named, alias: Aliased, body: Reason | None = None
) -> AliasMove:
    """Put an alias back on the version it was on before. Repeated, it goes one further back."""
    reason = body.reason if body is not None else ""
    return await yard.ask(yard.registry.rollback_alias, model, alias, who=caller.who, reason=reason)
