"""`weightyard check`: does the store have what the catalogue says?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.records import CheckReport, HealReport

_FEW = 50


@command
def check(
    session: Session,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Verify every byte of every replica too.")
    ] = False,
    heal: Annotated[
        bool, typer.Option("--heal", help="Mend what can be mended from other copies.")
    ] = False,
) -> None:
    """Compare the catalogue with the store, and say what to do about what does not fit.

    Finds missing, short, under-replicated and damaged files, files without a row, blocks that lie
    in no pack, records and journal entries that are gone or wait to be written. Removes nothing.
    Exit code 5 if something is found and not healed.

    Examples:

      weightyard check

      weightyard check --read-data --heal
    """
    from weightyard.errors import Damaged
    from weightyard.opening import current_user
    from weightyard.registry.check import bytes_to_check
    from weightyard.registry.check import check as check_yard
    from weightyard.registry.heal import heal as heal_yard

    with session.open() as yard:
        database = yard.registry.database
        with session.progress("Checking", bytes_to_check(database)) as advance:
            report = check_yard(
                database, yard.store, read_data=read_data, who=current_user(), progress=advance
            )
        healed = None
        if heal and report.findings:
            healed = heal_yard(database, yard.store, report, who=current_user())
    result = {
        "clean": report.is_clean,
        **report.model_dump(mode="json"),
        "healing": healed.model_dump(mode="json") if healed is not None else None,
    }
    session.show(result, lambda console: _show(console, report, healed))
    left = healed.left if healed is not None else report.findings
    if left or report.more_findings or (report.damaged_versions and healed is None):
        raise typer.Exit(Damaged.exit_code)


def _show(console: Console, report: CheckReport, healed: HealReport | None) -> None:
    from weightyard.cli.tables import clean
    from weightyard.cli.wording import count, size

    for finding in report.findings[:_FEW]:
        console.print(f"{finding.code}: {clean(finding.subject)}", style="red", markup=False)
        console.print(f"  {clean(finding.detail)}", markup=False)
        console.print(f"  → {clean(finding.advice)}", style="dim", markup=False)
        if finding.versions:
            console.print(f"  needed by {', '.join(finding.versions[:10])}", markup=False)
    more = report.more_findings + max(0, len(report.findings) - _FEW)
    if more:
        console.print(f"and {more} more", markup=False)
    if report.damaged_versions:
        console.print(f"damaged: {', '.join(report.damaged_versions)}", style="red", markup=False)
    read = f", {size(report.read_bytes)} read" if report.read_bytes else ""
    console.print(
        f"{count(report.packs, 'pack')} and {count(report.manifests, 'manifest')} with "
        f"{size(report.stored_bytes)} checked{read}: "
        + ("all is well." if report.is_clean else f"{count(len(report.findings), 'finding')}."),
        markup=False,
    )
    if not report.replicas_named:
        console.print(
            "One replica of each was read: the way bytes are read here does not let one choose.",
            markup=False,
        )
    if healed is not None:
        console.print(
            f"{count(len(healed.healed), 'thing')} healed, {len(healed.left)} left.", markup=False
        )
        if report.more_findings:
            console.print("There were more than fit a report: run it again.", markup=False)
