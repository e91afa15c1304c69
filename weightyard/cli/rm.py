"""`weightyard rm`: take a version out of sight."""

from __future__ import annotations

from typing import Annotated

import typer

from weightyard.cli.session import Session, command
from weightyard.errors import Protected, Refused


@command
def rm(
    session: Session,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="PROJECT/NAME@v3: which version is not guessed.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    reason: Annotated[str, typer.Option(metavar="R", help="Why; kept in the audit log.")] = "",
) -> None:
    """Remove a version. Shows first what that would free.

    The bytes go when `weightyard gc` finds that no version needs them. A version with an alias,
    or that others were made from, is protected.

    Examples:

      weightyard rm team/bert@v2

      weightyard rm team/bert@v2 --yes --reason 'trained on the wrong data'
    """
    from weightyard.cli.refs import resolve
    from weightyard.cli.wording import size

    if "@" not in ref:
        raise Refused(f"which version of {ref}? Say {ref}@v3; `weightyard ls {ref}` lists them")
    with session.open() as yard:
        version = resolve(yard, ref)
        if version.aliases:
            held = ", ".join(version.aliases)
            raise Protected(f"{version.ref}: alias {held} is on it: move or remove the alias first")
        cost = yard.cost(version.ref)
        session.confirm(
            f"Remove {version.ref}? It has {size(version.logical_bytes)}, and "
            f"{size(cost.unique_stored_bytes)} in the store that no other version needs.",
            yes=yes,
        )
        removed = yard.delete(version.ref, reason=reason)
    result = {
        "ref": removed.ref,
        "version": removed.number,
        "digest": removed.digest,
        "logical_bytes": removed.logical_bytes,
        "freed_bytes": cost.unique_stored_bytes,
    }
    session.show(
        result,
        lambda console: console.print(
            f"Removed {removed.ref}. `weightyard gc` will free "
            f"{size(cost.unique_stored_bytes)} when the grace time is over.",
            markup=False,
        ),
    )
