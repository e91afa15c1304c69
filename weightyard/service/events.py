"""Events over REST: a stream that a client can resume where it broke off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from pydantic_core import PydanticSerializationError
from starlette.responses import StreamingResponse

from weightyard.errors import StoreUnavailable, YardError
from weightyard.logs import Log
from weightyard.records import Event, Role
from weightyard.service.auth import Caller, GuardedRoute, Principal, authenticate, needs
from weightyard.service.paging import number_after
from weightyard.service.problems import RESPONSES
from weightyard.service.state import Service, Yard

_log = Log(__name__)

router = APIRouter(route_class=GuardedRoute, tags=["events"], responses=RESPONSES)

_BATCH = 500
_SIGN_OF_LIFE_S = 15.0
_MAX_LISTENERS = 1000
_ASKED_AGAIN_S = 15.0
"""How often a listener is authenticated again: its token may have been revoked meanwhile."""
_LONGEST_S = 3600.0
"""When a stream ends. The client comes back with the id of the last event it saw."""


_SENT = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
    "required": ["id", "event", "data"],
}
"""The schema of each event in the stream: before version 3.2, OpenAPI has none for a stream."""


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events; `data` is an Event",
            "content": {
                "text/event-stream": {
                    "schema": _SENT,
                    "example": 'id: 7\nevent: alias.moved\ndata: {"id": 7, "kind": …}\n\n',
                }
            },
        }
    },
)
@needs(Role.READ)
async def listen(
    yard: Yard,
    caller: Caller,
    request: Request,
    last_event_id: Annotated[str | None, Header(max_length=30)] = None,
    after: Annotated[
        str | None, Query(max_length=30, description="As Last-Event-ID, where that is not sent")
    ] = None,
    for_s: Annotated[
        float, Query(ge=0, le=_LONGEST_S, description="End it after so many seconds")
    ] = _LONGEST_S,
) -> StreamingResponse:
    """What happens in the projects one may read, as it happens.

    With `Last-Event-ID` (or `after`) the stream begins after that event; without, it begins now.
    """
    last = number_after(last_event_id if last_event_id is not None else after)
    newest = await yard.ask(yard.registry.newest_event)
    if last is None:
        last = newest
    elif last > newest:  # the registry was rebuilt since: all its events are new to the client
        last = 0
    if yard.listeners >= _MAX_LISTENERS:
        raise StoreUnavailable(f"{_MAX_LISTENERS} listen already: try another service")
    stream = _stream(yard, caller, request, last, for_s)
    return StreamingResponse(stream, media_type="text/event-stream")


async def _stream(
    yard: Service, caller: Principal, request: Request, last: int, for_s: float
) -> AsyncIterator[str]:
    clock = asyncio.get_running_loop().time
    known_at = clock()
    end = known_at + for_s
    yard.listeners += 1
    yard.metrics.listeners.set(yard.listeners)
    try:
        yield f"retry: 2000\n: weightyard, from {last}\n\n"
        while True:
            if clock() - known_at >= _ASKED_AGAIN_S:
                known_at = clock()
                caller = await authenticate(yard, request)
            # Advanced past events this caller may not see, too, so that the next query is short.
            newest = yard.wake.newest
            found = await yard.ask(
                yard.registry.events, last, projects=caller.projects, limit=_BATCH
            )
            for event in found:
                last = event.id
                if (text := _as_text(event)) is not None:
                    yield text
            if len(found) == _BATCH:
                continue
            last = max(last, newest)
            if (left := end - clock()) <= 0 or yard.wake.is_over:
                return
            if not await yard.wake.later_than(last, min(left, _SIGN_OF_LIFE_S)):
                yield ": still here\n\n"
    except YardError:
        return  # too late for a problem: the stream ends, and the client asks again
    finally:
        yard.listeners -= 1
        yard.metrics.listeners.set(yard.listeners)


def _as_text(event: Event) -> str | None:
    """The event as it is sent; None if it cannot be: it must not keep back those after it."""
    try:
        data = event.model_dump_json()
    except PydanticSerializationError as why:
        _log.warning("event.left_out", id=event.id, reason=why)
        return None
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n"
