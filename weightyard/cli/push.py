"""`weightyard push`: publish a folder as the next version of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weightyard.cli.options import (
    Excluded,
    Included,
    MetadataOption,
    MetricOption,
    TagOption,
    pairs,
    parsed_metadata,
    parsed_metrics,
)
from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.records import Pushed, PushPlan


@command
def push(
    session: Session,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A folder or a file; also hdfs://CLUSTER/FOLDER.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model: PROJECT/NAME.")],
    alias: Annotated[
        str | None, typer.Option(metavar="A", help="Put this alias on the new version.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option(metavar="REF", help="The version it was made from.")
    ] = None,
    message: Annotated[str, typer.Option("--message", "-m", help="What is new.")] = "",
    metric: MetricOption = None,
    tag: TagOption = None,
    metadata: MetadataOption = None,
    include: Included = None,
    exclude: Excluded = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Take a link to a file for that file.")
    ] = False,
    rehash: Annotated[
        bool, typer.Option("--rehash", help="Read files although they have not changed.")
    ] = False,
    replication: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=512, help="Copies in HDFS.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="P", help="HDFS storage policy, such as ALL_SSD.")
    ] = None,
    codec: Annotated[
        Literal["auto", "raw"], typer.Option(help="raw: store without compression.")
    ] = "auto",
    delta: Annotated[
        Literal["off", "also", "only"],
        typer.Option(
            help="Store what differs from --parent: in place of (only), or beside (also) "
            "whole blocks."
        ),
    ] = "off",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")
    ] = False,
) -> None:
    """Publish a folder as the next version of a model.

    What the store has already is not sent again: a push that was interrupted goes on where it
    stopped. Files that have not changed since they were pushed from this host are not even read.
    Nothing is visible before all of it is.

    Examples:

      weightyard push ./model team/bert --alias prod -m 'first try'

      weightyard push ./tuned team/bert --parent team/bert@prod --metric f1=0.93

      weightyard push ./model team/bert --tag task=qa --metadata rows=87599

      weightyard push hdfs://cluster/bert team/bert --include '*.safetensors'

      weightyard push models--bert/snapshots/1a2b team/bert --follow-links

      weightyard push ./model team/bert --dry-run
    """
    from weightyard.names import AliasName, ModelName

    model = ModelName.parse(name)
    if alias is not None:
        AliasName(alias)
    metrics = parsed_metrics(metric)
    tags = dict(pairs("--tag", tag))
    said = parsed_metadata(metadata)
    if delta != "off" and parent is None:
        raise typer.BadParameter(f"--delta {delta} needs --parent: the version to compare with")
    with session.open() as yard:
        if parent is not None:
            from weightyard.cli.refs import resolve

            parent = resolve(yard, parent).ref
        with yard.gather(
            path, include=include, exclude=exclude, follow_links=follow_links, rehash=rehash
        ) as gathered:
            if dry_run:
                with session.progress("Reading", gathered.logical_bytes) as advance:
                    plan = yard.preview(gathered, name, advance)
                result = {"model": str(model), **plan.model_dump(mode="json")}
                session.show(result, lambda console: _show_plan(console, str(model), plan))
                return
            with session.progress("Pushing", gathered.logical_bytes) as advance:
                pushed = yard.push(
                    gathered,
                    name,
                    alias=alias,
                    parent=parent,
                    message=message,
                    metrics=metrics,
                    tags=tags,
                    metadata=said,
                    replication=replication,
                    policy=policy,
                    codec=codec,
                    delta=delta,
                    progress=advance,
                )
    from weightyard.cli.refs import version_json

    session.show(version_json(pushed), lambda console: _show(console, pushed, quiet=session.quiet))


def _show(console: Console, pushed: Pushed, *, quiet: bool) -> None:
    from weightyard.cli.tables import facts
    from weightyard.cli.wording import count, size

    if quiet:
        console.print(pushed.ref, markup=False)
        return
    where = f" (alias {', '.join(pushed.aliases)})" if pushed.aliases else ""
    console.print(f"Published {pushed.ref}{where}", markup=False)
    new = size(pushed.new_bytes) if pushed.new_bytes else "nothing: the store had all of it"
    facts(
        console,
        [
            ("size", f"{size(pushed.logical_bytes)} in {count(pushed.files, 'file')}"),
            ("new", new),
            (
                "stored",
                f"{size(pushed.stored_bytes)} in {count(pushed.packs_written, 'pack')}"
                if pushed.packs_written
                else "",
            ),
            ("digest", pushed.digest),
        ],
    )


def _show_plan(console: Console, model: str, plan: PushPlan) -> None:
    from weightyard.cli.tables import table
    from weightyard.cli.wording import count, size

    table(
        console,
        ["file", "size", "new"],
        [(file.path, size(file.bytes), size(file.new_bytes)) for file in plan.files],
    )
    console.print(
        f"{model} would get {size(plan.logical_bytes)}, of which {size(plan.new_bytes)} "
        f"({count(plan.blocks_new, 'block')}) are new to the store. Nothing was sent.",
        markup=False,
    )
