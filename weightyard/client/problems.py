"""From a service's problems back to the errors they were."""

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
    """The error an answer tells of, of the class it had in the service."""
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
    # Not by its constructor: each error words its message from its own values, and this one
    # was worded by the service.
    error = kind.__new__(kind, message)
    error.args = (message,)
    known = {"type", "title", "status", "detail", "code", "request_id", "errors"}
    for name, value in problem.items():
        if name in known or not name.isidentifier() or hasattr(Exception, name):
            continue  # what every exception has is Python's, whatever a service says
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
    """For what is not a problem of this service: a proxy's answer, or a newer service's."""
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
            return BadSetting  # the service is elsewhere: its URL has to be set to that
        case _ if status < 500:
            return Refused
        case _:
            return Bug
