"""Versions over REST: list, resolve, show, annotate, keep, remove."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Path, Query, Response

from weightyard.errors import YardError
from weightyard.logs import Log
from weightyard.names import Ref
from weightyard.records import Cost, Role, Version
from weightyard.service.auth import Caller, GuardedRoute, needs
from weightyard.service.etags import IfMatch, IfNoneMatch, one_tag, tagged
from weightyard.service.openapi import CACHED, TAGGED
from weightyard.service.paging import After, Limit, Named, Number, Why, number_after, page
from weightyard.service.problems import RESPONSES
from weightyard.service.state import Service, Yard
from weightyard.storage import layout
from weightyard.wire import Annotation, Keeping, Page

_log = Log(__name__)

router = APIRouter(
    prefix="/models/{project}/{name}",
    route_class=GuardedRoute,
    tags=["versions"],
    responses=RESPONSES,
)


@router.get("/versions")
@needs(Role.READ)
async def list_versions(
    yard: Yard, caller: Caller, model: Named, limit: Limit = 100, after: After = None
) -> Page[Version]:
    """The versions of a model, the newest first."""
    found = await yard.ask(yard.registry.versions, model, before=number_after(after), limit=limit)
    return page(list(map(caller.shown, found)), limit, lambda version: version.number)


@router.get("/resolve/{selector}", response_model=Version, responses=CACHED)
@needs(Role.READ)
async def resolve(
    yard: Yard,
    caller: Caller,
    model: Named,
    selector: Annotated[str, Path(examples=["prod", "v3", "latest"])],
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> Version | Response:
    """The version a selector means now: an alias, `v3`, a digest, or `latest`."""
    version = await yard.ask(yard.registry.resolve, Ref.parse(f"{model}@{selector}"))
    return tagged(response, version.etag, if_none_match) or caller.shown(version)


@router.get("/versions/{number}", response_model=Version, responses=CACHED)
@needs(Role.READ)
async def show_version(
    yard: Yard,
    caller: Caller,
    model: Named,
    number: Number,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> Version | Response:
    """One version. Its ETag goes into the If-Match of a change."""
    version = await yard.ask(yard.registry.resolve, Ref(model, number))
    return tagged(response, version.etag, if_none_match) or caller.shown(version)


@router.patch("/versions/{number}", responses=TAGGED)
@needs(Role.WRITE)
async def annotate(
    yard: Yard,
    caller: Caller,
    model: Named,
    number: Number,
    body: Annotation,
    response: Response,
    if_match: IfMatch = None,
) -> Version:
    """Change a version's message, metrics, tags or metadata; its content never changes."""
    version = await yard.ask(
        yard.registry.annotate,
        Ref(model, number),
        body.changes(),
        who=caller.who,
        expect=one_tag(if_match),
    )
    tagged(response, version.etag)
    return caller.shown(version)


@router.delete("/versions/{number}")
@needs(Role.ADMIN)
async def remove(
    yard: Yard,
    caller: Caller,
    model: Named,
    number: Number,
    reason: Why = "",
) -> Version:
    """Take a version out of sight; its bytes go when gc finds that nobody needs them."""
    removed = await yard.ask(
        yard.registry.remove,
        Ref(model, number),
        who=caller.who,
        reason=reason,
        projects=caller.projects,
    )
    return caller.shown(removed)


@router.get("/versions/{number}/cost")
@needs(Role.READ)
async def cost(
    yard: Yard,
    caller: Caller,
    model: Named,
    number: Number,
    copies: Annotated[
        int | None,
        Query(ge=1, le=512, description="How often a pack is kept; left out: as the store does"),
    ] = None,
) -> Cost:
    """What a version costs, what removing it would give back, and what it shares with whom.

    If very many versions share its blocks, only some of them are looked at;
    `shared_with_is_complete` says whether all that one may read are there.
    """
    kept = copies or (await yard.ask_store(yard.store.stat, layout.YARD)).replication
    found = await yard.ask(yard.registry.cost, Ref(model, number), copies=kept)
    shared = {
        ref: shared_bytes
        for ref, shared_bytes in found.shared_with.items()
        if caller.may_read(Ref.parse(ref).model)
    }
    return found.model_copy(update={"shared_with": shared})


@router.put("/versions/{number}/replicas")
@needs(Role.WRITE)
async def keep(
    yard: Yard, caller: Caller, model: Named, number: Number, body: Keeping, after: BackgroundTasks
) -> Version:
    """Ask for copies or an HDFS storage policy. A pack is kept as the most demanding of the
    versions using it asks; the store is told after the answer."""
    kept = await yard.ask_store(
        yard.registry.keep_on,
        yard.store,
        Ref(model, number),
        copies=body.replication,
        policy=body.policy,
        who=caller.who,
    )
    after.add_task(_tell_store, yard)
    return caller.shown(kept)


async def _tell_store(yard: Service) -> None:
    """Done after the answer: thousands of packs take longer than a client waits. If it fails, gc
    does it again."""
    try:
        await yard.move(yard.registry.settle_replication, yard.store)
    except YardError as why:
        _log.warning("version.not_kept_yet", reason=why)


@router.post("/versions/{number}/used", status_code=204)
@needs(Role.READ)
async def mark_used(yard: Yard, model: Named, number: Number) -> None:
    """Note that a version is being loaded, for retention by last use."""
    await yard.ask(yard.registry.mark_used, Ref(model, number))
