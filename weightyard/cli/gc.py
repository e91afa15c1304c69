"""`weightyard gc`: remove what no version needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.records import GcReport

_FEW = 50


@command
def gc(
    session: Session,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go, and why; change nothing.")
    ] = False,
    grace: Annotated[
        str, typer.Option(metavar="T", help="How long to keep what nobody needs: 7d, 36h, 0s.")
    ] = "7d",
    unsafe_grace: Annotated[
        bool, typer.Option("--unsafe-grace", help="Allow a grace under a day on a shared yard.")
    ] = False,
) -> None:
    """Remove what no version needs: in two steps, safe beside pushes and loads.

    First packs are condemned; when the grace is over they go. Small packs are merged and mostly
    dead ones written anew. Versions that a model's retention lets go are removed first.

    Examples:

      weightyard gc --dry-run

      weightyard gc --grace 36h
    """
    from weightyard.cli.wording import parse_span
    from weightyard.registry.collect import GcOptions
    from weightyard.transfer.durable import least_replicas

    try:
        grace_s = parse_span(grace)
    except ValueError as why:
        raise typer.BadParameter(str(why), param_hint="--grace") from None
    with session.open() as yard:
        registry = yard.registry  # first: says what to do where a service is in between
        options = GcOptions(
            grace_s=grace_s,
            unsafe_grace=unsafe_grace,
            embedded=yard.is_embedded,
            min_replicas=least_replicas(yard.store, None),
        )
        with session.steps() as tell:
            report = registry.gc(yard.store, options, dry_run=dry_run, progress=tell)
    session.show(report.model_dump(mode="json"), lambda console: _show(console, report))


def _show(console: Console, report: GcReport) -> None:
    from weightyard.cli.tables import clean, table
    from weightyard.cli.wording import count, size, span

    if report.items:
        table(
            console,
            ["what", "bytes", "why"],
            [
                (f"{item.kind} {item.name}", size(item.bytes), item.why)
                for item in report.items[:_FEW]
            ],
        )
        if report.items_in_all > _FEW:
            console.print(f"and {report.items_in_all - _FEW} more", markup=False)
    would = "would be " if report.dry_run else ""
    lines = [
        (
            report.versions_removed,
            f"{count(report.versions_removed, 'version')} {would}removed by retention",
        ),
        (
            report.packs_condemned,
            f"{count(report.packs_condemned, 'pack')} {would}condemned "
            f"({size(report.condemned_bytes)}), to be deleted by a gc after the grace of "
            f"{span(report.grace_s)}",
        ),
        (
            report.packs_waiting,
            f"{count(report.packs_waiting, 'pack')} waiting for the grace to be over "
            f"({size(report.waiting_bytes)})",
        ),
        (report.packs_rewritten, f"{count(report.packs_rewritten, 'pack')} {would}written anew"),
        (
            report.packs_deleted + report.manifests_deleted,
            f"{count(report.packs_deleted, 'pack')} and "
            f"{count(report.manifests_deleted, 'manifest')} {would}deleted: "
            f"{size(report.deleted_bytes)} freed",
        ),
        (
            report.unfinished_removed + report.staged_removed,
            f"{count(report.unfinished_removed + report.staged_removed, 'file')} of writers that "
            f"gave up {would}removed",
        ),
    ]
    said = [line for amount, line in lines if amount]
    nothing = "Nothing to collect."
    if not report.dry_run:  # only a dry run counts what is condemned and waits
        nothing = "Nothing to collect now; `gc --dry-run` shows what waits for its grace."
    for line in said or [nothing]:
        console.print(line, markup=False)
    for line in report.failed[:_FEW]:
        console.print(f"not done: {clean(line)}", style="red", markup=False)
