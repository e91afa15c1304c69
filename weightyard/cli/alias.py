"""`weightyard alias`: names that move, with their history."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command
from weightyard.names import ModelName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from weightyard.records import AliasMove

app = typer.Typer(
    help="Names that move from version to version, with every move kept.", no_args_is_help=True
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The model: PROJECT/NAME.")]
_Alias = Annotated[str, typer.Argument(metavar="ALIAS", help="Such as prod.")]
_Reason = Annotated[str, typer.Option(metavar="R", help="Why; kept in the history.")]
_Expect = Annotated[
    str | None,
    typer.Option(metavar="V", help="Only if it is on this version now; 'none': if there is none."),
]


@app.command("set")
@command
def set_(
    session: Session,
    name: _Name,
    alias: _Alias,
    version: Annotated[
        str,
        typer.Argument(metavar="VERSION", help="3, v3, latest, a digest, another alias, or a ref."),
    ],
    reason: _Reason = "",
    expect: _Expect = None,
) -> None:
    """Put an alias on a version.

    If there is no such alias yet, it is made; if it is on another version, it is moved.

    Examples:

      weightyard alias set team/bert prod v3 --reason 'better on the eval set'

      weightyard alias set team/bert prod 4 --expect 3
    """
    from weightyard.cli.refs import resolve

    expected = _expected(expect)
    with session.open() as yard:
        to = resolve(yard, _ref(name, version)).number
        moved = yard.set_alias(name, alias, to, reason=reason, expect=expected)
    _show_move(session, moved)


@app.command()
@command
def log(
    session: Session,
    name: _Name,
    alias: _Alias,
    as_of: Annotated[
        datetime | None,
        typer.Option("--as-of", help="Only moves up to then (UTC); the first was in force."),
    ] = None,
) -> None:
    """Show where an alias was, when, by whom and why.

    Every move is kept; the newest comes first.

    Examples:

      weightyard alias log team/bert prod

      weightyard alias log team/bert prod --as-of 2026-11-01T12:00:00
    """
    from weightyard.cli.refs import find_model

    until = as_of.replace(tzinfo=UTC) if as_of is not None else None
    with session.open() as yard:
        find_model(yard, name)
        moves = yard.alias_log(name, alias, as_of=until)
    nothing = f"{name} never had the alias {alias}"
    if until is not None:
        nothing = f"{name} had no alias {alias} by {until:%Y-%m-%d %H:%M %Z}"
    session.show(
        {"model": name, "alias": alias, "moves": [move.model_dump(mode="json") for move in moves]},
        lambda console: _show_log(console, nothing, moves),
    )


@app.command()
@command
def rollback(session: Session, name: _Name, alias: _Alias, reason: _Reason = "") -> None:
    """Put an alias back on the version it was on before; repeated, it goes one further back.

    A version that was left by going back, by this or by `alias set`, does not count any more: a
    rollback never goes forward to it. `alias log` shows all moves.

    Example: weightyard alias rollback team/bert prod --reason 'latency'
    """
    from weightyard.cli.refs import find_model

    with session.open() as yard:
        find_model(yard, name)
        moved = yard.rollback_alias(name, alias, reason=reason)
    _show_move(session, moved)


@app.command()
@command
def rm(
    session: Session, name: _Name, alias: _Alias, reason: _Reason = "", expect: _Expect = None
) -> None:
    """Remove an alias. The version stays, and so does the history.

    Example: weightyard alias rm team/bert canary
    """
    from weightyard.cli.refs import find_model

    expected = _expected(expect)
    with session.open() as yard:
        find_model(yard, name)
        moved = yard.set_alias(name, alias, None, reason=reason, expect=expected)
    _show_move(session, moved)


def _ref(name: str, version: str) -> str:
    """The ref of a model's version, which may be given as a ref of that model."""
    model = ModelName.parse(name)
    selector = version.removeprefix(f"{model}@")
    if "/" in selector:
        raise typer.BadParameter(f"{version} is no version of {model}", param_hint="VERSION")
    return f"{model}@v{selector}" if selector.isdecimal() else f"{model}@{selector}"


def _expected(text: str | None) -> int | None:
    if text is None:
        return None
    if text == "none":
        return 0
    number = text.removeprefix("v")
    if not number.isdecimal():
        raise typer.BadParameter(f"{text!r} is no version: write v3, 3 or none")
    return int(number)


def _show_move(session: Session, moved: AliasMove) -> None:
    from weightyard.cli.tables import clean

    if moved.after is None:
        said = f"{moved.model}@{moved.alias} is removed; it was on v{moved.before}"
    elif moved.before is None:
        said = f"{moved.model}@{moved.alias} is on v{moved.after}"
    elif moved.before == moved.after:
        said = f"{moved.model}@{moved.alias} was on v{moved.after} already"
    else:
        said = f"{moved.model}@{moved.alias} is on v{moved.after}; it was on v{moved.before}"
    session.show(
        moved.model_dump(mode="json"), lambda console: console.print(clean(said), markup=False)
    )


def _show_log(console: Console, nothing: str, moves: Sequence[AliasMove]) -> None:
    from weightyard.cli.tables import exact_moment, table

    if not moves:
        console.print(nothing, markup=False)
        return
    table(
        console,
        ["when", "from", "to", "by", "reason"],
        [
            (
                exact_moment(console, move.at),
                f"v{move.before}" if move.before else "",
                f"v{move.after}" if move.after else "removed",
                move.who,
                move.reason,
            )
            for move in moves
        ],
    )
