"""`weightyard retention`: which versions of a model gc may remove by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from weightyard.records import KeepBest, Retention


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
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of a run: keep steps that are multiples of N."),
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:MODE:N", help="Keep the N best by a metric; MODE is min or max."
        ),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Keep everything again.")] = False,
) -> None:
    """Show or set which versions of a model may go; `weightyard gc` removes them.

    A version stays while any rule keeps it. Versions that have an alias, or from which others were
    made, and the newest one never go.

    Examples:

      weightyard retention team/bert

      weightyard retention team/bert --keep-last 10 --ttl 30d

      weightyard retention team/run42 --keep-every 1000 --keep-best loss:min:2

      weightyard retention team/bert --off
    """
    from pydantic import ValidationError

    from weightyard.cli.refs import find_model
    from weightyard.cli.wording import parse_span
    from weightyard.names import ModelName
    from weightyard.records import Retention

    try:
        ttl_s = None if ttl is None else int(parse_span(ttl))
    except ValueError as why:
        raise typer.BadParameter(str(why), param_hint="--ttl") from None
    best = None if keep_best is None else _best(keep_best)
    try:
        wanted = Retention(keep_last=keep_last, ttl_s=ttl_s, keep_every=keep_every, keep_best=best)
    except ValidationError as why:
        first = why.errors()[0]
        raise typer.BadParameter(f"{first['loc'][0]}: {first['msg']}") from None
    says_something = wanted != Retention()
    if off and says_something:
        raise typer.BadParameter("--off goes with no other rule")
    with session.open() as yard:
        rules = find_model(yard, name).retention
        if off or says_something:
            rules = None if off else wanted
            yard.set_retention(name, rules)
    model = str(ModelName.parse(name))
    result = {"model": model, "retention": rules.model_dump(mode="json") if rules else None}
    session.show(
        result, lambda console: console.print(f"{model}: {_described(rules)}", markup=False)
    )


def _best(text: str) -> KeepBest:
    from pydantic import ValidationError

    from weightyard.records import KeepBest

    metric, mode, count = ["", "", "", *text.rsplit(":", 2)][-3:]
    try:
        return KeepBest.model_validate({"metric": metric, "mode": mode, "count": count})
    except ValidationError:
        raise typer.BadParameter(
            "say a metric, min or max, and how many: loss:min:3", param_hint="--keep-best"
        ) from None


def _described(rules: Retention | None) -> str:
    from weightyard.cli.wording import span

    if rules is None:
        return "every version stays"
    parts = []
    if rules.keep_last is not None:
        parts.append(f"the newest {rules.keep_last} stay")
    if rules.ttl_s is not None:
        parts.append(f"each stays for {span(rules.ttl_s)} after its last use")
    if rules.keep_every is not None:
        parts.append(f"every step that is a multiple of {rules.keep_every} stays")
    if (best := rules.keep_best) is not None:
        how = "lowest" if best.mode == "min" else "highest"
        parts.append(f"the {best.count} with the {how} {best.metric} stay")
    return " and ".join(parts)
