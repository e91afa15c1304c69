"""For operators and their programs: health, readiness, metrics, and what yard this is."""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from weightyard.errors import YardError
from weightyard.logs import Log
from weightyard.records import About, Role
from weightyard.registry import outbox
from weightyard.service import metrics
from weightyard.service.auth import GuardedRoute, needs
from weightyard.service.problems import RESPONSES
from weightyard.service.state import Service, Yard
from weightyard.storage import layout

_log = Log(__name__)

router = APIRouter(route_class=GuardedRoute, tags=["operate"], responses=RESPONSES)
open_router = APIRouter(tags=["operate"], responses=RESPONSES)
"""Answered without asking who calls."""

_READY_KEPT_S = 2.0
_LOOK_S = 3.0
"""How long database and store may take to answer: those who probe do not wait much longer."""


class Health(BaseModel):
    """A process that runs."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Whether a process can serve, and what it lacks."""

    status: Literal["ok", "unavailable"]
    database: bool
    store: bool


@open_router.get("/health")
async def health() -> Health:
    """The process runs. Says nothing of the database and the store, which it needs."""
    return Health()


@open_router.get(
    "/ready",
    response_model=Readiness,
    responses={
        503: {
            "model": Readiness,
            "description": "Not now",
            "content": {
                "application/json": {
                    "example": {"status": "unavailable", "database": False, "store": True}
                }
            },
        }
    },
)
async def ready(yard: Yard) -> Response:
    """The process can serve: its database and its store answer, within three seconds each."""
    async with yard.looking:  # one at a time: anybody may ask, which must not take all threads
        known = yard.readiness
        if known is None or time.monotonic() - known[0] > _READY_KEPT_S:
            found = await yard.ask(_look, yard)
            known = yard.readiness = (time.monotonic(), found)
    found = known[1]
    return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)


def _look(yard: Service) -> Readiness:
    database = store = True
    try:
        yard.watched_database.call("asking the database", _LOOK_S, yard.registry.newest_event)
    except YardError as why:
        _log.warning("service.database_unavailable", reason=why)
        database = False
    try:
        see = partial(yard.store.stat, layout.YARD)
        yard.watched_store.call("asking the store", _LOOK_S, see)
    except YardError as why:
        _log.warning("service.store_unavailable", reason=why)
        store = False
    return Readiness(
        status="ok" if database and store else "unavailable", database=database, store=store
    )


@router.get("/about")
@needs(Role.READ)
async def about(yard: Yard) -> About:
    """What a client must know to move bytes by itself."""
    return About(
        yard_id=yard.bound.yard_id,
        registry_id=yard.bound.registry_id,
        store=yard.store.url,
        block_bytes=yard.bound.block_bytes,
        weightyard=version("weightyard"),
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "For Prometheus", "content": {"text/plain": {}}}},
)
@needs(Role.READ)
async def show_metrics(yard: Yard) -> Response:
    """The numbers of this process."""
    yard.metrics.spool.set(yard.spool.used_bytes)
    yard.metrics.outbox.set(await yard.ask(outbox.waiting, yard.registry.database))
    return Response(yard.metrics.text(), media_type=metrics.MEDIA_TYPE)


@router.get("/openapi.json", include_in_schema=False)
@needs(Role.READ)
async def openapi(request: Request) -> JSONResponse:
    """All routes, with examples."""
    schema: dict[str, Any] = request.app.openapi()
    return JSONResponse(schema)
