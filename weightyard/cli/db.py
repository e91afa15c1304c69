"""`weightyard db`: the schema of the registry's database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from weightyard.registry.database import Database

app = typer.Typer(help="The schema of the registry's database.", no_args_is_help=True)

_Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="sqlite:///… or postgresql://… Default: WEIGHTYARD_DB, else the store's own.",
    ),
]


@app.command()
@command
def upgrade(session: Session, db: _Db = None) -> None:
    """Bring a database, also an empty one, to the schema this weightyard works with.

    An SQLite file is upgraded by whoever opens it; PostgreSQL waits for this command.

    Examples:

      weightyard db upgrade

      weightyard db upgrade --db postgresql://weightyard@db.example/weightyard
    """
    from weightyard.registry import migrate

    with opened_database(session, db) as database:
        before = migrate.current(database)
        migrate.upgrade(database)
        after = migrate.current(database)
        result = {"database": database.shown, "before": before, "schema": after}
    said = (
        f"{result['database']} has schema {after} already"
        if before == after
        else f"{result['database']} went from {before or 'no schema'} to {after}"
    )
    session.show(result, lambda console: console.print(said, markup=False))


@app.command()
@command
def current(session: Session, db: _Db = None) -> None:
    """Show the schema a database has. Exit code 1 if it is not the one this weightyard needs.

    Example: weightyard db current --json
    """
    from weightyard.registry import migrate

    with opened_database(session, db, make=False) as database:
        schema = migrate.current(database) if database.is_there else None
        newest = migrate.newest()
        result = {
            "database": database.shown,
            "schema": schema,
            "newest": newest,
            "is_current": schema == newest,
        }
    said = f"{result['database']} has schema {schema}" if schema else "it has no schema yet"
    if schema != newest:
        said += f"; {newest} is needed: run `weightyard db upgrade`"
    session.show(result, lambda console: console.print(said, markup=False))
    if schema != newest:
        raise typer.Exit(1)


@contextmanager
def opened_database(session: Session, db: str | None, *, make: bool = True) -> Iterator[Database]:
    """The database named, or else that of the session's store, whatever its schema.

    `make`: whether to make the folder of a new one.
    """
    from weightyard.opening import database_url, open_database, store_url
    from weightyard.registry.database import Database
    from weightyard.storage.opening import open_store

    settings = session.settings()
    if (url := settings.db if db is None else db) is not None:
        database = Database(url)
    else:
        with open_store(store_url(session.url, settings), settings) as store:
            database = (
                open_database(store, settings) if make else Database(database_url(store, settings))
            )
    try:
        yield database
    finally:
        database.close()
