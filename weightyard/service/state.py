"""What all routes share: the yard, and bounded threads for everything that may block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar, cast

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Depends, Request

from weightyard.registry.binding import Bound
from weightyard.registry.registry import Registry
from weightyard.service.locating import Answers
from weightyard.service.manifests import Manifests
from weightyard.service.metrics import Metrics
from weightyard.service.spool import Spool
from weightyard.service.turnstile import Turnstile
from weightyard.service.uses import Uses
from weightyard.service.wake import Wake
from weightyard.settings import Settings
from weightyard.storage.store import Store

_P = ParamSpec("_P")
_T = TypeVar("_T")

_THREADS = {True: (8, 6), False: (22, 8)}
"""On SQLite and elsewhere: for short calls, and for files being read or written, each of which
holds up to a pack in memory. Together fewer than the database gives connections."""


@dataclass
class Service:
    """One process of the service. Keeps nothing that another process would need."""

    registry: Registry
    store: Store
    bound: Bound
    settings: Settings
    may_be_open: bool
    """Whether callers on this host come in without a token, as long as none was ever made."""
    spool: Spool
    metrics: Metrics = field(default_factory=Metrics)
    wake: Wake = field(default_factory=Wake)
    uses: Uses = field(default_factory=Uses)
    located: Answers = field(default_factory=Answers)
    turnstile: Turnstile = field(default_factory=lambda: Turnstile(total=64, each=32))
    manifests: Manifests = field(init=False)
    listeners: int = 0
    readiness: tuple[float, Any] | None = None
    _short: CapacityLimiter = field(init=False)
    _bulk: CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        self.manifests = Manifests(self.store)
        short, bulk = _THREADS[self.registry.database.is_sqlite]
        self._short, self._bulk = CapacityLimiter(short), CapacityLimiter(bulk)

    @property
    def min_replicas(self) -> int:
        """On how many DataNodes a pack must be before a version may use it."""
        return 2 if self.store.replicates else 1

    async def ask(self, call: Callable[_P, _T], *values: _P.args, **named: _P.kwargs) -> _T:
        """Run a short call on the database or the store in a thread."""
        work = partial(call, *values, **named)
        return await anyio.to_thread.run_sync(work, limiter=self._short)

    async def move(self, call: Callable[_P, _T], *values: _P.args, **named: _P.kwargs) -> _T:
        """Run a call that moves many bytes in a thread; few of them run at once."""
        work = partial(call, *values, **named)
        return await anyio.to_thread.run_sync(work, limiter=self._bulk)


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


async def _service(request: Request) -> Service:
    # The framework runs what is not async in a thread, which costs more than most requests do.
    return service_of(request)


Yard = Annotated[Service, Depends(_service)]
