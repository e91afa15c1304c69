"""`weightyard doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.doctor import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@command
def doctor(session: Session) -> None:
    """Look at everything a yard needs; say what to do where something is wrong.

    It looks at HDFS and which way bytes come from it, encryption, permissions, Kerberos, clocks,
    versions, database, and who can read the weights. Exit code 1 if something fails.

    Examples:

      weightyard doctor

      weightyard --yard hdfs://cluster/weightyard doctor --json
    """
    from weightyard.cli.session import console
    from weightyard.doctor import examine

    findings: list[Finding] = []
    shown = None if session.as_json else console()
    for finding in examine(session.url, token=session.token, settings=session.settings()):
        findings.append(finding)
        if shown is not None and not (session.quiet and finding.state == "ok"):
            _show(shown, finding)
    failed = sum(finding.state == "fail" for finding in findings)
    warned = sum(finding.state == "warn" for finding in findings)
    if shown is None:
        result = {
            "ok": not failed,
            "findings": [finding.model_dump(mode="json") for finding in findings],
        }
        session.show(result, lambda console: None)
    elif not session.quiet:
        said = "All is well" if not failed else f"{failed} of these must be mended"
        shown.print(f"{said}{f'; {warned} to think about' if warned else ''}.", markup=False)
    if failed:
        raise typer.Exit(1)


def _show(console: Console, finding: Finding) -> None:
    from rich.text import Text

    from weightyard.cli.tables import clean

    line = Text(f"{finding.state:4}  ", style=_STYLES[finding.state])
    line.append(f"{finding.check}: {clean(finding.message)}", style="default")
    console.print(line)
    if finding.advice:
        console.print(Text(f"      → {clean(finding.advice)}", style="dim"))
