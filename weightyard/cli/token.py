"""`weightyard token`: make, list and revoke the tokens of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Protocol, cast

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from weightyard.names import TokenName
    from weightyard.records import NewToken, Role, Token
    from weightyard.yard import Yard


class _Keeper(Protocol):
    """What keeps tokens: a registry, or a service in front of one."""

    def create_token(self, name: TokenName, role: Role, projects: Sequence[str]) -> NewToken: ...

    def tokens(self, *, after: TokenName | None, limit: int) -> Sequence[Token]: ...

    def revoke_token(self, name: TokenName) -> Token: ...


_PAGE = 1000

app = typer.Typer(
    help="Whom the service lets in: tokens with a role and projects.", no_args_is_help=True
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="What the token is for.")]


@app.command()
@command
def create(
    session: Session,
    name: _Name,
    role: Annotated[str, typer.Option(metavar="read|write|admin", help="What it may do.")] = "read",
    project: Annotated[
        list[str] | None,
        typer.Option(metavar="P", help="A project it is for; may be repeated. Default: all."),
    ] = None,
) -> None:
    """Make a token.

    Its secret is shown this once; the yard keeps only a hash of it.

    Examples:

      weightyard token create nightly-ci --role write --project team

      export WEIGHTYARD_TOKEN=$(weightyard token create laptop -q)
    """
    from weightyard.names import TokenName
    from weightyard.records import EVERY_PROJECT, Role

    if role not in tuple(Role):
        raise typer.BadParameter(f"{role!r}: read, write or admin", param_hint="--role")
    with session.open() as yard:
        keeper = _keeper(yard)
        is_first = not keeper.tokens(after=None, limit=1)
        made = keeper.create_token(TokenName(name), Role(role), project or [EVERY_PROJECT])
    if is_first:
        session.say(_closes_the_service(made))
    session.show(
        made.model_dump(mode="json"), lambda console: _show_new(console, made, session.quiet)
    )


@app.command()
@command
def ls(session: Session) -> None:
    """List the tokens, without their secrets.

    Example: weightyard token ls
    """
    with session.open() as yard:
        tokens = [*_all(_keeper(yard))]
    session.show(
        {"tokens": [token.model_dump(mode="json") for token in tokens]},
        lambda console: _show(console, tokens),
    )


@app.command()
@command
def revoke(session: Session, name: _Name) -> None:
    """End a token, for good.

    Example: weightyard token revoke nightly-ci
    """
    from weightyard.names import TokenName

    with session.open() as yard:
        ended = _keeper(yard).revoke_token(TokenName(name))
    session.show(
        ended.model_dump(mode="json"),
        lambda console: console.print(f"Token {ended.name} is revoked", markup=False),
    )


def _all(keeper: _Keeper) -> Iterator[Token]:
    """Every token, page by page."""
    from weightyard.names import TokenName

    after: TokenName | None = None
    while page := keeper.tokens(after=after, limit=_PAGE):
        yield from page
        after = TokenName(page[-1].name)


def _keeper(yard: Yard) -> _Keeper:
    return cast(_Keeper, yard.catalogue)


def _closes_the_service(first: NewToken) -> str:
    from weightyard.records import EVERY_PROJECT, Role

    said = "From now on a service of this yard asks everyone for a token."
    if first.role is not Role.ADMIN or EVERY_PROJECT not in first.projects:
        said += (
            " This one cannot make others: with the yard's store and database, and not its "
            "service, weightyard token create NAME --role admin makes one that can."
        )
    return said


def _show_new(console: Console, made: NewToken, quiet: bool) -> None:
    if not quiet:
        console.print(
            f"Token {made.name}: {made.role} in {_projects(made)}. Keep it: it is not shown again.",
            markup=False,
        )
    console.print(made.secret, markup=False)


def _show(console: Console, tokens: Sequence[Token]) -> None:
    from weightyard.cli.tables import moment, table

    if not tokens:
        console.print("No tokens yet: weightyard token create NAME", markup=False)
        return
    table(
        console,
        ["token", "role", "projects", "created", "last used", "revoked"],
        [
            (
                token.name,
                token.role,
                _projects(token),
                moment(console, token.created),
                moment(console, token.last_used),
                moment(console, token.revoked) if token.revoked else "",
            )
            for token in tokens
        ],
    )


def _projects(token: Token) -> str:
    return "every project" if "*" in token.projects else ", ".join(token.projects)
