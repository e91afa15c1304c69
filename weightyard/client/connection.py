"""Connection: requests to a service, repeated where that is safe, until a deadline."""

from __future__ import annotations

import math
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from weightyard import jitter
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


ANSWER_S = 30.0
"""How long the service may be silent."""

LONG_ANSWER_S = 300.0
"""The same where the service has much to do first: check a pack, one of many perhaps, and see that
its DataNodes have it; or publish a version of many blocks."""

_CONNECT_S = 5.0
_TIMEOUT = httpx.Timeout(ANSWER_S, connect=_CONNECT_S)
_LONG_TIMEOUT = httpx.Timeout(60.0, connect=_CONNECT_S, pool=ANSWER_S, read=LONG_ANSWER_S)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_TRY_AGAIN = frozenset((429, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class _NotNow:
    """A request that failed, but may succeed another time."""

    error: Retryable
    may_repeat: bool
    """Whether doing it once more does no harm."""
    asked_pause_s: float = 0.0
    """How long the service asked to wait before the next try."""


@cache
def _trusted() -> ssl.SSLContext:
    """Whom HTTPS trusts. Read once for all connections: that takes longer than a request."""
    return httpx.create_ssl_context()


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
        parts = _split(url)
        if parts.username is not None or parts.password is not None or parts.query:
            raise BadSetting("a token goes into WEIGHTYARD_TOKEN, not into the URL")
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise Unauthenticated("this is no token: it has spaces or odd characters in it")
        self.host = str(parts.hostname)
        self._deadline_s = deadline_s
        headers = {"User-Agent": f"weightyard/{version('weightyard')}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            self._http = httpx.Client(
                base_url=url.rstrip("/") + PREFIX,
                headers=headers,
                timeout=_TIMEOUT,
                limits=httpx.Limits(max_connections=32, max_keepalive_connections=8),
                # `_try` follows them for GET only. httpx sends no token to another host.
                follow_redirects=False,
                verify=_trusted(),
                transport=transport,
            )
        except (ValueError, ImportError, httpx.InvalidURL) as why:
            raise BadSetting(
                f"the environment's proxy (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY) cannot be used: "
                f"{why}; name an http:// one, or unset the variable"
            ) from why

    def close(self) -> None:
        self._http.close()

    def get(
        self,
        path: str,
        kind: type[_T],
        params: Mapping[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
        within_s: float = math.inf,
    ) -> _T:
        """Read something."""
        response = self.ask(
            "GET", path, params=params, again=True, deadline_s=deadline_s, within_s=within_s
        )
        return self._parsed(response, kind)

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
        is_long: bool = False,
        deadline_s: float | None = None,
        within_s: float = math.inf,
    ) -> _T:
        """Change something; `again`: it may be done twice without harm.

        `is_long`: the service may take long, and the answer matters: if the deadline went by in
        waiting for it, one more try is made.
        """
        content = None
        headers = dict(headers or {})
        if body is not None:
            content = body.model_dump_json(exclude_unset=True).encode()
            headers["Content-Type"] = "application/json"
        response = self.ask(
            method,
            path,
            params=params,
            headers=headers,
            content=content,
            timeout=_LONG_TIMEOUT if is_long else _TIMEOUT,
            again=again,
            once_more=is_long,
            deadline_s=deadline_s,
            within_s=within_s,
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
        once_more: bool = False,
        deadline_s: float | None = None,
        within_s: float = math.inf,
    ) -> httpx.Response:
        """One request. Raises what the service raised, and RegistryUnavailable.

        With `again` it is repeated, with jitter, until the deadline, which for a body that is being
        sent counts from its last progress. Without, a lost answer is an error: whether it happened
        is unknown, so read back. `deadline_s` 0: one try, for callers that come again anyway.
        `once_more`: one try is made even when the deadline is over.
        `within_s` limits all of it, with the waiting for answers: after it, DeadlineExceeded.
        """
        deadline_s = min(self._deadline_s if deadline_s is None else deadline_s, within_s)
        began = time.monotonic()
        attempt = 0
        given = {name: value for name, value in (params or {}).items() if value is not None}
        while True:
            attempt += 1
            answer = self._try(
                method,
                path,
                again=again,
                params=given,
                headers={**_length(content), **(headers or {})},
                content=content.pieces() if isinstance(content, Sending) else content,
                timeout=_at_most(began + within_s - time.monotonic(), timeout),
            )
            if isinstance(answer, httpx.Response):
                return answer
            if not answer.may_repeat:
                raise answer.error
            pause_s = max(answer.asked_pause_s, _pause(attempt))
            moved_at = content.moved_at if isinstance(content, Sending) else began
            is_over = time.monotonic() + pause_s > moved_at + deadline_s
            if is_over and not once_more:
                if attempt == 1 and math.isinf(within_s):
                    raise answer.error
                tried = "once" if attempt == 1 else f"{attempt} times"
                raise DeadlineExceeded(f"{answer.error}; tried {tried}") from answer.error
            once_more = once_more and not is_over
            reason = answer.error
            _log.warning("service.tried_again", host=self.host, attempt=attempt, reason=reason)
            time.sleep(pause_s)

    def _try(
        self, method: str, path: str, *, again: bool, **request: Any
    ) -> httpx.Response | _NotNow:
        """One try: its answer, or why it failed. Raises what another try would not change."""
        try:
            response = self._http.request(method, path, follow_redirects=method == "GET", **request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as why:
            return _NotNow(self._unavailable(why), may_repeat=True)  # the request was never sent
        except httpx.TransportError as why:
            return _NotNow(self._unavailable(why), may_repeat=again)
        except (httpx.TooManyRedirects, httpx.DecodingError, httpx.InvalidURL) as why:
            raise self._unavailable(why) from why
        if response.is_success:
            return response
        error = error_of(response)
        if response.status_code not in _TRY_AGAIN or not isinstance(error, Retryable):
            raise error
        may_repeat = again or response.status_code == 429
        return _NotNow(error, may_repeat, _asked_pause(response))

    def put(self, path: str, file: Sending) -> None:
        """Have the service store a file."""
        headers = {"Content-Type": "application/octet-stream"}
        self.ask("PUT", path, headers=headers, content=file, timeout=_LONG_TIMEOUT, again=True)

    @contextmanager
    def stream(
        self, path: str, headers: Mapping[str, str], *, answer_s: float = ANSWER_S
    ) -> Iterator[httpx.Response]:
        """An answer that is read as it arrives. Raises as `ask`; is not repeated."""
        timeout = httpx.Timeout(answer_s, connect=min(_CONNECT_S, answer_s))
        try:
            with self._http.stream(
                "GET", path, headers=dict(headers), follow_redirects=True, timeout=timeout
            ) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                yield response
        except httpx.TransportError as why:
            raise self._unavailable(why) from why

    def _unavailable(self, why: Exception) -> RegistryUnavailable:
        said = f"{type(why).__name__}: {why}" if str(why) else type(why).__name__
        return RegistryUnavailable(f"service {self.host}: {said}")

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


def _split(url: str) -> SplitResult:
    """The parts of a service's URL. Raises BadSetting for one that cannot be used."""
    try:
        parts = urlsplit(url)
        # Otherwise these fail only on connecting, with errors of many kinds.
        _ = parts.port, httpx.URL(url).host, (parts.hostname or "").encode("idna")
    except (ValueError, httpx.InvalidURL) as why:
        raise BadSetting(f"service URL {url[:200]!a}: {why}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadSetting(f"service URL {url[:200]!a}: http(s)://HOST[:PORT]")
    return parts


def hang_up(response: httpx.Response) -> None:
    """Make the thread that waits for more of an answer fail at once. From any thread.

    The socket is shut down, which wakes a thread that waits for bytes; closing it would not.
    """
    found = response.extensions["network_stream"].get_extra_info("socket")
    if isinstance(found, socket.socket):
        with suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)


def _length(content: bytes | Sending | None) -> dict[str, str]:
    return {"Content-Length": str(content.length)} if isinstance(content, Sending) else {}


def _at_most(left_s: float, timeout: httpx.Timeout) -> httpx.Timeout:
    """A time-out no longer than what is left."""
    if math.isinf(left_s):
        return timeout
    left_s = max(left_s, 0.0)
    named = timeout.as_dict().items()
    return httpx.Timeout(
        **{name: left_s if most_s is None else min(most_s, left_s) for name, most_s in named}
    )


def _pause(attempt: int) -> float:
    return jitter.up_to(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt))


def _asked_pause(response: httpx.Response) -> float:
    """What Retry-After asks for, in seconds; 0 if it is a date."""
    value = response.headers.get("retry-after", "")
    return min(float(value), 60.0) if value.isdecimal() and len(value) < 6 else 0.0
