"""Tracing: each request gets an id, a line in the log, and its place in the metrics."""

from __future__ import annotations

import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightyard.logs import Log
from weightyard.service.metrics import Metrics

_log = Log(__name__)

HEADER = "X-Request-ID"
_WELL_FORMED = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


class Tracing:
    """The outermost layer, so that nothing is answered without an id."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _WELL_FORMED.fullmatch(given) else secrets.token_hex(8)
        scope["weightyard.request_id"] = request_id
        status = 0
        began = time.perf_counter()

        async def traced(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                for name, value in _ALWAYS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        self._metrics.running.inc()
        try:
            await self._app(scope, receive, traced)
        finally:
            self._metrics.running.dec()
            took_s = time.perf_counter() - began
            # The route's template, never the path: names in labels would grow without bound.
            route = getattr(scope.get("route"), "path", "unknown")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.requests.labels(method, route, str(status)).inc()
            self._metrics.seconds.labels(method, route).observe(took_s)
            _log.info(
                "request.done",
                id=request_id,
                method=method,
                route=route,
                status=status,
                ms=round(took_s * 1000, 1),
            )


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
