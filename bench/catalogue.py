"""The registry at size: how long resolving, claiming, committing and planning a gc take."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, select, update

from bench.filling import MODEL, RAW_BYTES, Filled, databases, fill, placement, table_sizes
from bench.verdicts import at_most
from bench.worker import status_bytes
from weightyard.format.dtypes import DType
from weightyard.format.manifest import BlockEntry, Box, Extent, Manifest, TensorEntry
from weightyard.names import BlockId, Digest, PackId, Ref
from weightyard.records import Publication
from weightyard.registry import binding, schema
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.registry.uploads import Reading
from weightyard.storage.local import LocalStore
from weightyard.transfer.catalogue import ManifestFile

SIZES = (100, 1000, 10_000)
"""Versions; the largest has a million blocks."""

CLAIMED = 10_000
COMMITTED = 9000

ASKED = {
    "resolve p99 ms": 20,
    f"claim {CLAIMED} s": 1,
    f"commit {COMMITTED} s": 1,
    "gc plan peak MiB": 1024,
}
SQLITE = 3.0
"""Of PostgreSQL's time, at most."""

_REPEAT = 3
"""The best counts: the first waits for pages that filling did not leave in memory."""
_CHILD_TIMEOUT_S = 3600


def run(sizes: Sequence[int], done: Callable[[Mapping[str, Any]], object]) -> dict[str, Any]:
    """Each size on each database: a table of times, and one of what the tables take."""
    times: list[dict[str, Any]] = []
    tables: dict[str, list[dict[str, Any]]] = {}
    for versions in sizes:
        with databases() as urls:
            for name, url in urls.items():
                filled = Filled(versions)
                database = Database(url)
                began = time.perf_counter()
                fill(database, filled)
                filled_s = time.perf_counter() - began
                row = {"database": name, "versions": versions, "blocks": filled.blocks}
                tables[f"tables_of_{name}_{versions}"] = table_sizes(database)
                row |= measure(database, filled)
                database.close()
                row |= {"gc plan s": plan_gc(url, keep_last=None)["seconds"]}
                retained = plan_gc(url, keep_last=versions // 2)
                row |= {
                    "gc plan, half to go, s": retained["seconds"],
                    "gc plan peak MiB": retained["peak_bytes"] / 2**20,
                }
                row["filled in s"] = filled_s
                times.append(row)
                done(row)
    return {"asked": claims(times), "times": times, **tables}


def claims(times: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the largest size is what was asked for, and SQLite within reach of it."""
    largest = max(row["versions"] for row in times)
    found = {row["database"]: row for row in times if row["versions"] == largest}
    server, embedded = found.get("PostgreSQL"), found.get("SQLite")
    if server is None or embedded is None:
        return []
    measured = [(what, asked) for what, asked in ASKED.items() if what in server]
    lines = [
        at_most(server[what], asked, f"{what}, PostgreSQL, {largest} versions")
        for what, asked in measured
    ]
    for what, _ in measured:
        times_as_long = embedded[what] / server[what]
        lines.append(at_most(times_as_long, SQLITE, f"PostgreSQL's {what}: SQLite", "×"))
    return lines


def measure(database: Database, filled: Filled) -> dict[str, float]:
    """What one does all day, on a filled database."""
    registry = Registry(database, who="bench")
    refs = [Ref.parse(f"{MODEL}@v{random.randint(1, filled.versions)}") for _ in range(500)]
    refs += [Ref.parse(f"{MODEL}@prod"), Ref.parse(str(MODEL))] * 250
    random.Random().shuffle(refs)
    resolved_s = sorted(timed_s(lambda ref=ref: registry.resolve(ref)) for ref in refs)  # type: ignore[misc]
    row = {
        "resolve p50 ms": 1000 * resolved_s[len(refs) // 2],
        "resolve p99 ms": 1000 * resolved_s[int(len(refs) * 0.99)],
    }
    for whose, reading in (("", None), (", by a token", Reading((MODEL.project,), "bench"))):
        published = [_publish(registry, database, filled, reading) for _ in range(_REPEAT)]
        claimed_s, committed_s = (min(took_s) for took_s in zip(*published, strict=True))
        row |= {f"claim {CLAIMED}{whose} s": claimed_s, f"commit {COMMITTED}{whose} s": committed_s}
    new = registry.open_upload(MODEL, Publication())
    pack = PackId.new()
    new.begin_pack(pack)
    placements = [
        placement(BlockId(secrets.token_hex(32)), 16 + at * RAW_BYTES, pack) for at in range(1000)
    ]
    row["add 1000 s"] = timed_s(lambda: new.add_pack(pack, 1 << 30, placements))
    new.abandon()
    row["cost s"] = timed_s(lambda: registry.cost(refs[0]))
    return row


def _publish(
    registry: Registry, database: Database, filled: Filled, reading: Reading | None
) -> tuple[float, float]:
    """Seconds of a claim of blocks from all over the registry, and of the commit that uses them."""
    ids = database.read(lambda tx: _some_blocks(tx, filled.blocks, CLAIMED))
    opened = registry.open_upload(MODEL, Publication())
    upload = registry.resume_upload(opened.id, Publication(), reading=reading)
    claimed_s = timed_s(lambda: upload.claim(ids))
    manifest, digest = _manifest(ids[:COMMITTED]), Digest(secrets.token_hex(32))
    upload.begin_manifest(ManifestFile(digest, 1))
    committed_s = timed_s(
        lambda: upload.commit(digest, manifest, Publication(), secrets.token_hex(8))
    )
    return claimed_s, committed_s


def _some_blocks(tx: Connection, blocks: int, count: int) -> list[BlockId]:
    wanted = sorted(random.sample(range(1, blocks + 1), min(count, blocks)))
    rows = tx.scalars(select(schema.blocks.c.hash).where(schema.blocks.c.id.in_(wanted)))
    return [BlockId.of(raw) for raw in rows]


def _manifest(held: Sequence[BlockId]) -> Manifest:
    """Tensors of nine blocks each."""
    shape = (9 * RAW_BYTES,)
    tensors = tuple(
        TensorEntry(
            f"t{start:05}",
            None,
            DType.U8,
            shape,
            (Box((0,), shape, tuple(Extent(start + i, 0, RAW_BYTES) for i in range(9))),),
            None,
        )
        for start in range(0, len(held) - 8, 9)
    )
    entries = tuple(BlockEntry(block.hex, RAW_BYTES) for block in held[: 9 * len(tensors)])
    return Manifest(1, RAW_BYTES, entries, (), tensors)


def timed_s(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plan_gc(url: str, keep_last: int | None) -> dict[str, float]:
    """A dry run in a process of its own, so that its peak of memory is its own."""
    request = msgspec.json.encode({"url": url, "keep_last": keep_last})
    child = subprocess.run(
        [sys.executable, "-m", "bench.catalogue"],
        input=request,
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ},
        timeout=_CHILD_TIMEOUT_S,
    )
    return msgspec.json.decode(child.stdout, type=dict[str, float])


def _plan_gc_here(url: str, keep_last: int | None) -> dict[str, float]:
    database = Database(url)
    rules = None if keep_last is None else {"keep_last": keep_last}
    database.write(lambda tx: tx.execute(update(schema.models).values(retention=rules)))
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        # Each run has a folder of its own: the registry forgets the one before.
        database.write(lambda tx: tx.execute(update(schema.registry).values(yard_id=None)))
        binding.bind(database, store)
        registry = Registry(database, who="bench")
        seconds = timed_s(lambda: registry.gc(store, GcOptions(), dry_run=True))
    return {"seconds": seconds, "peak_bytes": status_bytes("VmHWM")}


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read())
    sys.stdout.buffer.write(msgspec.json.encode(_plan_gc_here(asked["url"], asked["keep_last"])))
