"""The few numbers that README.md shows, out of what was measured. Pure: results in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import push
from bench.load import TRAINED
from bench.node import LAST_BYTE
from bench.prepared import PLANES, RAW
from bench.ratios import ratios_of
from bench.reads import HERE
from bench.samples import Kind, Results, Row, Timed, fastest
from bench.training import OURS, RANKS, STOCK, group_of

BEGIN = "<!-- Written by `python -m bench` out of bench/results.json: -->\n"
END = "<!-- until here -->\n"

_HEADER = "| MB/s | weightyard | another way | |\n|---|---|---|---|\n"


@dataclass(frozen=True, slots=True)
class Compared:
    """One thing done in two ways; a way that is None was not measured."""

    what: str
    ours: Row | None
    rival: Row | None
    by: str = ""
    """What people call the rival, if not by its name."""


def with_headline(readme: str, results: Results) -> str:
    """A README whose numbers are these. Raises ValueError if it has no place for them."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN.strip()} … {END.strip()}")
    return f"{before}{BEGIN}\n{headline(results)}\n{END}{after}"


def headline(results: Results) -> str:
    """A table of rates, best repetition against best, and when and where they were measured."""
    return f"{_HEADER}{''.join(_lines(results))}\n{_measured(results)}\n"


def _lines(results: Results) -> Iterator[str]:
    for one in _compared(results):
        if one.ours is not None and one.rival is not None:
            ours, rival = one.ours.best_rate, one.rival.best_rate
            another = f"{rival:.0f}: {one.by or one.rival.name}"
            yield f"| {one.what} | **{ours:.0f}** | {another} | **{ours / rival:.1f}×** |\n"


def _compared(results: Results) -> Iterator[Compared]:
    yield from _loading(_rows(results.load, TRAINED))
    yield _quickest("a file, read through sockets", _rows(results.reads, ""))
    yield _quickest("a file, read on a DataNode's own host", _rows(results.reads, HERE))
    pushes = _rows(results.push, push.FIRST)
    yield Compared("`push` to two copies", _way(pushes, "push"), _of(pushes, "hdfs-native"))
    for did, what, by in (("save", "saved", "writer"), ("load", "loaded", "reader")):
        rows = _rows(results.checkpoints, group_of(did, RANKS[0]))
        title = f"a checkpoint of {RANKS[0]} ranks, {what}"
        yield Compared(title, _of(rows, OURS), _of(rows, STOCK), f"torch's own {by}")
    yield _quickest("the second load on a node, to the last byte", _rows(results.node, LAST_BYTE))


def _loading(rows: Sequence[Row]) -> Iterator[Compared]:
    """Against the loaders that people use, and against the best that can be made by hand."""
    used = fastest([row for row in rows if not row.way.endswith("views")], Kind.PEER)
    raw, planes = _way(rows, RAW), _way(rows, PLANES)
    yield Compared("HDFS into tensors, stored raw", raw, used)
    if planes is not None:
        left = planes.best.read_bytes / planes.moved_bytes
        yield Compared(f"HDFS into tensors, compressed to {left:.2f}", planes, used)
    by_hand = fastest(rows, Kind.PEER)
    yield Compared("stored raw, against tensors cut by hand, unchecked", raw, by_hand)


def _quickest(what: str, rows: Sequence[Row]) -> Compared:
    """Against the fastest peer, with the same kind of memory."""
    found = next((ratio for ratio in ratios_of(rows) if ratio.is_of_quickest), None)
    return Compared(what, found and found.ours, found and found.rival)


def _measured(results: Results) -> str:
    sections = (results.load, results.reads, results.push, results.checkpoints, results.node)
    measured = [one.measured for one in sections if one is not None]
    if not measured:
        return "Nothing of it was measured yet."
    dates = sorted({one.date for one in measured})
    cores = sorted({one.machine["cores"] for one in measured})
    return (
        f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} on {' or '.join(cores)} "
        "cores, which the client shares with HDFS."
    )


def _rows(section: Timed | None, group: str) -> list[Row]:
    rows = () if section is None else section.rows
    return [row for row in rows if row.group == group and row.samples]


def _way(rows: Sequence[Row], way: str) -> Row | None:
    return next((row for row in rows if row.way == way), None)


def _of(rows: Sequence[Row], who: str) -> Row | None:
    return next((row for row in rows if row.who == who), None)
