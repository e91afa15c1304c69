"""Session: the yard that a command works on, and the way the command prints."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weightyard.cli.notices import show_notices
from weightyard.cli.tables import clean
from weightyard.errors import Refused, YardError

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.registry.progress import Step
    from weightyard.settings import Settings
    from weightyard.yard import Yard

_PANEL = "Options of every command"

YardOption = Annotated[
    str | None,
    typer.Option(
        "--yard",
        metavar="URL",
        rich_help_panel=_PANEL,
        help="Service (http://…), store (hdfs://…) or folder. Overrides the environment.",
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        rich_help_panel=_PANEL,
        help="A service's token. Better in WEIGHTYARD_TOKEN, where other users do not see it.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", rich_help_panel=_PANEL, help="Print JSON, for scripts.")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", rich_help_panel=_PANEL, help="Print only what was asked.")
]

_COMMON = {
    "yard": (YardOption, None),
    "token": (TokenOption, None),
    "as_json": (JsonOption, False),
    "quiet": (QuietOption, False),
}


@dataclass(frozen=True, slots=True)
class Session:
    """One run of a command. Results go to stdout; progress, questions and errors to stderr."""

    url: str | None = None
    token: str | None = None
    as_json: bool = False
    quiet: bool = False

    def open(self) -> Yard:
        """Open the yard that the options name, or else the environment."""
        from weightyard.opening import open_yard

        return open_yard(self.url, token=self.token, settings=self.settings())

    def settings(self) -> Settings:
        from weightyard.settings import Settings

        return Settings()

    def yard_name(self) -> str:
        """The URL or folder of the yard that `open` opens."""
        from weightyard.opening import chosen_url, known_name

        settings = self.settings()
        return known_name(chosen_url(self.url, settings), settings)

    def show(self, result: Mapping[str, Any], human: Callable[[Console], None]) -> None:
        """Print a result: as JSON if that was asked for, else for people."""
        if self.as_json:
            text = json.dumps(result, indent=2, ensure_ascii=False, default=str)
            # A surrogate, from a name that is not UTF-8, becomes an escape of JSON: stdout would
            # otherwise write the byte it stands for.
            sys.stdout.write(text.encode(errors="backslashreplace").decode() + "\n")
        else:
            human(console())

    def say(self, line: str) -> None:
        """Print something worth knowing that is not the result."""
        if not self.quiet:
            typer.echo(line, err=True)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something that cannot be undone. Raises Refused where nobody can answer."""
        if yes:
            return
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise Refused(f"{question} There is no terminal to ask on: say --yes to go ahead")
        typer.confirm(question, abort=True, err=True)

    @contextmanager
    def progress(self, doing: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
        """Takes bytes done: shows a bar on a terminal, elsewhere prints a line now and then."""
        if self.quiet or self.as_json:
            yield lambda done_bytes: None
            return
        from weightyard.cli.progress import bar, plain_bytes

        if not sys.stderr.isatty():
            yield plain_bytes(self.say, doing, total_bytes)
            return
        with bar(doing, total_bytes) as advance:
            yield advance

    @contextmanager
    def steps(self) -> Iterator[Callable[[Step], None]]:
        """Takes the steps of a run: shows them on a terminal, else prints a line now and then."""
        if self.quiet or self.as_json:
            yield lambda step: None
            return
        from weightyard.cli.progress import plain_steps, steps

        if not sys.stderr.isatty():
            yield plain_steps(self.say)
            return
        with steps() as tell:
            yield tell


def console() -> Console:
    """Where results go: with colours and the window's width on a terminal, else plain lines."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, no_color=True, width=10_000, soft_wrap=True)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that all commands have, and turns errors into exit codes.

    The function gets a Session first, then its own options. Common options may also be given before
    the command's name (`weightyard --json ls`).
    """

    @functools.wraps(function)
    def run(ctx: typer.Context, **options: Any) -> None:
        given = {name: options.pop(name) for name in _COMMON}
        session = _merged(ctx, given)
        show_notices(wanted=not (session.quiet or session.as_json))
        try:
            function(session, **options)
        except YardError as why:
            fail(why, as_json=session.as_json)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    extra = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in _COMMON.items()
    ]
    context = inspect.Parameter(
        "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    signature = inspect.Signature([context, *own, *extra])
    run.__doc__ = _unwrapped(function.__doc__ or "")
    del run.__wrapped__  # Typer would take its signature, without the common options
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    return run


def _unwrapped(text: str) -> str:
    """A docstring with one line for each paragraph: Typer would keep the source's line ends."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(re.sub(r"\n(?! )", " ", one) for one in paragraphs)


def fail(why: YardError, *, as_json: bool) -> NoReturn:
    """Say what went wrong in one line on stderr, and leave with the error's exit code."""
    message = " ".join(str(why).split())
    if as_json:
        line = json.dumps({"error": why.code, "message": message}, ensure_ascii=False)
    else:
        line = f"weightyard: {clean(message)}"
    typer.echo(line, err=True)
    raise typer.Exit(why.exit_code)


def _merged(ctx: typer.Context, given: Mapping[str, Any]) -> Session:
    before = ctx.find_root().obj
    session = before if isinstance(before, Session) else Session()
    return replace(
        session,
        url=session.url if given["yard"] is None else given["yard"],
        token=given["token"] or session.token,
        as_json=given["as_json"] or session.as_json,
        quiet=given["quiet"] or session.quiet,
    )
