"""`weightyard diff`: how two versions differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from weightyard.records import Diff

_FEW = 50


@command
def diff(
    session: Session,
    before: Annotated[str, typer.Argument(metavar="REF", help="The older version.")],
    after: Annotated[str, typer.Argument(metavar="REF", help="The newer version.")],
) -> None:
    """Show which tensors and files were added, removed and changed, and the bytes both share.

    Example: weightyard diff team/bert@v2 team/bert@v3
    """
    from weightyard.cli.refs import resolve

    with session.open() as yard:
        old, new = resolve(yard, before).ref, resolve(yard, after).ref
        found = yard.diff(old, new)
    session.show(
        {"before": old, "after": new, **found.model_dump(mode="json")},
        lambda console: _show(console, old, new, found),
    )


def _show(console: Console, old: str, new: str, found: Diff) -> None:
    from weightyard.cli.wording import count, size

    for sign, what, names in (
        ("+", "tensor", found.tensors_added),
        ("-", "tensor", found.tensors_removed),
        ("~", "tensor", found.tensors_changed),
        ("+", "file", found.files_added),
        ("-", "file", found.files_removed),
        ("~", "file", found.files_changed),
    ):
        _lines(console, sign, what, names)
    share = found.shared_bytes / found.after_bytes if found.after_bytes else 1.0
    console.print(
        f"{old} → {new}: {count(found.tensors_same, 'tensor')} and "
        f"{count(found.files_same, 'file')} are the same. {size(found.shared_bytes)} of "
        f"{size(found.after_bytes)} are shared ({share:.0%}).",
        markup=False,
    )


def _lines(console: Console, sign: str, what: str, names: Sequence[str]) -> None:
    from weightyard.cli.tables import clean

    style = {"+": "green", "-": "red", "~": "yellow"}[sign]
    for name in names[:_FEW]:
        console.print(f"{sign} {what} {clean(name)}", style=style, markup=False)
    if len(names) > _FEW:
        console.print(f"{sign} {len(names) - _FEW} more {what}s (--json lists all)", style=style)
