"""Read leases over REST: a reader that takes long holds one, so that its version's bytes stay."""

from __future__ import annotations

from fastapi import APIRouter

from weightyard.names import Ref
from weightyard.records import ReadLease, Role
from weightyard.service.auth import Caller, GuardedRoute, Held, needs
from weightyard.service.paging import Named, Number
from weightyard.service.problems import RESPONSES
from weightyard.service.state import Yard
from weightyard.wire import LeaseRenewed, LeaseWanted

router = APIRouter(route_class=GuardedRoute, tags=["leases"], responses=RESPONSES)


@router.post("/models/{project}/{name}/versions/{number}/leases", status_code=201)
@needs(Role.READ)
async def take_lease(
    yard: Yard, caller: Caller, model: Named, number: Number, body: LeaseWanted
) -> ReadLease:
    """Keep a version's bytes for a reader, even if the version is removed meanwhile.

    Only whoever took it, or an admin, may renew or end it.
    """
    return await yard.ask(
        yard.registry.take_lease, Ref(model, number), body.holder, body.seconds, who=caller.who
    )


@router.put("/leases/{lease}")
@needs(Role.READ)
async def renew_lease(yard: Yard, held: Held, body: LeaseRenewed) -> ReadLease:
    """Keep the bytes for longer. If not found, the lease has ended, and the bytes may go."""
    return await yard.ask(yard.registry.renew_lease, held.id, body.seconds)


@router.delete("/leases/{lease}", status_code=204)
@needs(Role.READ)
async def release_lease(yard: Yard, held: Held) -> None:
    """Give a lease up."""
    await yard.ask(yard.registry.release_lease, held.id)
