"""The app: puts routes, limits and problems together, and does the work in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, APIRouter
from starlette.routing import BaseRoute

from weightyard.errors import Bug
from weightyard.logs import Log
from weightyard.service import (
    aliases,
    content,
    events,
    front,
    leases,
    models,
    openapi,
    operate,
    problems,
    runs,
    tokens,
    uploads,
    versions,
)
from weightyard.service.auth import GuardedRoute, need_of
from weightyard.service.limits import Limits
from weightyard.service.state import Service
from weightyard.service.tracing import Tracing

_log = Log(__name__)

PREFIX = "/api/v1"

ROUTERS: tuple[APIRouter, ...] = (
    models.router,
    versions.router,
    aliases.router,
    runs.router,
    content.router,
    leases.router,
    uploads.router,
    events.router,
    tokens.router,
    operate.router,
)

OPEN_ROUTERS: tuple[tuple[APIRouter, str], ...] = (
    (operate.open_router, PREFIX),
    (front.router, ""),
)
"""All that is answered without asking who calls, and below which prefix."""

_FLUSH_EVERY_S = 1.0
_LOOK_EVERY_S = 0.5
_LAST_WORK_S = 10.0

_ABOUT = """Versioned model weights on HDFS.

Every request shows a token: `Authorization: Bearer wy_…`. Errors are problems as RFC 9457 says,
with a stable `code`. Lists come in pages: `next` goes into `after`."""


def create_app(service: Service) -> FastAPI:
    """The REST interface of a yard."""
    app = FastAPI(
        title="weightyard",
        version=version("weightyard"),
        description=_ABOUT,
        # The framework's pages load scripts from elsewhere. The schema is a route with a rule.
        openapi_url=None,
        lifespan=_behind(service),
        redirect_slashes=False,
    )
    app.state.service = service
    app.router.routes.extend(_routes())
    problems.install(app)
    app.add_middleware(Limits)
    app.add_middleware(Tracing, metrics=service.metrics)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return app


@cache
def _routes() -> Sequence[BaseRoute]:
    """All routes. Made once for all apps, as the framework takes long to read their signatures."""
    together = APIRouter()
    for router in ROUTERS:
        _require_rules(router)
        together.include_router(router, prefix=PREFIX)
    for router, prefix in OPEN_ROUTERS:
        together.include_router(router, prefix=prefix)
    return together.routes


def _require_rules(router: APIRouter) -> None:
    """Raises Bug for a route without a rule: it would be closed, which should be noticed early."""
    for route in router.routes:
        if not isinstance(route, GuardedRoute) or need_of(route.endpoint) is None:
            raise Bug(f"route {getattr(route, 'path', route)} does not say who may call it")


def _schema(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schema["security"] = [{"token": []}]
        for route in operate.open_router.routes:
            assert isinstance(route, APIRoute)
            for operation in schema["paths"][PREFIX + route.path].values():
                operation["security"] = []
        openapi.complete(schema)
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema


def _behind(service: Service) -> Callable[[FastAPI], Any]:
    """The background work of a serving process: writes records out, and looks for new events."""

    async def flush() -> None:
        await service.ask_store(service.registry.flush_outbox, service.store)

    async def look() -> None:
        service.wake.tell(await service.ask(service.registry.newest_event))

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        over = asyncio.Event()
        tasks = [
            asyncio.create_task(_again_and_again(flush, _FLUSH_EVERY_S, over)),
            asyncio.create_task(_again_and_again(look, _LOOK_EVERY_S, over)),
        ]
        try:
            yield
        finally:
            # Tasks are cancelled only if they are late: their threads would go on, with a database
            # that is closed.
            over.set()
            _, late = await asyncio.wait(tasks, timeout=_LAST_WORK_S)
            for task in late:
                task.cancel()

    return running


async def _again_and_again(
    work: Callable[[], Awaitable[None]], every_s: float, over: asyncio.Event
) -> None:
    while not over.is_set():
        try:
            await work()
        except Exception as why:  # noqa: BLE001  otherwise this work would end for good
            _log.warning("service.behind", error=type(why).__name__, reason=why)
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await over.wait()
