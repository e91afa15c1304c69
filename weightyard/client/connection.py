"""Connection: requests to a service, tried again where that is safe, within a deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from weightyard.client.problems import error_of
from weightyard.client.sending import Sending
from weightyard.errors import (
    BadSetting,
    DeadlineExceeded,
    RegistryUnavailable,
    Retryable,
    Unauthenticated,
)
from weightyard.logs import Log

_log = Log(__name__)

_T = TypeVar("_T")

PREFIX = "/api/v1"

_TIMEOUT = httpx.Timeout(30.0, connect=5.0, pool=30.0)
_LONG_TIMEOUT = httpx.Timeout(60.0, connect=5.0, pool=30.0, read=3600.0)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_TRY_AGAIN = frozenset((429, 502, 503, 504))


class Connection:
    """One service, one token. Thread-safe; connections are pooled and kept."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        deadline_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadSetting(f"service URL {url[:200]!a}: http(s)://HOST[:PORT]")
        if parts.username is not None or parts.password is not None or parts.query:
            raise BadSetting("a token goes into WEIGHTYARD_TOKEN, not into the URL")
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise Unauthenticated("the token is not one: it has spaces or odd characters")
        self.host = parts.hostname
        self._deadline_s = deadline_s
        headers = {"User-Agent": f"weightyard/{version('weightyard')}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.Client(
            base_url=url.rstrip("/") + PREFIX,
            headers=headers,
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=32, max_keepalive_connections=8),
            # Followed for reading only; the token stays behind when the host changes.
            follow_redirects=False,
            transport=transport,
        )

    def close(self) -> None:
        self._http.close()

    def get(
        self,
        path: str,
        kind: type[_T],
        params: Mapping[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> _T:
        """Read something."""
        return self._parsed(
            self.ask("GET", path, params=params, again=True, deadline_s=deadline_s), kind
        )

    def send(
        self,
        method: str,
        path: str,
        kind: type[_T],
        *,
        body: BaseModel | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool = False,
    ) -> _T:
        """Change something; `again`: doing it twice is as good as once."""
        content = None
        headers = dict(headers or {})
        if body is not None:
            content = body.model_dump_json(exclude_unset=True).encode()
            headers["Content-Type"] = "application/json"
        response = self.ask(
            method, path, params=params, headers=headers, content=content, again=again
        )
        return self._parsed(response, kind)

    def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | Sending | None = None,
        timeout: httpx.Timeout = _TIMEOUT,
        again: bool,
        deadline_s: float | None = None,
    ) -> httpx.Response:
        """One request. Raises what the service raised, and RegistryUnavailable.

        Where it may be repeated it is, with jitter, until the deadline, which for a body that is
        being sent counts from its last progress. Where not, an answer that was lost is an error:
        whether it happened is unknown, read back. `deadline_s` 0: one try, for who comes again.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        began = time.monotonic()
        attempt = 0
        given = {name: value for name, value in (params or {}).items() if value is not None}
        while True:
            attempt += 1
            pause_s: float | None = None
            try:
                response = self._http.request(
                    method,
                    path,
                    params=given,
                    headers={**_length(content), **(headers or {})},
                    content=content.pieces() if isinstance(content, Sending) else content,
                    follow_redirects=method == "GET",
                    timeout=timeout,
                )
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as why:
                error: Retryable = RegistryUnavailable(f"service {self.host}: {_said(why)}")
                may_repeat = True  # it was never sent
            except httpx.TransportError as why:
                error = RegistryUnavailable(f"service {self.host}: {_said(why)}")
                may_repeat = again
            except (httpx.TooManyRedirects, httpx.DecodingError, httpx.InvalidURL) as why:
                raise RegistryUnavailable(f"service {self.host}: {_said(why)}") from why
            else:
                if response.is_success:
                    return response
                if response.status_code not in _TRY_AGAIN:
                    raise error_of(response)
                found = error_of(response)
                if not isinstance(found, Retryable):
                    raise found
                error, pause_s = found, _asked_pause(response)
                may_repeat = again or response.status_code == 429
            if not may_repeat:
                raise error
            pause_s = max(pause_s or 0.0, _pause(attempt))
            moved_at = content.moved_at if isinstance(content, Sending) else began
            if time.monotonic() + pause_s > moved_at + deadline_s:
                if attempt == 1:
                    raise error
                raise DeadlineExceeded(f"{error}; tried {attempt} times") from error
            _log.info("service.tried_again", host=self.host, attempt=attempt, reason=error)
            time.sleep(pause_s)

    def put_file(self, path: str, file: Sending, kind: type[_T]) -> _T:
        """Send a file; how long the service takes to store it depends on its size."""
        headers = {"Content-Type": "application/octet-stream"}
        response = self.ask(
            "PUT", path, headers=headers, content=file, timeout=_LONG_TIMEOUT, again=True
        )
        return self._parsed(response, kind)

    @contextmanager
    def stream(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """An answer that is read while it comes. Raises as `ask`; not tried again."""
        try:
            with self._http.stream(
                "GET", path, headers=dict(headers), follow_redirects=True
            ) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                yield response
        except httpx.TransportError as why:
            raise RegistryUnavailable(f"service {self.host}: {_said(why)}") from why

    def _parsed(self, response: httpx.Response, kind: type[_T]) -> _T:
        if kind is type(None):
            return None
        try:
            return TypeAdapter(kind).validate_json(response.content)
        except ValidationError as why:
            what = why.errors()[0]["msg"]
            raise RegistryUnavailable(
                f"service {self.host}: its answer is not weightyard's ({what}): is the URL right?"
            ) from None


def _length(content: bytes | Sending | None) -> dict[str, str]:
    return {"Content-Length": str(content.length)} if isinstance(content, Sending) else {}


def _pause(attempt: int) -> float:
    longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
    return random.uniform(0, longest)


def _asked_pause(response: httpx.Response) -> float | None:
    """What Retry-After asks for, in seconds; dates are not waited for."""
    value = response.headers.get("retry-after", "")
    return min(float(value), 60.0) if value.isdecimal() and len(value) < 6 else None


def _said(why: Exception) -> str:
    return f"{type(why).__name__}: {why}" if str(why) else type(why).__name__
