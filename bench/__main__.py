"""Measure weightyard against its peers on one mini-HDFS; write samples, page and README."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from bench import (
    catalogue,
    counting,
    faults,
    link,
    load,
    machine,
    memory,
    models,
    node,
    push,
    reads,
    report,
    service,
    swap,
    training,
)
from bench.headline import with_headline
from bench.samples import Footprint, Memory, Results, Row, Table, Timed
from bench.site import Site
from weightyard.errors import ClusterFailed
from weightyard.settings import Settings
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.cluster.native import library_folder

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
README = HERE.parent / "README.md"

TIMED: Mapping[str, Callable[..., tuple[Row, ...]]] = {
    "reads": reads.run,
    "loading": models.run_loading,
    "writing": models.run_writing,
    "push": push.run,
    "load": load.run_load,
    "link": link.run,
    "node": node.run_node,
    "local": node.run_local,
    "swap": swap.run,
    "rank": load.run_rank,
    "stream": load.run_stream,
    "checkpoints": training.run_checkpoints,
}
SECTIONS = (*TIMED, "training", "faults", "memory", "codec", "catalogue", "service")
ON_HDFS = frozenset((*TIMED, "memory", "training"))
_UNITS = {"MiB": 2**20, "GiB": 2**30}
_GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    console = Console()
    wanted = [name for name in SECTIONS if name in options.only and not options.page]
    results = read_results(RESULTS)
    if options.page:
        write_results(results)
    with ExitStack() as cleanup:
        site = None
        if ON_HDFS & set(wanted):
            console.print("starting HDFS")
            # Without the test cluster's options for a quick start: DataNodes get their best code.
            cluster = MiniCluster(
                datanodes=2,
                racks=("a",),
                jvm_options=(),
                properties=counting.PROMETHEUS,
                short_circuit=_has_library(console),
            )
            scratch = tempfile.TemporaryDirectory(prefix="weightyard-bench-", dir=_memory_folder())
            site = Site.of(cleanup.enter_context(cluster), Path(cleanup.enter_context(scratch)))
            if site.libhdfs_missing:
                console.print(site.libhdfs_missing)
        for name in wanted:
            console.rule(name)
            stolen = machine.Stolen()
            section = _measure(name, site, options, console)
            measured = msgspec.structs.replace(section.measured, stolen=stolen.share())
            section = msgspec.structs.replace(section, measured=measured)
            results = msgspec.structs.replace(results, **{name: section})
            if not options.dry:
                write_results(results)
    if not options.dry:
        written = ", ".join(str(one.relative_to(HERE.parent)) for one in (RESULTS, PAGE, README))
        console.print(f"wrote {written}")


def read_results(path: Path) -> Results:
    """What the last run left; nothing if there was none."""
    if not path.is_file():
        return Results()
    return msgspec.json.decode(path.read_bytes(), type=Results)


def write_results(results: Results) -> None:
    """After every section, so that a run cut short leaves what it measured."""
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(report.render(results))
    README.write_text(with_headline(README.read_text(), results))


def _measure(
    name: str, site: Site | None, options: argparse.Namespace, console: Console
) -> Timed | Memory | Table:
    if name == "faults":
        rows = faults.run(options.size, options.kills, _saying(console))
        return _said(name, Timed(machine.measured_now(), rows), console)
    if site is None or name not in ON_HDFS:
        return Table(machine.measured_now(), _tables(name, options, console))
    measured = machine.measured_now(site.shell)
    if name == "memory":

        def say(row: Footprint) -> None:
            console.print(f"  {row.task}: {row.beyond_bytes / 2**20:.0f} MiB beyond the tensor")

        section = Memory(measured, memory.run(site, options.tensor, say))
        console.print(_rich(*report.memory_table(section)))
        return section
    if name == "training":
        return Table(measured, training.run_training(site, options.size, _saying_cells(console)))
    with console.status("measuring"):
        rows = TIMED[name](site, options.size, options.repeat, _saying(console))
    return _said(name, Timed(measured, rows), console)


def _said(name: str, timed: Timed, console: Console) -> Timed:
    """A section as the terminal shows it."""
    console.print(_rich(*report.short_table(timed)))
    for line in report.lines_of(name, timed):
        console.print(f"  {line}".replace("**", ""), highlight=False)
    for note in report.failures_of(timed.rows):
        console.print(f"  {note}", style="yellow", markup=False)
    return timed


def _tables(name: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """What the sections that need no HDFS measured."""
    say = _saying_cells(console)
    match name:
        case "catalogue":
            return catalogue.run(options.versions, say)
        case "service":
            return service.run(service.CLIENTS, service.SECONDS, say)
        case _:
            from bench import codec

            return codec.run()


def _saying_cells(console: Console) -> Callable[[Mapping[str, Any]], None]:
    def say(row: Mapping[str, Any]) -> None:
        cells = (f"{title} {report.cell(value)}" for title, value in row.items())
        console.print(f"  {', '.join(cells)}", highlight=False)

    return say


def _saying(console: Console) -> Callable[[Row], None]:
    def done(row: Row) -> None:
        rate = f"{row.moved_bytes / 1e6 / row.samples[-1].seconds:.0f} MB/s" if row.samples else "–"
        console.print(f"  {row.name}: {rate}", highlight=False)

    return done


def _rich(header: Sequence[str], cells: Sequence[Sequence[str]]) -> RichTable:
    table = RichTable(*header, box=box.SIMPLE)
    for line in cells:
        table.add_row(*(cell.replace("**", "") for cell in line))
    return table


def _has_library(console: Console) -> bool:
    try:
        library_folder(Settings().cache)
    except ClusterFailed as why:
        console.print(f"no short circuit: {why}", style="yellow", markup=False)
        return False
    return True


def _memory_folder() -> str | None:
    """Where files are memory, so that no row waits for a disk; None: the usual place."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only",
        type=_sections,
        default=SECTIONS,
        help=f"some of {','.join(SECTIONS)}; the others are kept from the last run",
    )
    parser.add_argument("--size", type=_size, default=_GIB, help="of a file or model; 1GiB")
    parser.add_argument("--tensor", type=_size, default=4 * _GIB, help="of the memory section")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--page", action="store_true", help="measure nothing: write the page and README anew"
    )
    parser.add_argument("--dry", action="store_true", help="write nothing: only try it")
    parser.add_argument("--kills", type=int, default=20, help="of the faults section; 20")
    parser.add_argument(
        "--versions",
        type=lambda text: tuple(int(size) for size in text.split(",")),
        default=catalogue.SIZES,
        help="of the catalogue section; 100,1000,10000",
    )
    return parser


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{unknown.pop()} is none of {', '.join(SECTIONS)}")
    return names


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)(MiB|GiB)", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 256MiB or 1GiB")
    return int(found[1]) * _UNITS[found[2]]


if __name__ == "__main__":
    # Files in memory outlive a process that is ended without a chance to remove them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
