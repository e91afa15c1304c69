"""`weightyard ls`: models or runs, or the versions of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.options import TagOption, pairs
from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from weightyard.records import Model, Version


@command
def ls(
    session: Session,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A model or run, to list its versions; PROJECT/: its models."
        ),
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="List the runs, not the models.")] = False,
    tag: TagOption = None,
) -> None:
    """List the models, or the versions of one, the newest first.

    A run is a model to which a training writes checkpoints, which are its versions.

    Examples:

      weightyard ls

      weightyard ls team/

      weightyard ls team/bert

      weightyard ls team/bert --tag reviewed=yes

      weightyard ls --runs

      weightyard ls team/bert --json
    """
    from weightyard.cli.refs import all_models, all_versions, find_model, version_json
    from weightyard.errors import InvalidName
    from weightyard.names import ModelName

    is_project = name is None or name.endswith("/")
    if runs and not is_project:
        raise typer.BadParameter("--runs lists all runs: leave out NAME, or say PROJECT/")
    wanted = dict(pairs("--tag", tag))
    if wanted and (runs or is_project):
        raise typer.BadParameter("--tag is for the versions of one model: say its NAME")
    project = ModelName(name[:-1], "any").project if name and is_project else None
    if name and "/" not in name:
        project = ModelName(name, "any").project
        raise InvalidName(
            f"{name} is no model, which would be PROJECT/NAME; "
            f"for the models of a project: weightyard ls {project}/"
        )
    with session.open() as yard:
        if runs:
            found = _in_project(all_models(yard, kind="run"), project)
            session.show(
                {"runs": [run.model_dump(mode="json") for run in found]},
                lambda console: _show_runs(console, found, project),
            )
            return
        if name is None or is_project:
            models = _in_project(all_models(yard), project)
            session.show(
                {"models": [model.model_dump(mode="json") for model in models]},
                lambda console: _show_models(console, models, project, session.yard_name()),
            )
            return
        model = find_model(yard, name.partition("@")[0])
        versions = [
            version
            for version in all_versions(yard, ModelName.parse(model.name))
            if wanted.items() <= version.tags.items()
        ]
    session.show(
        {"model": model.name, "versions": [version_json(version) for version in versions]},
        lambda console: _show_versions(console, model, versions, wanted),
    )


def _in_project(models: Iterable[Model], project: str | None) -> list[Model]:
    return [model for model in models if project is None or model.name.startswith(f"{project}/")]


def _show_models(console: Console, models: Sequence[Model], project: str | None, yard: str) -> None:
    from weightyard.cli.tables import clean, moment, table

    if not models:
        # The yard's name shows a slip in it: a folder that was not there is a new yard.
        said = (
            f"No models in project {project} of {yard}" if project else f"No models yet in {yard}"
        )
        push = f"weightyard push FOLDER {project or 'PROJECT'}/NAME"
        console.print(f"{clean(said)}: {push}", markup=False, soft_wrap=True)
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
                moment(console, model.created),
                model.created_by,
            )
            for model in models
        ],
    )


def _show_runs(console: Console, runs: Sequence[Model], project: str | None) -> None:
    from weightyard.cli.tables import moment, table

    if not runs:
        where = f"in {project}" if project else "yet"
        said = f"No runs {where}: a training that saves checkpoints makes one"
        console.print(said, markup=False)
        return
    table(
        console,
        ["run", "versions", "latest", "generation", "aliases", "created", "by"],
        [
            (
                run.name,
                str(run.versions),
                "" if run.latest_step is None else f"step-{run.latest_step}",
                str(run.generation),
                ", ".join(f"{alias}=v{number}" for alias, number in run.aliases.items()),
                moment(console, run.created),
                run.created_by,
            )
            for run in runs
        ],
    )


def _show_versions(
    console: Console, model: Model, versions: Sequence[Version], wanted: Mapping[str, str]
) -> None:
    from weightyard.cli.tables import clean, moment, table
    from weightyard.cli.wording import size

    if not versions:
        said = f"{model.name} has no versions"
        if wanted and model.versions:
            tags = ", ".join(f"{key}={value}" for key, value in wanted.items())
            said = f"No version of {model.name} has the tag{'s' * (len(wanted) > 1)} {tags}"
        console.print(clean(said), markup=False)
        return
    is_run = model.kind == "run"
    table(
        console,
        ["version", *(["step"] if is_run else []), "aliases", "size", "created", "by", "message"],
        [
            (
                f"v{version.number}" + (" (damaged)" if version.damaged else ""),
                *([f"{version.step}"] if is_run else []),
                ", ".join(version.aliases),
                size(version.logical_bytes),
                moment(console, version.created),
                version.author,
                clean(version.message.partition("\n")[0], longest=60),
            )
            for version in versions
        ],
    )
