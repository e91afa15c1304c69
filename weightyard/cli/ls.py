"""`weightyard ls`: models, or the versions of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from weightyard.records import Model, Version


@command
def ls(
    session: Session,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A model, to list its versions.")
    ] = None,
) -> None:
    """List the models, or the versions of one, the newest first.

    Examples:

      weightyard ls

      weightyard ls team/bert

      weightyard ls team/bert --json
    """
    from weightyard.cli.refs import all_models, all_versions, find_model, version_json
    from weightyard.names import ModelName

    with session.open() as yard:
        if name is None:
            models = list(all_models(yard))
            session.show(
                {"models": [model.model_dump(mode="json") for model in models]},
                lambda console: _show_models(console, models),
            )
            return
        model = find_model(yard, name.partition("@")[0])
        versions = list(all_versions(yard, ModelName.parse(model.name)))
    session.show(
        {"model": model.name, "versions": [version_json(version) for version in versions]},
        lambda console: _show_versions(console, model, versions),
    )


def _show_models(console: Console, models: Sequence[Model]) -> None:
    from weightyard.cli.tables import table
    from weightyard.cli.wording import when

    if not models:
        console.print("No models yet: weightyard push FOLDER PROJECT/NAME", markup=False)
        return
    table(
        console,
        ["model", "versions", "latest", "aliases", "created", "by"],
        [
            (
                model.name,
                str(model.versions),
                f"v{model.latest}" if model.latest else "",
                ", ".join(f"{alias}=v{number}" for alias, number in model.aliases.items()),
                when(model.created),
                model.created_by,
            )
            for model in models
        ],
    )


def _show_versions(console: Console, model: Model, versions: Sequence[Version]) -> None:
    from weightyard.cli.tables import clean, table
    from weightyard.cli.wording import size, when

    if not versions:
        console.print(f"{model.name} has no versions", markup=False)
        return
    table(
        console,
        ["version", "aliases", "size", "created", "by", "message"],
        [
            (
                f"v{version.number}" + (" (damaged)" if version.damaged else ""),
                ", ".join(version.aliases),
                size(version.logical_bytes),
                when(version.created),
                version.author,
                clean(version.message.partition("\n")[0], longest=60),
            )
            for version in versions
        ],
    )
