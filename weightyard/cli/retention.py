"""`weightyard retention`: which versions of a model gc may remove by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from weightyard.records import Retention


@command
def retention(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model: PROJECT/NAME.")],
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest N versions.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="T", help="Keep for so long after the last use: 30d.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Keep everything again.")] = False,
) -> None:
    """Show or set which versions of a model may go; `weightyard gc` removes them.

    A version stays while any rule keeps it. One with an alias, one that others were made from,
    and the newest never go.

    Examples:

      weightyard retention team/bert

      weightyard retention team/bert --keep-last 10 --ttl 30d

      weightyard retention team/bert --off
    """
    from weightyard.cli.refs import find_model
    from weightyard.cli.wording import parse_span
    from weightyard.names import ModelName
    from weightyard.records import Retention

    if off and (keep_last is not None or ttl is not None):
        raise typer.BadParameter("--off stands alone")
    try:
        ttl_s = None if ttl is None else int(parse_span(ttl))
    except ValueError as why:
        raise typer.BadParameter(str(why), param_hint="--ttl") from None
    with session.open() as yard:
        rules = find_model(yard, name).retention
        if off or keep_last is not None or ttl_s is not None:
            rules = None if off else Retention(keep_last=keep_last, ttl_s=ttl_s)
            yard.set_retention(name, rules)
    model = str(ModelName.parse(name))
    result = {"model": model, "retention": rules.model_dump(mode="json") if rules else None}
    session.show(
        result, lambda console: console.print(f"{model}: {_described(rules)}", markup=False)
    )


def _described(rules: Retention | None) -> str:
    from weightyard.cli.wording import span

    if rules is None:
        return "every version stays"
    parts = []
    if rules.keep_last is not None:
        parts.append(f"the newest {rules.keep_last} stay")
    if rules.ttl_s is not None:
        parts.append(f"each stays for {span(rules.ttl_s)} after its last use")
    return " and ".join(parts)
