"""Problems: turns a service's problems back into the errors that it raised."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus

import httpx

from weightyard.errors import (
    BadSetting,
    Bug,
    Conflict,
    NoSuchThing,
    NotAllowed,
    Refused,
    RegistryUnavailable,
    Retryable,
    Unauthenticated,
    YardError,
)

_MAX_PROBLEM_BYTES = 1 << 20


def error_of(response: httpx.Response) -> YardError:
    """The error that an answer tells of, in the class it had in the service."""
    try:
        problem = response.json() if len(response.content) <= _MAX_PROBLEM_BYTES else {}
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    code, detail = problem.get("code"), problem.get("detail")
    kind = _BY_CODE.get(code) if isinstance(code, str) else None
    kind = kind or _by_status(response.status_code)
    said = detail if isinstance(detail, str) else f"{response.status_code} {response.reason_phrase}"
    message = f"{response.url.host}: {said}"
    if request_id := response.headers.get("x-request-id"):
        message += f" (request {request_id})" if issubclass(kind, Bug) else ""
    # Not made by its constructor, which words a message from values: the service has done that.
    error = kind.__new__(kind, message)
    error.args = (message,)
    known = {"type", "title", "status", "detail", "code", "request_id", "errors"}
    for name, value in problem.items():
        if name in known or not name.isidentifier() or hasattr(Exception, name):
            continue  # attributes that every exception has are not for a service to set
        if value is None or isinstance(value, int | str):
            setattr(error, name, value)
        elif isinstance(value, list) and all(isinstance(one, int) for one in value):
            setattr(error, name, tuple(value))
    return error


def _all(kind: type[YardError]) -> Iterator[type[YardError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all(child)


_BY_CODE = {kind.code: kind for kind in _all(YardError)}


def _by_status(status: int) -> type[YardError]:
    """For answers with no known problem: a proxy's, or one of a newer service."""
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return Unauthenticated
        case HTTPStatus.FORBIDDEN:
            return NotAllowed
        case HTTPStatus.NOT_FOUND:
            return NoSuchThing
        case HTTPStatus.CONFLICT | HTTPStatus.PRECONDITION_FAILED | HTTPStatus.GONE:
            return Conflict
        case HTTPStatus.BAD_GATEWAY | HTTPStatus.SERVICE_UNAVAILABLE | HTTPStatus.GATEWAY_TIMEOUT:
            return RegistryUnavailable
        case HTTPStatus.TOO_MANY_REQUESTS:
            return Retryable
        case _ if status < 400:
            return BadSetting  # a redirect: the service's URL is to be set to where that points
        case _ if status < 500:
            return Refused
        case _:
            return Bug
