"""Options: arguments and options that several commands take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import typer

RefArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="REF", help="PROJECT/NAME, with @ALIAS, @v3 or @DIGEST.")
]
Included: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="G", help="Only files that fit, such as '*.safetensors'."),
]
Excluded: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="G", help="Leave out files that fit, such as 'logs/*'.")
]
MetricOption: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="A measured value; may be repeated.")
]
TagOption: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="A label; may be repeated.")
]
MetadataOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="Anything else: V is JSON, or else text; may be repeated."),
]


def pairs(option: str, given: Sequence[str] | None) -> list[tuple[str, str]]:
    """The pairs that were given as K=V."""
    found = []
    for one in given or ():
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{one!r} is not K=V", param_hint=option)
        found.append((key, value))
    return found


def parsed_metrics(given: Sequence[str] | None) -> dict[str, float]:
    return {key: _number(key, value) for key, value in pairs("--metric", given)}


def parsed_metadata(given: Sequence[str] | None) -> dict[str, Any]:
    return {key: _json_or_text(value) for key, value in pairs("--metadata", given)}


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise typer.BadParameter(f"{key}={value}: a metric is a number", param_hint="--metric")
    return number


def _json_or_text(value: str) -> Any:
    from weightyard.transfer.strict_json import strict_json

    try:
        return strict_json(value.encode("utf-8", "surrogatepass"))
    except ValueError:
        return value
