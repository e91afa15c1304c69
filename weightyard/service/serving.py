"""Serving: makes a service of a store and a database, and runs it."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from weightyard.errors import BadSetting, NotAllowed
from weightyard.format.block import KIB
from weightyard.registry import binding
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.service.app import create_app
from weightyard.service.auth import is_loopback
from weightyard.service.spool import Spool
from weightyard.service.state import Service
from weightyard.settings import Settings
from weightyard.storage.opening import folder_of
from weightyard.storage.store import Store

_KEEP_ALIVE_S = 30
_GRACE_S = 20
_MAX_CONNECTIONS = 2000
_BACKLOG = 1024


def open_service(store: Store, database: Database, settings: Settings, host: str) -> Service:
    """A service of this yard, for the address `host`.

    Raises SchemaUnknown, saying which command to run; ForeignStore; NotAllowed if there is no
    token yet, unless this is an embedded yard and the address is loopback.
    """
    registry = Registry(database, store=store, who="service")
    bound = binding.bind(database, store)
    if settings.proxy_header is not None and not settings.proxy_addresses:
        raise BadSetting(
            "WEIGHTYARD_PROXY_HEADER is believed only from WEIGHTYARD_PROXY_ADDRESSES: set both"
        )
    on_loopback = host == "localhost" or is_loopback(host)
    is_embedded = folder_of(store) is not None and database.is_sqlite
    may_be_open = on_loopback and is_embedded
    if not may_be_open and settings.proxy_header is None and not registry.has_tokens():
        who = f"all who reach {host}" if not on_loopback else "every program of this host"
        raise NotAllowed(
            f"without tokens the service would be open to {who}: make one first, on this store and "
            "database (weightyard token create NAME --role admin); only an embedded yard, a folder "
            "with SQLite, may be served open, on 127.0.0.1"
        )
    return Service(
        registry=registry,
        store=store,
        bound=bound,
        settings=settings,
        may_be_open=may_be_open,
        spool=Spool(settings.spool or settings.cache / "spool", settings.spool_bytes),
    )


def listening(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free port. Raises BadSetting if the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as why:
        raise BadSetting(f"--host {host}: {why.strerror}") from None
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
        found.listen(_BACKLOG)  # clients that are told the URL may connect before uvicorn is up
    except OSError as why:
        found.close()
        raise BadSetting(f"{host}:{port}: {why.strerror}: choose another --port") from None
    found.set_inheritable(True)
    return found


def serve(service: Service, on: socket.socket, ready: Callable[[str], None]) -> None:
    """Answer until the process is told to stop. `ready` is called with the URL."""
    config = uvicorn.Config(
        create_app(service),
        access_log=False,  # `Tracing` logs each request, without names or query
        log_config=None,
        server_header=False,
        proxy_headers=False,  # `auth` trusts only the address that really connected
        h11_max_incomplete_event_size=64 * KIB,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        limit_concurrency=_MAX_CONNECTIONS,
        backlog=_BACKLOG,
        http="h11",
        ws="none",
    )
    host, port = on.getsockname()[:2]
    ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    _Server(config, service).run(sockets=[on])


class _Server(uvicorn.Server):
    """Ends the event streams first: otherwise they would go on while anybody listens."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.wake.end()
        await super().shutdown(sockets)
