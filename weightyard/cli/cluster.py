"""`weightyard cluster`: a real HDFS on this machine, for trying things out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weightyard.testing.cluster.recorded import Status

app = typer.Typer(
    help="A real HDFS on this machine: Hadoop's own daemons, on loopback, without root.",
    no_args_is_help=True,
)

_Dir = Annotated[
    Path | None,
    typer.Option("--dir", help="Its folder. Default: cluster, in WEIGHTYARD_HOME.", metavar="DIR"),
]


@app.command()
def up(
    datanodes: Annotated[
        int | None, typer.Option(help="How many DataNodes. Default: one per rack named.")
    ] = None,
    racks: Annotated[str, typer.Option(help="The DataNodes' racks, in order.")] = "a,a,b",
    directory: _Dir = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="DataNodes ask for block tokens.")
    ] = False,
    ha: Annotated[bool, typer.Option("--ha", help="Two NameNodes that can fail over.")] = False,
) -> None:
    """Start a cluster and leave it running.

    The first time, Hadoop is fetched (about 90 MB). What is printed last makes a shell use it.

    Examples:

      eval "$(weightyard cluster up)"

      weightyard cluster up --datanodes 4 --racks a,b --dir /tmp/four

      weightyard cluster up --ha --tokens
    """
    from weightyard.testing.cluster import recorded
    from weightyard.testing.cluster.configuration import ClusterPlan

    record = recorded.up(
        _folder(directory),
        plan=lambda ports: ClusterPlan.on_loopback(
            ports, datanodes=datanodes, racks=racks.split(","), block_tokens=tokens, ha=ha
        ),
        say=lambda what: typer.echo(what, err=True),
    )
    typer.echo(record.exports)


@app.command()
def status(
    directory: _Dir = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for scripts.")] = False,
) -> None:
    """Show whether the cluster serves. Exit code 0 if it does, 1 if not.

    Example: weightyard cluster status --json
    """
    from weightyard.testing.cluster import recorded

    folder = _folder(directory)
    found = recorded.status(folder)
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
    elif found is None:
        typer.echo(f"no cluster in {folder}")
    else:
        _show(found)
    if found is None or not found.is_ready:
        raise typer.Exit(1)


@app.command()
def down(directory: _Dir = None) -> None:
    """End the cluster's daemons and remove its data.

    Example: weightyard cluster down --dir /tmp/four
    """
    from weightyard.testing.cluster import recorded

    folder = _folder(directory)
    record = recorded.down(folder)
    if record is None:
        typer.echo(f"no cluster in {folder}", err=True)
    else:
        typer.echo(f"ended {', '.join(one.name for one in record.daemons)}", err=True)


def _folder(directory: Path | None) -> Path:
    from weightyard.settings import Settings

    return (directory or Settings().home / "cluster").absolute()


def _show(found: Status) -> None:
    typer.echo(f"{found.record.url}  {'ready' if found.is_ready else 'not ready'}")
    for one in found.record.daemons:
        state = "running" if one.name in found.running else "gone"
        typer.echo(f"  {one.name}  {state}  pid {one.pid}  http://{one.http}")
    typer.echo(found.record.exports)


def _as_json(found: Status | None) -> dict[str, object]:
    if found is None:
        return {"ready": False, "daemons": []}
    return {
        "ready": found.is_ready,
        "url": found.record.url,
        "conf_dir": found.record.conf_dir,
        "live_datanodes": found.live_datanodes,
        "daemons": [
            {
                "name": one.name,
                "pid": one.pid,
                "http": one.http,
                "running": one.name in found.running,
            }
            for one in found.record.daemons
        ],
    }
