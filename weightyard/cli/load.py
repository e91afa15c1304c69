"""`weightyard load`: load a version's tensors, to see that it works and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weightyard.cli.options import RefArgument
from weightyard.cli.session import Session, command

if TYPE_CHECKING:
    from rich.console import Console

    from weightyard.loader.report import LoadReport
    from weightyard.records import Version


@command
def load(
    session: Session,
    ref: RefArgument,
    device: Annotated[str, typer.Option(help="Such as cpu, cuda or cuda:1.")] = "cpu",
    files: Annotated[
        list[str] | None,
        typer.Option(metavar="G", help="Load the tensors in files that fit, such as 'adapter/*'."),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(metavar="G", help="Only tensors that fit; '!G' leaves out those that do."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast to it, such as bfloat16.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every block too: verify='full'.")
    ] = False,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            help="Use this node's snapshot; without one, a load of a whole version leaves one.",
        ),
    ] = True,
    report: Annotated[bool, typer.Option("--report", help="Show bytes and time by stage.")] = False,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Load so many times.")] = 1,
) -> None:
    """Load a version's tensors onto a device, and say what came and how long it took.

    Needs torch. In a program, use `weightyard.load` instead. The rate is that of the fastest load.

    Examples:

      weightyard load team/bert@prod --device cuda

      weightyard load team/bert@prod --report --repeat 3 --no-cache

      weightyard load team/moe --tensors '!*.experts.*' --tensors '*.experts.0.*'
    """
    from weightyard.cli.refs import resolve
    from weightyard.loader.placing import device_of

    device_of(device)
    how: Literal["fast", "full"] = "full" if verify else "fast"
    loaded: list[tuple[Version, LoadReport]] = []
    with session.open() as yard:
        meant = resolve(yard, ref)
        total_bytes = None if files or tensors else meant.logical_bytes
        for _ in range(repeat):
            with session.progress("Loading", total_bytes) as advance:
                weights = yard.load(
                    ref,  # as it was typed: this node remembers it so, for working offline
                    device,
                    files=files,
                    tensors=tensors,
                    dtype=dtype,
                    verify=how,
                    cache=cache,
                    progress=advance,
                )
            loaded.append((weights.version, weights.report))
            del weights  # before the next load: there may be room for one only
    version, best = min(loaded, key=lambda one: one[1].seconds)
    reports = [one for _, one in loaded]
    result = {
        "ref": version.ref,
        "version": version.number,
        "device": device,
        "tensors": best.tensors,
        "bytes": best.bytes,
        "seconds": round(best.seconds, 3),
        **({"reports": [one.as_dict() for one in reports]} if report else {}),
    }
    session.show(result, lambda console: _show(console, best, reports if report else []))


def _show(console: Console, best: LoadReport, reports: list[LoadReport]) -> None:
    from weightyard.cli.wording import count, size

    console.print(
        f"{best.ref}: {count(best.tensors, 'tensor')}, {size(best.bytes)} on {best.device} in "
        f"{best.seconds:.2f} s ({size(int(best.bytes_per_s))}/s)",
        markup=False,
    )
    for one in reports:
        _show_report(console, one)


def _show_report(console: Console, report: LoadReport) -> None:
    """Show what happened in a load; lines of what did not happen are left out."""
    from weightyard.cli.tables import facts, table
    from weightyard.cli.wording import count, size
    from weightyard.storage.store import ReadPath

    read = f"{size(report.read_bytes)}, {report.amplification:.2f} × the tensors"
    stored = f"{size(report.stored_bytes)} in {count(report.requests, 'request')}"
    is_elsewhere = set(report.read_paths) != {ReadPath.LOCAL}
    facts(
        console,
        [
            ("seconds", f"{report.seconds:.3f}"),
            ("rate", f"{size(int(report.bytes_per_s))}/s"),
            ("read", read if report.requests else ""),
            ("from the store", stored if report.requests else ""),
            ("from a snapshot", _cached(report)),
            ("ref", _resolved(report.resolved_s_ago)),
            ("way", _shares(report.read_paths)),
            ("DataNodes", _shares(report.datanodes) if is_elsewhere else ""),
            ("hosts", _shares(report.hosts) if is_elsewhere else ""),
            ("distance", _shares(report.distances) if is_elsewhere else ""),
            ("hedged", str(report.hedged) if report.hedged else ""),
            ("failed over", str(report.failed_over) if report.failed_over else ""),
            ("failed on the way", "; ".join(report.failed[:3])),
        ],
    )
    table(console, ["stage", "seconds", "bytes", ""], _stages(report))


def _cached(report: LoadReport) -> str:
    """How much of the tensors came from a snapshot, or that one was made for this load."""
    from weightyard.cli.wording import size

    if not report.from_snapshot:
        return ""
    return size(report.cached_bytes) if report.cached_bytes else "made for this load"


def _resolved(age_s: float | None) -> str:
    """How old the answer is that told what a ref means; empty if the yard was asked."""
    return "" if age_s is None else f"as it was when this node last asked, {age_s:.0f} s ago"


def _stages(report: LoadReport) -> Iterator[tuple[str, str, str, str]]:
    """The stages that happened; below a stage, its parts, which are sums over threads."""
    from weightyard.cli.wording import size
    from weightyard.loader.report import OF_READ

    stages = report.stages
    moved = {stage: size(amount) for stage, amount in report.stage_bytes.items()}
    for stage, seconds in stages.items():
        if stage in OF_READ or not seconds:
            continue
        yield stage, f"{seconds:.3f}", moved.get(stage, ""), ""
        if stage == "read":
            for part in OF_READ:
                if took_s := stages.get(part):
                    of_it = "of it, over all threads"
                    yield f"· {part}", f"{took_s:.3f}", moved.get(part, ""), of_it


def _shares(amounts: Mapping[str, int]) -> str:
    from weightyard.cli.wording import size

    return ", ".join(f"{name} {size(amount)}" for name, amount in amounts.items())
