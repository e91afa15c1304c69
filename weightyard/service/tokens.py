"""Tokens and the audit log over REST."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from weightyard.names import TokenName
from weightyard.records import AuditEntry, NewToken, Role, Token
from weightyard.service.auth import Caller, GuardedRoute, needs
from weightyard.service.paging import After, Limit, number_after, page
from weightyard.service.problems import RESPONSES
from weightyard.service.state import Yard
from weightyard.wire import Page, TokenWanted

router = APIRouter(route_class=GuardedRoute, tags=["access"], responses=RESPONSES)


@router.get("/tokens")
@needs(Role.ADMIN, everywhere=True)
async def list_tokens(yard: Yard, limit: Limit = 100, after: After = None) -> Page[Token]:
    """All tokens, revoked ones too, by name, without their secrets."""
    first = TokenName(after) if after is not None else None
    found = await yard.ask(yard.registry.tokens, after=first, limit=limit)
    return page(found, limit, lambda token: token.name)


@router.post("/tokens", status_code=201)
@needs(Role.ADMIN, everywhere=True)
async def create_token(yard: Yard, caller: Caller, body: TokenWanted) -> NewToken:
    """Make a token. Its secret is in this answer and nowhere else."""
    return await yard.ask(
        yard.registry.create_token,
        TokenName(body.name),
        body.role,
        body.projects,
        who=caller.who,
    )


@router.delete("/tokens/{token}")
@needs(Role.ADMIN, everywhere=True)
async def revoke_token(
    yard: Yard, caller: Caller, token: Annotated[str, Path(examples=["nightly-ci"])]
) -> Token:
    """End a token, at once and for good."""
    return await yard.ask(yard.registry.revoke_token, TokenName(token), who=caller.who)


@router.get("/audit")
@needs(Role.ADMIN, everywhere=True)
async def audit_log(yard: Yard, limit: Limit = 100, after: After = None) -> Page[AuditEntry]:
    """Who did what, the newest first."""
    found = await yard.ask(yard.registry.audit, before=number_after(after), limit=limit)
    return page(found, limit, lambda entry: entry.id)
