"""State that all routes share: the yard, and bounded threads for everything that may block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, cast

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Depends, Request

from weightyard.errors import NotAllowed, Retryable, StoreFull
from weightyard.logs import Log
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
from weightyard.storage.watched import Watched

_log = Log(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Threads(NamedTuple):
    """How many calls of each kind run at once. None of them waits for threads of another kind."""

    short: int
    """Calls that need only the database: they must not wait for a store that does not answer."""
    stored: int
    """Short calls that need the store."""
    bulk: int
    """Files being split, encoded and written, each of which holds up to a pack in memory."""
    sent: int
    """Windows of files being read, and packs being located."""
    commits: int
    """Commits: they may wait for DataNodes, but must not wait for files that are sent for hours."""


_THREADS = {True: _Threads(5, 2, 3, 3, 2), False: _Threads(13, 4, 6, 5, 3)}
"""With SQLite, and with PostgreSQL: together no more than the database gives connections."""


@dataclass
class Service:
    """One process of the service. Keeps nothing that another process would need."""

    registry: Registry
    store: Store
    bound: Bound
    settings: Settings
    may_be_open: bool
    """Whether callers on this host need no token, as long as none was ever made."""
    spool: Spool
    metrics: Metrics = field(default_factory=Metrics)
    wake: Wake = field(default_factory=Wake)
    uses: Uses = field(default_factory=Uses)
    located: Answers = field(default_factory=Answers)
    turnstile: Turnstile = field(default_factory=lambda: Turnstile(total=64, each=32))
    manifests: Manifests = field(init=False)
    listeners: int = 0
    readiness: tuple[float, Any] | None = None
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever finds out whether this process can serve."""
    watched_database: Watched = field(default_factory=lambda: Watched(most=1))
    watched_store: Watched = field(default_factory=lambda: Watched(most=1))
    _short: CapacityLimiter = field(init=False)
    _stored: CapacityLimiter = field(init=False)
    _bulk: CapacityLimiter = field(init=False)
    _sent: CapacityLimiter = field(init=False)
    _commits: CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        self.manifests = Manifests(self.store)
        limiters = map(CapacityLimiter, _THREADS[self.registry.database.is_sqlite])
        self._short, self._stored, self._bulk, self._sent, self._commits = limiters

    async def ask(self, call: Callable[_P, _T], *values: _P.args, **named: _P.kwargs) -> _T:
        """Run a short call on the database in a thread."""
        work = partial(call, *values, **named)
        return await anyio.to_thread.run_sync(work, limiter=self._short)

    async def ask_store(self, call: Callable[_P, _T], *values: _P.args, **named: _P.kwargs) -> _T:
        """Run a short call that needs the store. If the store is down, it may take long to fail."""
        work = partial(call, *values, **named)
        return await anyio.to_thread.run_sync(work, limiter=self._stored)

    async def note_use(
        self, name: str, note: Callable[_P, None], *values: _P.args, **named: _P.kwargs
    ) -> None:
        """Have a use noted, unless it was noted lately. Failing to note it fails no request."""
        if not self.uses.is_new(name):
            return
        try:
            await self.ask(note, *values, **named)
        except (Retryable, NotAllowed, StoreFull) as why:
            _log.warning("use.not_noted", name=name, reason=why)

    async def move(self, call: Callable[_P, _T], *values: _P.args, **named: _P.kwargs) -> _T:
        """Run a call that writes many bytes, or takes long; few of them run at once."""
        work = partial(call, *values, **named)
        return await anyio.to_thread.run_sync(work, limiter=self._bulk)

    async def send(self, call: Callable[_P, _T], *values: _P.args, **named: _P.kwargs) -> _T:
        """Run a call that reads from the store what somebody waits for."""
        work = partial(call, *values, **named)
        return await anyio.to_thread.run_sync(work, limiter=self._sent)

    async def commit(self, call: Callable[_P, _T], *values: _P.args, **named: _P.kwargs) -> _T:
        """Run a call that publishes a version."""
        work = partial(call, *values, **named)
        return await anyio.to_thread.run_sync(work, limiter=self._commits)


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


async def _service(request: Request) -> Service:
    # Async: other functions the framework runs in threads, which costs more than most requests.
    return service_of(request)


Yard = Annotated[Service, Depends(_service)]
