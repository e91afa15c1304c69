"""`weightyard rm`: take a version out of sight, or a model that has none left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command
from weightyard.errors import Protected

if TYPE_CHECKING:
    from weightyard.records import Version
    from weightyard.yard import Yard

_FEW = 10


@command
def rm(
    session: Session,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="PROJECT/NAME@v3; or a model without versions.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    reason: Annotated[str, typer.Option(metavar="R", help="Why; kept in the audit log.")] = "",
) -> None:
    """Remove a version, or a model that has no versions left. Shows first what that would free.

    The bytes go when `weightyard gc` finds that no version needs them. A version that has an alias,
    or from which others were made, is protected. REF must say which version: a name alone does not
    mean the newest here.

    Examples:

      weightyard rm team/bert@v2

      weightyard rm team/bert@v2 --yes --reason 'trained on the wrong data'

      weightyard rm team/bert
    """
    with session.open() as yard:
        if "@" in ref:
            _remove_version(session, yard, ref, yes, reason)
        else:
            _remove_model(session, yard, ref, yes)


def _remove_model(session: Session, yard: Yard, name: str, yes: bool) -> None:
    from weightyard.cli.refs import find_model
    from weightyard.cli.wording import count

    model = find_model(yard, name)
    if model.versions:
        shown = ", ".join(_named(one) for one in yard.versions(model.name)[:_FEW])
        rest = ", …" if model.versions > _FEW else ""
        raise Protected(
            f"{name} has {count(model.versions, 'version')} ({shown}{rest}): remove each first, "
            f"such as `weightyard rm {name}@v{model.latest}`"
        )
    session.confirm(f"Remove {model.name}? It has no versions.", yes=yes)
    yard.delete_model(model.name)
    session.show(
        {"model": model.name},
        lambda console: console.print(f"Removed {model.name}.", markup=False),
    )


def _named(version: Version) -> str:
    return " ".join([f"v{version.number}", *(f"@{alias}" for alias in version.aliases)])


def _remove_version(session: Session, yard: Yard, ref: str, yes: bool, reason: str) -> None:
    from weightyard.cli.refs import resolve
    from weightyard.cli.wording import size

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
