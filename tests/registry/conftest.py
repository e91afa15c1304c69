"""Databases to run the registry's tests on: SQLite, and a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()
