"""Databases to run the registry's tests on: SQLite, and a real PostgreSQL server."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from weightyard.registry import migrate
from weightyard.registry.database import Database


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return request.getfixturevalue("postgres")()  # type: ignore[no-any-return]
    url = f"sqlite:///{tmp_path}/registry.db"
    database = Database(url)
    migrate.upgrade(database)
    database.close()
    return url


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
                connection.execute(f"CREATE DATABASE {name} TEMPLATE {url.database}")
            copied = url.set(database=name).render_as_string(False)
        copies.append(Database(copied))
        return copies[-1]

    yield copy
    for database in copies:
        database.close()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()
