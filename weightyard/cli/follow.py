"""`weightyard follow`: run a command whenever a ref means another version."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.ending import LOOK_S, ended_by_signals, require_going_on
from weightyard.cli.session import Session, command
from weightyard.errors import NoSuchThing, Refused, Unsupported, YardError

if TYPE_CHECKING:
    from weightyard.records import Version
    from weightyard.storage.cancel import Cancel
    from weightyard.yard import Yard

_STDERR = 2

_PATIENCE_S = 10.0
"""How long a command may take to end when it is told to."""


@command
def follow(
    session: Session,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="PROJECT/NAME@ALIAS, or PROJECT/NAME: the newest.")
    ],
    exec_: Annotated[
        str,
        typer.Option("--exec", metavar="CMD", help="A program and its arguments, without a shell."),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Run it once, and end with its exit code.")
    ] = False,
    poll: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0.1,
            max=3600,
            help="Seconds between looks where no service tells. Default: WEIGHTYARD_POLL_S.",
        ),
    ] = None,
    snapshot: Annotated[
        bool, typer.Option(help="Have the version's files on this node first.")
    ] = True,
) -> None:
    """Run a command for the version a ref means now, and again whenever it means another one.

    The command finds WEIGHTYARD_REF (such as team/bert@v3), WEIGHTYARD_VERSION (3),
    WEIGHTYARD_DIGEST and WEIGHTYARD_PATH (a folder with the version's files, which stays until the
    command has run for a later version) in its environment. If it fails, that is said, and the
    following goes on. If the ref moves while the command runs, only the last move counts.

    Examples:

      weightyard follow team/bert@prod --exec 'systemctl reload bert-server'

      weightyard follow team/bert@prod --once --exec ./deploy.sh
    """
    from weightyard.storage.cancel import Cancel

    words = _words(exec_)
    poll_s = session.settings().poll_s if poll is None else poll
    last = ""
    stop = Cancel()
    with session.open() as yard, ended_by_signals(stop), ExitStack() as in_use:
        for version in _seen(session, yard, ref, poll_s, stop):
            if version.ref == last:
                continue
            with ExitStack() as taken:
                found = _found(version)
                try:
                    if snapshot:
                        found |= _files(session, version, taken)
                except YardError as why:
                    if once:
                        raise
                    session.say(f"{version.ref}: {why}: trying again")
                    continue
                code = _run(session, words, version, found)
                if once:
                    raise typer.Exit(code)
                last = version.ref
                in_use.close()  # the files of the version before
                in_use.enter_context(taken.pop_all())


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError as why:
        raise Refused(f"--exec {line!r}: {why}") from None
    if not words or shutil.which(words[0]) is None:
        raise Refused(f"--exec {line!r}: there is no such program; for a script: --exec 'sh FILE'")
    return words


def _seen(session: Session, yard: Yard, ref: str, poll_s: float, stop: Cancel) -> Iterator[Version]:
    """The version a ref means, whenever it may have moved. Waits while it means nothing.

    Raises Refused if it never can.
    """
    from weightyard.names import Ref

    told = ""
    for seen in yard.catalogue.watch(Ref.parse(ref), poll_s=poll_s, stop=stop):
        require_going_on()
        if not isinstance(seen, YardError):
            told = ""
            yield seen
        elif isinstance(seen, Refused) and not isinstance(seen, NoSuchThing):
            raise seen
        elif told != seen.code:
            if isinstance(seen, NoSuchThing):
                session.say(f"waiting until {ref} is there: {_with_near(yard, ref, seen)}")
            else:
                session.say(f"{ref}: {seen}: waiting")
            told = seen.code
    require_going_on()


def _with_near(yard: Yard, ref: str, why: YardError) -> str:
    """Why a ref means nothing, and what is near, as it may have been mistyped."""
    from weightyard.cli.refs import resolve

    try:
        resolve(yard, ref)
    except YardError as said:
        return str(said)
    return str(why)


def _found(version: Version) -> dict[str, str]:
    """What the command finds in its environment."""
    return {
        "WEIGHTYARD_REF": version.ref,
        "WEIGHTYARD_VERSION": str(version.number),
        "WEIGHTYARD_DIGEST": version.digest,
    }


def _files(session: Session, version: Version, taken: ExitStack) -> dict[str, str]:
    """A snapshot's folder, for as long as `taken` is open; nothing if there can be none."""
    # A yard of its own: it holds the snapshot until it is closed.
    files = taken.enter_context(session.open())
    try:
        return {"WEIGHTYARD_PATH": str(files.snapshot(version.ref))}
    except Unsupported as why:
        session.say(f"{version.ref}: {why}: running without WEIGHTYARD_PATH")
        return {}


def _code_of(process: subprocess.Popen[bytes]) -> int:
    """A process's code, when it has ended. Raises SystemExit if a signal said to end."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_S)
        require_going_on()


def _run(session: Session, words: Sequence[str], version: Version, found: Mapping[str, str]) -> int:
    """Run the command to its end; if we are ended before, it is ended too. Returns its code."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            words,
            env={**os.environ, **found},
            stdin=subprocess.DEVNULL,
            stdout=_STDERR if session.as_json else None,
        )
    except OSError as why:
        raise Refused(f"--exec {words[0]}: {why.strerror}") from None
    try:
        code = _code_of(process)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    code = code if code >= 0 else 128 - code  # ended by a signal: the code that shells give
    seconds = time.monotonic() - began
    if session.as_json:
        told = {
            "ref": version.ref,
            "version": version.number,
            "digest": version.digest,
            "path": found.get("WEIGHTYARD_PATH"),
            "exit_code": code,
            "seconds": round(seconds, 3),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    else:
        session.say(f"{version.ref}: the command ended with {code} after {seconds:.1f} s")
    return code
