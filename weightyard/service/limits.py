"""Limits: how long a request's line, headers and body may be, counted as bytes arrive."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightyard.errors import InvalidName, Refused, TooLarge
from weightyard.format.block import KIB, MIB
from weightyard.format.manifest import MAX_STORED_BYTES
from weightyard.format.pack import PACK_LIMIT_BYTES
from weightyard.service import problems

MAX_TARGET_BYTES = 8 * KIB
"""How long path and query may be, as sent."""

MAX_HEADERS_BYTES = 32 * KIB
MAX_HEADERS = 100

MAX_BODY_BYTES = MIB
"""How long the body of a request may be, unless its path is listed below."""

IDLE_S = 60.0
"""How long a body may pause."""

_LONGER_BODIES: tuple[tuple[re.Pattern[str], int | None], ...] = (
    (re.compile(r"/api/v1/uploads/[^/]+/claims"), 4 * MIB),
    (re.compile(r"/api/v1/placements"), 4 * MIB),
    (re.compile(r"/api/v1/uploads/[^/]+/packs"), 32 * MIB),
    (re.compile(r"/api/v1/uploads/[^/]+/packs/[^/]+"), PACK_LIMIT_BYTES),
    (re.compile(r"/api/v1/uploads/[^/]+/manifests/[^/]+"), MAX_STORED_BYTES),
    # The spool counts these: it knows how much room there is.
    (re.compile(r"/api/v1/uploads/[^/]+/files/.*", re.DOTALL), None),
)


class Limits:
    """Refuses what is too long before anything is made of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        target = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
        headers = scope["headers"]
        if target > MAX_TARGET_BYTES or any(
            (
                len(headers) > MAX_HEADERS,
                sum(len(k) + len(v) for k, v in headers) > MAX_HEADERS_BYTES,
            )
        ):
            why: Refused = TooLarge(
                f"a request has at most {MAX_TARGET_BYTES} bytes of path and query, {MAX_HEADERS} "
                f"headers and {MAX_HEADERS_BYTES} bytes of headers"
            )
            await problems.answer(Request(scope), why)(scope, receive, send)
            return
        if "\ufffd" in scope["path"]:  # the server puts this for bytes that are not UTF-8
            why = InvalidName("the path is not UTF-8")
            await problems.answer(Request(scope), why)(scope, receive, send)
            return
        await self._app(scope, _Body(receive, _limit_of(scope["path"])), send)


class _Body:
    """Receives a body and counts its bytes, whatever Content-Length said."""

    def __init__(self, receive: Receive, limit_bytes: int | None) -> None:
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._done = False

    async def __call__(self) -> Message:
        if self._done:
            return await self._receive()
        try:
            async with asyncio.timeout(IDLE_S):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive") from None
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._done = not message.get("more_body", False)
            if self._limit_bytes is not None and self._bytes > self._limit_bytes:
                # The framework turns this into an answer, wherever the body is being read.
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the body of this request has at most {self._limit_bytes} bytes",
                )
        return message


def _limit_of(path: str) -> int | None:
    for pattern, limit_bytes in _LONGER_BODIES:
        if pattern.fullmatch(path):
            return limit_bytes
    return MAX_BODY_BYTES
