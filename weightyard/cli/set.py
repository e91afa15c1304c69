"""`weightyard set`: change how a version is kept."""

from __future__ import annotations

from typing import Annotated

import typer

from weightyard.cli.options import RefArgument
from weightyard.cli.session import Session, command


@command
def set_(
    session: Session,
    ref: RefArgument,
    replication: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=512, help="Copies in HDFS.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="P", help="HDFS storage policy, such as ALL_SSD or COLD.")
    ] = None,
) -> None:
    """Change how many copies of a version there are, and on what kind of disk.

    A pack that several versions use is kept as the most demanding of them asks. It may take HDFS a
    while to follow.

    Examples:

      weightyard set team/bert@prod --replication 5

      weightyard set team/bert@v1 --replication 2 --policy COLD
    """
    from weightyard.cli.refs import resolve, version_json

    if replication is None and policy is None:
        raise typer.BadParameter("say --replication, --policy or both")
    with session.open() as yard:
        version = yard.keep(resolve(yard, ref).ref, replication=replication, policy=policy)
    kept = [
        f"{version.replication} copies" if version.replication else "",
        f"policy {version.policy}" if version.policy else "",
    ]
    session.show(
        version_json(version),
        lambda console: console.print(
            f"{version.ref}: {', '.join(filter(None, kept))}", markup=False
        ),
    )
