"""`weightyard annotate`: change what is said of a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from weightyard.cli.options import (
    MetadataOption,
    MetricOption,
    RefArgument,
    TagOption,
    pairs,
    parsed_metadata,
    parsed_metrics,
)
from weightyard.cli.session import Session, command


@command
def annotate(
    session: Session,
    ref: RefArgument,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="What is new, in place of what was said.")
    ] = None,
    metric: MetricOption = None,
    tag: TagOption = None,
    metadata: MetadataOption = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(metavar="K", help="Take away what is said of K; may be repeated."),
    ] = None,
) -> None:
    """Change what is said of a version: its message, metrics, tags and metadata.

    What is given is set, or with --remove taken away; the rest stays. Its content never changes.

    Examples:

      weightyard annotate team/bert@v3 --tag reviewed=yes --metric f1=0.91

      weightyard annotate team/bert@prod -m 'all data' --metadata rows=87599

      weightyard annotate team/bert@v3 --remove reviewed
    """
    from weightyard.cli.refs import resolve, version_json

    gone = dict.fromkeys(remove or ())
    said: dict[str, Mapping[str, Any]] = {
        "metrics": gone | parsed_metrics(metric),
        "tags": gone | dict(pairs("--tag", tag)),
        "metadata": gone | parsed_metadata(metadata),
    }
    if message is None and not any(said.values()):
        raise typer.BadParameter("say --message, --metric, --tag, --metadata or --remove")
    with session.open() as yard:
        version = yard.annotate(resolve(yard, ref).ref, message=message, **said)
    session.show(
        version_json(version),
        lambda console: console.print(f"{version.ref} is annotated", markup=False),
    )
