"""`weightyard serve`: a yard over REST."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from weightyard.cli.session import Session, command
from weightyard.errors import Unsupported


@command
def serve(
    session: Session,
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The store: hdfs://… or a folder. As --yard."),
    ] = None,
    db: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The database: postgresql://… Better in WEIGHTYARD_DB, if it has a password.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8600,
) -> None:
    """Serve a yard over REST. Any number of these may run on one database.

    An embedded yard (a folder with SQLite), served on loopback, lets in every program of this host
    as long as there is no token, and says so. All others need tokens, or a proxy that says who is
    asking. With --json, one line says where it serves, once it does.

    Examples:

      weightyard serve

      weightyard token create me --role admin && weightyard serve --host 0.0.0.0

      weightyard serve --store hdfs://cluster/yard --db postgresql://db/yard

      weightyard serve --port 0 --json
    """
    from weightyard.registry import migrate

    try:
        from weightyard.service.serving import listening, open_service
        from weightyard.service.serving import serve as answer
    except ModuleNotFoundError as why:
        raise Unsupported(f"serving needs {why.name}: install weightyard[service]") from None
    from weightyard.opening import open_database_of_yard, store_url
    from weightyard.storage.opening import open_store

    _log_everything()
    settings = session.settings()
    if db is not None:
        settings = settings.model_copy(update={"db": db})

    def say(url: str) -> None:
        is_open = service.may_be_open and not service.registry.has_tokens()
        if session.as_json:
            said = {"url": url, "store": opened.url, "open": is_open}
            typer.echo(json.dumps(said, ensure_ascii=False))
            return
        typer.echo(f"weightyard serves {opened.url} on {url}", err=True)
        if is_open:
            typer.echo(
                "There is no token yet: every program on this host may do everything, until "
                "`weightyard token create NAME --role admin` makes one.",
                err=True,
            )

    chosen = store_url(session.url if store is None else store, settings)
    with open_store(chosen, settings) as opened:
        database = open_database_of_yard(opened, settings)
        try:
            if database.is_sqlite:
                migrate.upgrade(database)
            service = open_service(opened, database, settings, host)
            with listening(host, port) as socket:
                answer(service, socket, say)
        finally:
            database.close()


def _log_everything() -> None:
    """Print every log line on stderr, with its time: a service's log is for its operator."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # A line for every client that is made, and for each of Alembic's own parts.
    for talkative in ("hdfs", "alembic.runtime.plugins"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    package = logging.getLogger("weightyard")
    package.handlers = []
    package.propagate = True
