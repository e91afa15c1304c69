"""The page a run leaves: docs/benchmarks.md. Pure: results in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.about import LOADING_SECTIONS
from bench.asked import AGAIN, claims
from bench.ratios import ratios_of
from bench.samples import (
    MB,
    MEMORY_LIMIT_BYTES,
    Kind,
    Measured,
    Memory,
    Results,
    Row,
    Timed,
    fastest,
)
from bench.verdicts import at_most

_MIB, _GIB = 2**20, 2**30

_HEAD = """\
# Benchmarks

Made by `make bench`, or section by section by `python -m bench --only swap,rank`: each says when it
was measured and where. The raw samples are in `bench/results.json`. A real HDFS (one NameNode, two
DataNodes, each its own JVM) runs on the same machine as the client, and both share its cores: on a
network, with the DataNodes' work done elsewhere, rates and ratios will be others; the client's CPU
seconds say most about them. All rows of a section come from one run on one cluster; repetitions of
different rows take turns. The page cache is warm; disks are not measured. Every reader, and who
follows, had an untimed go before each that counts; writers had none. MB/s are 10⁶ bytes a second of
the best repetition, *spread* is how far the worst was below it. CPU seconds belong to the best one,
peak memory (the client's resident set, with its libraries and the bytes it received) to the
hungriest. What was read is compared with the digest of what was written, after the clock stopped.
*Bound by* says who was busy while a row ran; *others* is all else on the machine: where it is more
than a few hundredths, something disturbed the row, or (where a row says so) took part in it.
*Asked* is the aim set for a number; where it was missed, the section says what bounds it."""

_READS = """\
## Reading a file

One file of random bytes, replication 1, in HDFS blocks of 128 MiB, into memory. Memory is touched
beforehand where a row does not say *fresh* and the client lets one choose; hdfs-native always
returns fresh memory. The limit is the same number of bytes through loopback sockets between two
processes that do nothing else: who is near to it cannot be twice as fast as a peer that reaches
half of it. *Short circuit* is what those can do who run on a DataNode's own host, of a cluster that
is set up for it: they read the replica's file. All else, in this section and the others, is read
through sockets, as from another host."""

_LOADING = """\
## From HDFS into tensors

bf16 tensors with normally distributed values, read, checked and decoded into memory; MB/s of tensor
bytes. weightyard checks a checksum of every chunk; placements are known beforehand, as they are in
a yard. The peers read one safetensors file; *views* means that the tensors are cut from the bytes
read without a copy, the best that can be made of that peer."""

_WRITING = """\
## Writing

The same tensors from memory into HDFS, MB/s of tensor bytes. weightyard hashes, encodes, decodes
again to prove it, and returns when every pack is on as many DataNodes as asked for."""

_PUSH = """\
## Push

A folder with one safetensors file of bf16 tensors, on a disk and in the page cache, pushed to a
yard in HDFS with two copies: read,
hashed, encoded, proved, packed, published, recorded in a new SQLite registry. hdfs-native writes
the same file from memory, with two copies: in one stream, and cut into as many files as a push
writes packs at once. Where the DataNodes are the limit, a push at equal concurrency is faster by
what it need not store, at most: 1 / the size left is the ceiling. Where client, NameNode and
DataNodes share a few cores, the core-seconds below are the limit: what a push saves the DataNodes
by storing less it spends on hashing, encoding and proving, so that it can be faster than one
stream only by the time in which that stream lets cores wait. *The same again*: the file has not
changed since it was pushed from this host, so it is not read. *Read again* (`--rehash`): every byte
is read and hashed, which is what bounds it; so it is for a copy of the file, and for one that was
written less than a minute before it was first pushed."""

_MEMORY = f"""\
## Memory beyond the tensor

One bf16 tensor written to HDFS and read back, each in a process of its own. What is beyond the
tensor holds the interpreter and all libraries; {MEMORY_LIMIT_BYTES // _MIB} MiB is the bound."""

_TRAINING = """\
## Training

*What HDFS counted*: NameNode and DataNodes tell by themselves how often they were called and what
they sent, for the same state as above; heartbeats and reports are left out. *Needed* is what a
checkpoint takes in the store, bases of deltas included, read once. *A step that saves*: a small
transformer on two ranks (FSDP2), a checkpoint in the background every 20 steps; the stall is what
the loop waits for in such a step, *lost* is what that step and the five after it took longer than
the median of the six before and the six after these, of the time of 20 steps: only the steps around
a save tell what it costs, for whole runs that are alike differ by more than what is asked about.
Everything shares the cores of one machine: what is written in the background takes them from the
training. *Bytes of checkpoints*: ten steps from each to the next, three after the
first."""

_CODEC = """\
## Codecs

*left* is the size after encoding, of 1; rates are MB of tensor a second of one core's CPU time,
unless two threads are compared, by the clock. weightyard's rates hold its hashes and checks, and it
encodes and decodes into memory that is there, as its writer and its loader have it.
*parts* says what bounds them: nothing is faster than coding the exponents, or decoding them, and
splitting alone; the rest goes into hashes, and into copies between memory and the caches. ZipNN has
a Huffman coder of its own, and takes more time for large tensors: it was also given blocks as small
as ours."""

_CATALOGUE = """\
## The registry at size

Versions of 1,000 lists of a block each, 900 of them shared with the version before; 100 blocks in a
pack. Resolving: 1,000 times by number, alias and none. A claim asks for 10,000 block ids (all there
are, if fewer), from all over the registry, a commit publishes 9,000 of them, each the best of three
times; *by a token*: of a project, so that for each block a version is looked for that it may read.
*Add* makes a new pack of 1,000 blocks known. A gc plan is a dry run, once with nothing to go, once
when retention lets half of the versions go; its peak is that of its process, interpreter and
libraries included. PostgreSQL runs on the same machine, as it is after installation. What filling a
database left in memory is written before."""

_SERVICE = """\
## The service

A real `weightyard serve`, one process; each client has a connection and a token, and asks for the
version of a ref as soon as it was answered. Clients, service and database share the machine."""


_WAYS = {"reads": _READS, "loading": _LOADING, "writing": _WRITING, "push": _PUSH}


def render(results: Results) -> str:
    """The whole page."""
    machines: list[Mapping[str, str]] = []
    parts = [_HEAD]
    for name, text in (_WAYS | LOADING_SECTIONS).items():
        section = getattr(results, name)
        if section is not None:
            lines = [f"- {line}" for line in lines_of(name, section)]
            body = markdown(*timed_table(section))
            notes = ["", *(f"- {note}" for note in failures_of(section.rows))]
            said = [extent_of(section.rows), "", *lines, "", body, *notes]
            parts.append(_section(text, section.measured, machines, said))
    if results.memory is not None:
        body = markdown(*memory_table(results.memory))
        parts.append(_section(_MEMORY, results.memory.measured, machines, [body]))
    for text, table in (
        (_TRAINING, results.training),
        (_CODEC, results.codec),
        (_CATALOGUE, results.catalogue),
        (_SERVICE, results.service),
    ):
        if table is not None:
            content = list(_free_form(table.content))
            parts.append(_section(text, table.measured, machines, content))
    for number, machine in enumerate(machines, 1):
        parts.append(
            f"## Machine {number}\n\n" + markdown(("what", "value"), list(machine.items()))
        )
    return "\n\n".join(parts) + "\n"


def lines_of(name: str, section: Timed) -> list[str]:
    """What a section's numbers say: whether they are what was asked for, or how they compare."""
    lines = claims(name, section.rows) or [str(ratio) for ratio in ratios_of(section.rows)]
    return [*lines, *push_notes(section)] if name == "push" else lines


def push_notes(section: Timed) -> list[str]:
    """What rates do not tell of pushes: what was stored, what the cores did, the second one."""
    rows = section.rows
    pushes = [row for row in rows if row.kind is Kind.OURS and row.samples]
    notes = [
        f"{row.name}: {left:.3f} of the tensor bytes were stored; 1 / that is {1 / left:.2f}×"
        for row in pushes
        if (left := row.best.stored_bytes / row.moved_bytes)
    ]
    first = [row for row in pushes if row.best.stored_bytes]
    if first:
        rivals = [row for row in rows if row.samples and row.group == first[0].group]
        notes += [_core_seconds(row, int(section.measured.machine["cores"])) for row in rivals]
    for again in (row for row in pushes if first and not row.best.stored_bytes):
        if all(row.group != again.group for row in first):
            share = again.best.seconds / first[0].best.seconds
            what = (
                f"of {first[0].name} ({first[0].best.seconds:.2f} s): {again.name}, "
                f"{again.best.seconds:.2f} s; no pack was written"
            )
            notes.append(at_most(share, AGAIN, what))
    return notes


def _core_seconds(row: Row, cores: int) -> str:
    """What a row took of all cores, and how fast it were if none of them ever waited."""
    best = row.best
    taken = best.client_cpu_s + best.server_cpu_s + best.other_cpu_s
    at_best = row.moved_bytes / MB / (taken / cores)
    return (
        f"{row.name}: {taken:.1f} core-seconds, of them {best.client_cpu_s:.1f} the client's and "
        f"{best.server_cpu_s:.1f} the DataNodes'; {cores} cores were busy for "
        f"{taken / cores / best.seconds:.0%} of {best.seconds:.2f} s, and never waiting would give "
        f"{at_best:.0f} MB/s"
    )


def extent_of(rows: Sequence[Row]) -> str:
    """How much was moved how often."""
    moved = max(row.moved_bytes for row in rows)
    return f"{moved / _GIB:.2f} GiB, {max(len(row.samples) for row in rows)} repetitions."


def failures_of(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.name}: {'a repetition failed' if row.samples else 'no result'}: {row.failed}"
        for row in rows
        if row.failed is not None
    ]


def timed_table(section: Timed) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and cells, rows in the order measured."""
    header = (
        *("who", "how", "MB/s", "spread", "× fastest peer"),
        *("client CPU s", "server CPU s", "others CPU s", "peak MiB", "bound by"),
    )
    cells: list[Sequence[str]] = []
    for row in section.rows:
        if not row.samples:
            cells.append((row.who, row.way, *["–"] * 8))
            continue
        peer = fastest([one for one in section.rows if one.group == row.group], Kind.PEER)
        best = row.best
        rate = f"{row.best_rate:.0f}"
        cells.append(
            (
                row.who,
                row.way,
                f"**{rate}**" if row.kind is Kind.OURS else rate,
                f"{row.spread:.0%}",
                f"{row.best_rate / peer.best_rate:.2f}" if peer else "–",
                f"{best.client_cpu_s:.2f}",
                f"{best.server_cpu_s:.2f}",
                f"{best.other_cpu_s:.2f}",
                f"{row.peak_rss_bytes / _MIB:.0f}",
                bound(row, int(section.measured.machine.get("cores", "1"))),
            )
        )
    return header, cells


def short_table(section: Timed) -> tuple[Sequence[str], list[Sequence[str]]]:
    """The columns a terminal has room for."""
    header, cells = timed_table(section)
    return ("way", *header[2:5]), [(f"{line[0]}, {line[1]}", *line[2:5]) for line in cells]


def bound(row: Row, cores: int) -> str:
    """What a row could not go faster than, by who was busy while it ran."""
    best = row.best
    client, server = best.client_cpu_s / best.seconds, best.server_cpu_s / best.seconds
    if client + server >= 0.85 * cores:
        return "all cores"
    if client >= 0.85:
        return "client CPU"
    if server >= 0.85:
        return "server CPU"
    return f"waiting: {client + server:.1f} of {cores} cores busy"


def memory_table(section: Memory) -> tuple[Sequence[str], list[Sequence[str]]]:
    header = ("task", "tensor GiB", "peak MiB", "beyond the tensor MiB", "within bound", "MB/s")
    return header, [
        (
            row.task,
            f"{row.tensor_bytes / _GIB:.2f}",
            f"{row.peak_rss_bytes / _MIB:.0f}",
            f"{row.beyond_bytes / _MIB:.0f}",
            "yes" if row.beyond_bytes < MEMORY_LIMIT_BYTES else "**no**",
            f"{row.tensor_bytes / 1e6 / row.seconds:.0f}",
        )
        for row in section.rows
    ]


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _section(
    text: str, measured: Measured, machines: list[Mapping[str, str]], body: Sequence[str]
) -> str:
    if measured.machine not in machines:
        machines.append(measured.machine)
    where = f"Measured {measured.date} on machine {machines.index(measured.machine) + 1}"
    hadoop = f", Hadoop {measured.hadoop}" if measured.hadoop else ""
    load = f"Load average before: {measured.load:.1f}."
    if measured.stolen is not None:
        load += f" The host gave {measured.stolen:.0%} of the cores' time to others meanwhile."
    return "\n".join([text, "", f"{where}{hadoop}. {load}", "", *body])


def _free_form(content: Mapping[str, Any], level: int = 3) -> list[str]:
    """A dict of titles: lists of rows become tables, texts paragraphs, numbers lines."""
    lines: list[str] = []
    for title, value in content.items():
        match value:
            case [dict(), *_]:
                header = tuple(dict.fromkeys(key for row in value for key in row))
                rows = [[cell(row.get(key)) for key in header] for row in value]
                shown = [_words(key) for key in header]
                lines += [f"{'#' * level} {_words(title)}", "", markdown(shown, rows), ""]
            case dict():
                lines += [f"{'#' * level} {_words(title)}", "", *_free_form(value, level + 1)]
            case [*items]:
                lines += [*(f"- {cell(item)}" for item in items), ""]
            case _:
                lines += [f"{title}: {cell(value)}", ""]
    return lines


def _words(key: str) -> str:
    """`encode_mb_s` as a reader would write it."""
    return key.replace("_mb_s", " MB/s").replace("_", " ")


def cell(value: object) -> str:
    """A value as a table shows it."""
    match value:
        case None:
            return "–"
        case float():
            return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"
        case _:
            return str(value)
