"""`weightyard rebuild`: a registry made from a store alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.records import RebuildReport

_FEW = 20


@command
def rebuild(
    session: Session,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Take over a store that belongs to another registry."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Fill an empty database from a store: versions, numbers, aliases and their history.

    Tokens, quotas and the audit log are not in a store, and do not come back. The database to
    which the store belonged so far is refused from then on.

    Examples:

      WEIGHTYARD_DB=postgresql://db/new weightyard --yard hdfs://c/yard rebuild

      weightyard --yard /backup/yard rebuild --adopt
    """
    from weightyard.cli.db import opened_database
    from weightyard.opening import current_user, store_url
    from weightyard.registry.rebuild import rebuild as rebuild_registry
    from weightyard.storage.opening import open_store

    settings = session.settings()
    with (
        open_store(store_url(session.url, settings), settings) as store,
        opened_database(session, None) as database,
    ):
        session.confirm(
            f"Rebuild {database.shown} from {store.url}? The store's database until now can "
            "then no longer be used.",
            yes=yes,
        )
        report = rebuild_registry(store, database, adopt=adopt, who=current_user())
    session.show(report.model_dump(mode="json"), lambda console: _show(console, report))


def _show(console: Console, report: RebuildReport) -> None:
    from weightyard.cli.tables import clean
    from weightyard.cli.wording import count

    console.print(
        f"{count(report.models, 'model')}, {count(report.versions, 'version')} and "
        f"{count(report.alias_moves, 'alias move')} are back, from {count(report.packs, 'pack')} "
        f"with {count(report.blocks, 'block')}.",
        markup=False,
    )
    for title, lines in (
        ("Damaged: their content did not come back, push it again", report.damaged),
        ("Lost: what is missing or cannot be read", report.lost),
        ("Not kept in a store", report.not_kept),
    ):
        if lines:
            console.print(f"{title}:", markup=False)
        for line in lines[:_FEW]:
            console.print(f"  {clean(line)}", markup=False)
        if len(lines) > _FEW:
            console.print(f"  and {len(lines) - _FEW} more (--json lists all)", markup=False)
