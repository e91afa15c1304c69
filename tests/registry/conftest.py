"""What the registry's tests run on: a folder, and SQLite or a real PostgreSQL server."""

from __future__ import annotations

import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url
from waiting import eventually

from weightyard.registry import binding, migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with the schema in place, to be copied."""
    file = tmp_path_factory.mktemp("migrated") / "registry.db"
    database = Database(f"sqlite:///{file}")
    migrate.upgrade(database)
    database.close()
    return file


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return request.getfixturevalue("postgres")()  # type: ignore[no-any-return]
    file = shutil.copy(request.getfixturevalue("migrated"), tmp_path / "registry.db")
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("UPDATE registry SET registry_id = ?", (secrets.token_hex(16),))
    return f"sqlite:///{file}"


@pytest.fixture
def backup(database_url: str, tmp_path: Path) -> Iterator[Callable[[], Database]]:
    """Copies the database as it is; nobody may have it open."""
    copies: list[Database] = []

    def copy() -> Database:
        url = make_url(database_url)
        name = f"copy_{secrets.token_hex(6)}"
        if url.get_backend_name() == "sqlite":
            shutil.copy(str(url.database), tmp_path / name)
            copied = f"sqlite:///{tmp_path}/{name}"
        else:
            server = url.set(drivername="postgresql", database="postgres")
            with psycopg.connect(server.render_as_string(False), autocommit=True) as connection:
                # The server ends a session some time after its client has closed it, and waits
                # only a few seconds for that before it refuses to copy.
                eventually(lambda: not _sessions(connection, str(url.database)))
                connection.execute(f"CREATE DATABASE {name} TEMPLATE {url.database}")
            copied = url.set(database=name).render_as_string(False)
        copies.append(Database(copied))
        return copies[-1]

    yield copy
    for database in copies:
        database.close()


def _sessions(connection: psycopg.Connection, database: str) -> int:
    """How many clients have a database open."""
    asked = connection.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = %s AND backend_type = 'client backend'",
        [database],
    )
    return int(asked.fetchone()[0])  # type: ignore[index]


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def registry(database: Database, store: LocalStore) -> Registry:
    """Of a yard in which nothing is yet; alice is at work."""
    binding.bind(database, store)
    return Registry(database, who="alice")
