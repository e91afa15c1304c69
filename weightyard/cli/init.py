"""`weightyard init`: make a yard: its folders, its database, and the bond between them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from weightyard.cli.session import Session, command


@command
def init(
    session: Session,
    owner: Annotated[
        str | None, typer.Option(metavar="USER", help="The user to whom the folders belong.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="The group to which they belong.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="OCTAL",
            help="The folders' mode; files get it without x. Default: 0755, or as it is.",
        ),
    ] = None,
    dedup: Annotated[
        Literal["yard", "project"] | None,
        typer.Option(
            help="Store equal content once in the yard (the default), or once in each project, so "
            "that no token learns what other projects have. Chosen when the yard is made.",
        ),
    ] = None,
) -> None:
    """Make a yard, or see that it is there: folders, database schema, yard.json.

    The embedded default needs no init. On a shared cluster it states who may read and write: HDFS
    access to the folder is access to every project in it.

    Examples:

      weightyard init

      weightyard --yard hdfs://cluster/weightyard init --group ml --mode 0750

      weightyard --yard hdfs://cluster/weightyard init --dedup project
    """
    from weightyard.cli.db import opened_database
    from weightyard.cli.tables import facts
    from weightyard.cli.wording import size
    from weightyard.opening import store_url
    from weightyard.registry import binding, migrate
    from weightyard.registry.schema import Dedup
    from weightyard.storage.opening import open_store
    from weightyard.storage.store import Ownership

    ownership = Ownership(owner=owner, group=group, folder_mode=_mode(mode or "0755"))
    settings = session.settings()
    with (
        open_store(store_url(session.url, settings), settings) as store,
        opened_database(session, None) as database,
    ):
        migrate.upgrade(database)
        chosen = None if dedup is None else Dedup(dedup)
        bound = binding.bind(database, store, ownership, dedup=chosen)
        if any(value is not None for value in (owner, group, mode)):
            store.init(ownership)  # `bind` did it only if it made the yard
        result = {
            "store": store.url,
            "database": database.shown,
            "yard_id": bound.yard_id,
            "registry_id": bound.registry_id,
            "block_bytes": bound.block_bytes,
            "dedup": bound.dedup.value,
        }
    session.show(
        result,
        lambda console: facts(
            console,
            [
                ("store", str(result["store"])),
                ("database", str(result["database"])),
                ("yard", bound.yard_id),
                ("registry", bound.registry_id),
                ("block size", size(bound.block_bytes)),
                ("dedup", f"within the {bound.dedup}"),
            ],
        ),
    )


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0o700 <= mode <= 0o777:
        raise typer.BadParameter(f"{text!r}: octal, 0700 to 0777", param_hint="--mode")
    return mode
