"""What the tests of service and client have in common."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pushing
import pytest
import uvicorn
from fastapi import FastAPI
from waiting import eventually

from weightyard.format.block import MIB
from weightyard.names import ModelName, TokenName
from weightyard.records import Role, Version
from weightyard.registry import migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.service.app import create_app
from weightyard.service.serving import listening, open_service
from weightyard.service.state import Service
from weightyard.settings import Settings
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue

API = "/api/v1"
LIMIT_S = 60.0


@dataclass
class World:
    """A service, its yard, and tokens by name."""

    service: Service
    app: FastAPI
    secrets: dict[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> Registry:
        return self.service.registry

    @property
    def store(self) -> Store:
        return self.service.store

    def call(
        self,
        method: str,
        path: str,
        *,
        token: str | None = "boss",
        headers: Mapping[str, str] | None = None,
        peer: str = "127.0.0.1",
        base: str = "http://127.0.0.1:8600",
        **options: Any,
    ) -> httpx.Response:
        """One request in this process; the token is named, not shown."""
        given = httpx.Headers(headers)
        if token is not None:
            given["Authorization"] = f"Bearer {self.secrets.get(token, token)}"

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(
                self.app, raise_app_exceptions=False, client=(peer, 50000)
            )
            async with httpx.AsyncClient(
                transport=transport, base_url=base, verify=False, trust_env=False
            ) as client:
                target = path if path.startswith("/") else f"{API}/{path}"
                return await client.request(method, target, headers=given, **options)

        return asyncio.run(ask())


TOKENS = (
    ("boss", Role.ADMIN, ["*"]),
    ("reader", Role.READ, ["team"]),
    ("writer", Role.WRITE, ["team"]),
    ("lead", Role.ADMIN, ["team"]),
    ("stranger", Role.WRITE, ["other"]),
)


@contextmanager
def make_world(
    folder: Path,
    database_url: str | None = None,
    *,
    tokens: bool = True,
    store: Store | None = None,
    **settings: Any,
) -> Iterator[World]:
    """A service on a store, and on a database: by default a folder, and SQLite beside it."""
    secrets: dict[str, str] = {}
    if database_url is None:
        folder.mkdir(exist_ok=True)
        template, secrets = _template(tokens)
        shutil.copy(template, folder / "registry.db")
        database = Database(f"sqlite:///{folder}/registry.db")
    else:
        database = Database(database_url)
        migrate.upgrade(database)
    store = store or LocalStore(folder / "store")
    options = {"spool": folder / "spool", "spool_bytes": 64 * MIB, **settings}
    if tokens and not secrets:
        secrets = _make_tokens(Registry(database))
    service = open_service(store, database, Settings(**options), "127.0.0.1")
    yield World(service, create_app(service), dict(secrets))
    database.close()


def _make_tokens(registry: Registry) -> dict[str, str]:
    return {
        name: registry.create_token(TokenName(name), role, projects, who="test").secret
        for name, role, projects in TOKENS
    }


@cache
def _template(tokens: bool) -> tuple[Path, dict[str, str]]:
    """A database that was migrated once, for all tests to copy."""
    folder = Path(tempfile.mkdtemp(prefix="weightyard-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    database = Database(f"sqlite:///{folder}/registry.db")
    migrate.upgrade(database)
    secrets = _make_tokens(Registry(database)) if tokens else {}
    database.close()
    with sqlite3.connect(folder / "registry.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    return folder / "registry.db", secrets


def push(catalogue: Catalogue, store: Store, model: str, *contents: bytes, **said: Any) -> Version:
    """Publish tensors as a trainer would, by whichever catalogue."""
    return pushing.push(catalogue, store, *contents, model=ModelName.parse(model), **said)


def push_file(world: World, model: str, path: str, data: bytes, token: str = "boss") -> int:
    """Publish one file through the service; the version's number."""
    opened = world.call("POST", f"models/{model}/uploads", token=token).json()
    upload = f"uploads/{opened['id']}"
    sent = world.call("PUT", f"{upload}/files/{path}", content=data, token=token)
    assert sent.status_code == 200, sent.text
    done = world.call("POST", f"{upload}/commit", token=token)
    assert done.status_code == 201, done.text
    return int(done.json()["number"])


def counted_all(world: World) -> None:
    """Wait until the service has nothing under way: bytes count when they have gone out, and their
    reader may have them a moment before."""
    eventually(lambda: world.service.metrics.running._value.get() == 0)


@contextmanager
def served(app: FastAPI, *, port: int = 0, **options: Any) -> Iterator[str]:
    """An app on a real port of loopback, by a real server."""
    sock = listening("127.0.0.1", port)
    config = uvicorn.Config(
        app, log_config=None, http="h11", ws="none", proxy_headers=False, **options
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + LIMIT_S
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        sock.close()
        assert not thread.is_alive()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A yard on SQLite and a folder, with tokens, called in this process."""
    with make_world(tmp_path) as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def any_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """The same on either database."""
    url = request.getfixturevalue("postgres")() if request.param == "postgresql" else None
    with make_world(tmp_path, url) as made:
        yield made


@pytest.fixture
def url(world: World) -> Iterator[str]:
    """Where `world` is served, by a real server on a real port."""
    with served(world.app) as found:
        yield found
