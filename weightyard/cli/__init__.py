"""The command line. One module per command; each imports what it needs when it runs."""

from __future__ import annotations

import logging
import sys
import traceback
from io import TextIOWrapper
from typing import Annotated

import typer

from weightyard.cli import (
    alias,
    annotate,
    cache,
    check,
    cluster,
    db,
    diff,
    doctor,
    follow,
    gc,
    init,
    load,
    ls,
    path,
    pull,
    push,
    rebuild,
    retention,
    rm,
    serve,
    set,
    show,
    token,
)
from weightyard.cli.ending import end_by_signals
from weightyard.cli.panels import Panel
from weightyard.cli.session import (
    JsonOption,
    QuietOption,
    Session,
    TokenOption,
    YardOption,
)
from weightyard.errors import Bug, YardError

app = typer.Typer(
    name="weightyard",
    help="Versioned model weights on HDFS, and a fast way from there into tensors.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel=Panel.MODELS)(push.push)
app.command(rich_help_panel=Panel.MODELS)(pull.pull)
app.command(rich_help_panel=Panel.MODELS)(ls.ls)
app.command(rich_help_panel=Panel.MODELS)(show.show)
app.command(rich_help_panel=Panel.MODELS)(diff.diff)
app.command(rich_help_panel=Panel.MODELS)(annotate.annotate)
app.add_typer(alias.app, name="alias", rich_help_panel=Panel.MODELS)
app.command("set", rich_help_panel=Panel.MODELS)(set.set_)
app.command(rich_help_panel=Panel.MODELS)(rm.rm)
app.command(rich_help_panel=Panel.MODELS)(load.load)
app.command(rich_help_panel=Panel.MODELS)(path.path)
app.command(rich_help_panel=Panel.MODELS)(follow.follow)
app.add_typer(cache.app, name="cache", rich_help_panel=Panel.MODELS)
app.command(rich_help_panel=Panel.OPERATE)(init.init)
app.command(rich_help_panel=Panel.OPERATE)(doctor.doctor)
app.command(rich_help_panel=Panel.OPERATE)(gc.gc)
app.command(rich_help_panel=Panel.OPERATE)(check.check)
app.command(rich_help_panel=Panel.OPERATE)(rebuild.rebuild)
app.command(rich_help_panel=Panel.OPERATE)(retention.retention)
app.add_typer(token.app, name="token", rich_help_panel=Panel.OPERATE)
app.command(rich_help_panel=Panel.OPERATE)(serve.serve)
app.add_typer(db.app, name="db", rich_help_panel=Panel.OPERATE)
app.add_typer(cluster.app, name="cluster", rich_help_panel=Panel.DEVELOP)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"weightyard {version('weightyard')}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    yard: YardOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    ctx.obj = Session(yard, token, as_json, quiet)


def main() -> None:
    """Run the command line; an error of weightyard becomes a message and its exit code."""
    end_by_signals()
    if isinstance(sys.stdout, TextIOWrapper):  # names of folders may have bytes that are not UTF-8
        sys.stdout.reconfigure(errors="surrogateescape")
    # The signal may come while a connection is closed: the pool would print a traceback of it.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    try:
        app()
    except YardError as why:
        typer.echo(f"weightyard: {why}", err=True)
        sys.exit(why.exit_code)
    except Exception as why:  # noqa: BLE001  everything else is a bug
        traceback.print_exc()  # for the report
        what = " ".join(f"{type(why).__name__}: {why}".split())
        typer.echo(f"weightyard: bug: {what}. Please report all of this", err=True)
        sys.exit(Bug.exit_code)
