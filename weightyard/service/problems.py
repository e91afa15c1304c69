"""Problems: answers every error as RFC 9457 says. The one place that maps errors to statuses."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weightyard.errors import (
    AliasMoved,
    BadSetting,
    Bug,
    Changed,
    Conflict,
    Damaged,
    ForeignStore,
    NoSuchThing,
    NotAllowed,
    Protected,
    QuotaExceeded,
    Refused,
    RegistryUnavailable,
    Retryable,
    SchemaUnknown,
    StoreFull,
    TooLarge,
    Unauthenticated,
    UnknownFormat,
    Unsupported,
    UploadExpired,
    YardError,
)
from weightyard.logs import Log

_log = Log(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
MAX_TOLD = 1000

_STATUSES: Mapping[type[YardError], HTTPStatus] = {
    Retryable: HTTPStatus.SERVICE_UNAVAILABLE,
    Conflict: HTTPStatus.CONFLICT,
    AliasMoved: HTTPStatus.PRECONDITION_FAILED,
    Changed: HTTPStatus.PRECONDITION_FAILED,
    UploadExpired: HTTPStatus.GONE,
    Damaged: HTTPStatus.INTERNAL_SERVER_ERROR,
    Refused: HTTPStatus.BAD_REQUEST,
    Unauthenticated: HTTPStatus.UNAUTHORIZED,
    NotAllowed: HTTPStatus.FORBIDDEN,
    QuotaExceeded: HTTPStatus.FORBIDDEN,
    NoSuchThing: HTTPStatus.NOT_FOUND,
    Protected: HTTPStatus.CONFLICT,
    TooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    StoreFull: HTTPStatus.INSUFFICIENT_STORAGE,
    UnknownFormat: HTTPStatus.UNPROCESSABLE_ENTITY,
    Unsupported: HTTPStatus.UNPROCESSABLE_ENTITY,
    BadSetting: HTTPStatus.INTERNAL_SERVER_ERROR,
    ForeignStore: HTTPStatus.INTERNAL_SERVER_ERROR,
    SchemaUnknown: HTTPStatus.INTERNAL_SERVER_ERROR,
    YardError: HTTPStatus.INTERNAL_SERVER_ERROR,
}

_CODES = {
    HTTPStatus.UNAUTHORIZED: Unauthenticated.code,
    HTTPStatus.FORBIDDEN: NotAllowed.code,
    HTTPStatus.NOT_FOUND: NoSuchThing.code,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: TooLarge.code,
    HTTPStatus.REQUEST_URI_TOO_LONG: TooLarge.code,
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: TooLarge.code,
    HTTPStatus.SERVICE_UNAVAILABLE: Retryable.code,
}
"""For what the framework refuses by itself."""


class Problem(BaseModel):
    """What went wrong, for programs (`code`) and for people (`detail`)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:weightyard:problem:alias-moved"])
    title: str
    status: int
    detail: str
    code: str = Field(description="Stable; never reused", examples=["alias-moved"])
    request_id: str


RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem, as RFC 9457 says",
        "content": {
            MEDIA_TYPE: {
                "schema": {"$ref": "#/components/schemas/Problem"},
                "example": {
                    "type": "urn:weightyard:problem:no-such-thing",
                    "title": "No model, version, alias or token of that name.",
                    "status": 404,
                    "detail": "no model team/bert",
                    "code": "no-such-thing",
                    "request_id": "5f0c6a1d2b3e4f50",
                },
            }
        },
    }
}


def status_of(error: YardError, method: str) -> HTTPStatus:
    """The status an error is answered with.

    For damaged bytes, a request that reads is not to blame, but one that sent or named them is.
    """
    if isinstance(error, Damaged) and method not in ("GET", "HEAD"):
        return HTTPStatus.UNPROCESSABLE_ENTITY
    return next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)


def answer(request: Request, error: YardError) -> Response:
    """The answer to an error, with as much of it as callers may know."""
    status = status_of(error, request.method)
    detail = str(error)
    if isinstance(error, RegistryUnavailable | Bug) or type(error) is YardError:
        _log.warning("request.failed", id=_request_id(request), code=error.code, reason=detail)
        detail = "the database did not answer" if isinstance(error, Retryable) else _IN_THE_LOG
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.warning("request.failed", id=_request_id(request), code=error.code, reason=detail)
    headers = {}
    if isinstance(error, Retryable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    more = {name: value for name, value in vars(error).items() if is_told(value)}
    return _problem(request, status, error.code, title_of(type(error)), detail, headers, more)


def is_told(value: object) -> bool:
    """Whether a problem carries this value of its error: a number, a text, or a few numbers."""
    if isinstance(value, tuple):
        return len(value) <= MAX_TOLD and all(isinstance(one, int) for one in value)
    return value is None or isinstance(value, int | str)


_NO_PATH = "no such path: REST is under /api/v1, and /api/v1/openapi.json lists all of it"
_IN_THE_LOG = "the service has a bug: its log tells more under this request id"


def install(app: FastAPI) -> None:
    """Make every error of an app a problem."""

    async def on_yard_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, YardError)
        return answer(request, error)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [_said(request, one) for one in error.errors()[:20]]
        detail = "; ".join(f"{one['where']}: {one['what']}" for one in found[:3])
        status, title = HTTPStatus.UNPROCESSABLE_ENTITY, title_of(Refused)
        return _problem(request, status, Refused.code, title, detail, {}, {"errors": found})

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        code = _CODES.get(status, Refused.code)
        headers = error.headers or {}
        # What is not there is a NoSuchThing; by itself the framework refuses paths only.
        detail = _NO_PATH if status is HTTPStatus.NOT_FOUND else str(error.detail)
        return _problem(request, status, code, status.phrase, detail, headers, {})

    async def on_anything(request: Request, error: Exception) -> Response:
        _log.warning("request.broke", id=_request_id(request), error=type(error).__name__)
        return answer(request, Bug(_IN_THE_LOG))

    app.add_exception_handler(YardError, on_yard_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_anything)


def _said(request: Request, error: Mapping[str, Any]) -> dict[str, str]:
    """Where a request is wrong, and what is wrong there. The framework knows only that a body it
    has not read as JSON is no object, and puts why it could not read one aside."""
    where, what = ".".join(map(str, error["loc"])), str(error["msg"])
    if error["type"] == "json_invalid":
        where, what = "body", f"this is not JSON: {error['ctx']['error']}"
    elif where == "body" and isinstance(error.get("input"), bytes):
        sent = request.headers.get("content-type", "no type")
        what = f"send JSON, as Content-Type: application/json, not {sent[:100]!a}"
    return {"where": where, "what": what[:200]}


def _problem(
    request: Request,
    status: HTTPStatus,
    code: str,
    title: str,
    detail: str,
    headers: Mapping[str, str],
    more: Mapping[str, Any],
) -> Response:
    content = {
        **more,
        "type": f"urn:weightyard:problem:{code}",
        "title": title,
        "status": int(status),
        "detail": detail,
        "code": code,
        "request_id": _request_id(request),
    }
    safe = msgspec.json.encode(content)
    return Response(safe, status_code=status, headers=dict(headers), media_type=MEDIA_TYPE)


def title_of(kind: type[YardError]) -> str:
    """The first sentence of an error's description."""
    return (kind.__doc__ or kind.code).partition(".")[0].replace("\n", " ").strip() + "."


def _request_id(request: Request) -> str:
    return str(request.scope.get("weightyard.request_id", ""))
