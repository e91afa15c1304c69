"""Auth: who is asking, and whether they may. A route denies what its rule does not allow."""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Path, Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import Response

from weightyard.errors import InvalidName, NotAllowed, Unauthenticated
from weightyard.names import ModelName, Ref, TokenName, UploadId, is_plain_text
from weightyard.records import EVERY_PROJECT, MAX_LEVELS, ReadLease, Role, Token, Version
from weightyard.registry.leases import no_such_lease
from weightyard.registry.uploads import OpenUpload, Reading
from weightyard.service.state import Service, service_of
from weightyard.transfer.strict_json import strict_json

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])

_RANK = {Role.READ: 0, Role.WRITE: 1, Role.ADMIN: 2}
_LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))
_BY_A_PROXY = ("forwarded", "via", "x-real-ip")


@dataclass(frozen=True, slots=True)
class Principal:
    """Someone the service knows, and what they may do."""

    who: str
    role: Role
    projects: tuple[str, ...] | None
    """None: all of them."""

    @classmethod
    def of(cls, token: Token) -> Principal:
        everywhere = EVERY_PROJECT in token.projects
        return cls(token.name, token.role, None if everywhere else token.projects)

    @property
    def reading(self) -> Reading | None:
        """Which blocks they may know of; None: all."""
        return None if self.projects is None else Reading(self.projects, self.who)

    def own_key(self, key: str) -> str:
        """The key with the caller mixed in, so that none learns of another's work by its key."""
        return hashlib.sha256(f"{self.who}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()

    def require(self, role: Role, project: str | None) -> None:
        """Raises NotAllowed. A project of None stands for the whole yard."""
        if _RANK[self.role] < _RANK[role]:
            raise NotAllowed(f"{self.who} has the role {self.role}; this needs {role}")
        if self.projects is not None and project not in self.projects:
            where = "all projects" if project is None else f"project {project[:96]!a}"
            raise NotAllowed(f"{self.who} has no rights in {where}")

    def may_read(self, model: ModelName) -> bool:
        return self.projects is None or model.project in self.projects

    def shown(self, version: Version) -> Version:
        """A version as they may see it: without a parent of which they may not know."""
        if version.parent is None or self.may_read(Ref.parse(version.parent).model):
            return version
        return version.model_copy(update={"parent": None})

    def require_model(self, role: Role, model: ModelName) -> None:
        self.require(role, model.project)


@dataclass(frozen=True, slots=True)
class Need:
    """The rule of a route: the role needed in the project its path names, or else in any one."""

    role: Role
    everywhere: bool = False
    """Whether one needs it in all projects, since the route concerns the whole yard."""


def needs(role: Role, *, everywhere: bool = False) -> Callable[[_Endpoint], _Endpoint]:
    """Says who may call a route. A route without it is closed."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.__dict__["weightyard_need"] = Need(role, everywhere)
        return endpoint

    return mark


def need_of(endpoint: Callable[..., Any]) -> Need | None:
    return cast("Need | None", getattr(endpoint, "weightyard_need", None))


class GuardedRoute(APIRoute):
    """A route that asks who calls before it reads a byte of the body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        need = need_of(self.endpoint)

        async def guarded(request: Request) -> Response:
            await _authorize(request, need)
            return await handle(_StrictRequest(request.scope, request.receive))

        return guarded


async def _authorize(request: Request, need: Need | None) -> None:
    service = service_of(request)
    principal = await authenticate(service, request)
    if need is None:
        raise NotAllowed("this route has no rule and is closed")
    path = request.path_params
    if "upload" in path:
        upload = await service.ask(service.registry.find_upload, UploadId(path["upload"]))
        principal.require_model(need.role, upload.model)
        if upload.author != principal.who and principal.role is not Role.ADMIN:
            raise NotAllowed(f"upload {upload.upload} is not {principal.who}'s")
        request.state.upload = upload
    elif "lease" in path:
        lease = await service.ask(service.registry.find_lease, _lease_id(path["lease"]))
        model = Ref.parse(lease.ref).model
        is_admin = principal.role is Role.ADMIN and principal.may_read(model)
        if lease.author != principal.who and not is_admin:
            raise no_such_lease(lease.id)  # others learn nothing by trying ids
        principal.require_model(need.role, model)
        request.state.lease = lease
    elif need.everywhere:
        principal.require(need.role, None)
    elif "project" in path:
        principal.require(need.role, path["project"])
    elif _RANK[principal.role] < _RANK[need.role]:
        raise NotAllowed(f"{principal.who} has the role {principal.role}; this needs {need.role}")
    request.state.principal = principal


def _lease_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidName(f"lease {text[:40]!a}: use the id that was given, a number")
    return int(text)


async def authenticate(service: Service, request: Request) -> Principal:
    """Who is asking: told by a token or a trusted proxy; anybody while the service is open.

    Raises Unauthenticated, NotAllowed.
    """
    headers = request.headers
    if "authorization" in headers:
        return await _by_token(service, headers)
    peer = request.client.host if request.client is not None else ""
    if (user := _user_by_proxy(service, peer, headers)) is not None:
        return await _by_proxy(service, user)
    if service.may_be_open and not await service.ask(service.registry.has_tokens):
        _require_this_host(peer, headers)
        return Principal("local", Role.ADMIN, None)
    raise Unauthenticated(
        "this service asks for a token: set WEIGHTYARD_TOKEN, or send Authorization: Bearer wy_…"
    )


async def _by_token(service: Service, headers: Headers) -> Principal:
    scheme, _, secret = headers["authorization"].partition(" ")
    if scheme.lower() != "bearer" or len(headers.getlist("authorization")) != 1:
        raise Unauthenticated("show one token: Authorization: Bearer wy_…")
    token = await service.ask(service.registry.token_of, secret.strip())
    if token is None:
        raise Unauthenticated("this token is not known, or was revoked")
    await service.note_use(token.name, service.registry.note_token_use, token.name)
    return Principal.of(token)


def _user_by_proxy(service: Service, peer: str, headers: Headers) -> str | None:
    settings = service.settings
    if settings.proxy_header is None or not _is_one_of(peer, settings.proxy_addresses):
        return None
    users = headers.getlist(settings.proxy_header)
    if len(users) != 1 or not is_plain_text(users[0]) or len(users[0]) > 96:
        raise Unauthenticated(f"the proxy did not say who is asking in {settings.proxy_header}")
    return users[0]


async def _by_proxy(service: Service, user: str) -> Principal:
    """A user has the rights of the token of that name, or else those that all users have.

    If that token was revoked, the user has no rights at all, not even those.
    """
    try:
        name = TokenName(user)
    except InvalidName:  # such as `alice/admin@REALM`, `CORP\alice`, which no token can have
        token = None
    else:
        token = await service.ask(service.registry.token_named, name)
    if token is not None and token.revoked is not None:
        raise NotAllowed(f"{user} has no rights here: the token of that name was revoked")
    if token is not None:
        return Principal.of(token)
    if service.settings.proxy_role is None:
        raise NotAllowed(f"{user} has no rights here: make a token of that name")
    return Principal(user, Role(service.settings.proxy_role), None)


def _require_this_host(peer: str, headers: Headers) -> None:
    """Let in only programs on this host, while the service is open. Raises Unauthenticated.

    A web page may send requests to loopback, and under a host name that it controls even read the
    answers. A proxy on this host calls from loopback, but on behalf of anybody.
    """
    name = headers.get("host", "").lower()
    host = name[: name.index("]") + 1] if name.startswith("[") else name.partition(":")[0]
    if not is_loopback(peer) or host not in _LOOPBACK_NAMES:
        raise Unauthenticated("without tokens the service answers programs on its own host only")
    if any(name in _BY_A_PROXY or name.startswith("x-forwarded-") for name in headers):
        raise Unauthenticated(
            "without tokens the service answers nobody through a proxy: make one first "
            "(weightyard token create NAME --role admin)"
        )
    if "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Unauthenticated("without tokens the service does not answer web pages")


def is_loopback(address: str) -> bool:
    return _is_one_of(address, ("127.0.0.0/8", "::1/128"))


def _is_one_of(address: str, networks: tuple[str, ...]) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(found in ipaddress.ip_network(network, strict=False) for network in networks)


_MAX_BODY_LEVELS = MAX_LEVELS + 2
"""A value of `MAX_LEVELS` levels lies up to two levels inside a body."""


class _StrictRequest(Request):
    """Takes strict JSON only: no NaN, no halves of surrogate pairs, and no NUL in texts."""

    async def json(self) -> Any:
        try:
            return strict_json(await self.body(), levels=_MAX_BODY_LEVELS)
        except ValueError as why:
            raise json.JSONDecodeError(str(why), "", 0) from None  # an error the framework handles


async def principal_of(request: Request) -> Principal:
    return cast(Principal, request.state.principal)


async def upload_of(
    request: Request, upload: Annotated[str, Path(examples=["0a" * 16])]
) -> OpenUpload:
    """The upload that a path names. It was looked up before, to see whose it is."""
    return cast(OpenUpload, request.state.upload)


async def lease_of(request: Request, lease: Annotated[int, Path(ge=0, examples=[7])]) -> ReadLease:
    """The lease that a path names. It was looked up before, to see what it is on."""
    return cast(ReadLease, request.state.lease)


Caller = Annotated[Principal, Depends(principal_of)]
Opened = Annotated[OpenUpload, Depends(upload_of)]
Held = Annotated[ReadLease, Depends(lease_of)]
