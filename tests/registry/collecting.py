"""What the tests of gc share: a clock that can be moved, and views of yard and database."""

from __future__ import annotations

import random

from pushing import BERT, write
from sqlalchemy import func, select, update

from weightyard.records import GcReport, Publication
from weightyard.registry import schema
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry, RegistryUpload
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store

DAY_S = 24 * 3600
KIB = 1024

_TIMES = (
    schema.packs.c.state_ms,
    schema.manifests.c.state_ms,
    schema.uploads.c.lease_ms,
    schema.read_leases.c.until_ms,
    schema.versions.c.created_ms,
    schema.versions.c.used_ms,
    schema.versions.c.removed_ms,
)


def noise(seed: int, length: int = 66 * KIB) -> bytes:
    """Bytes that no codec shrinks; long enough for a block of its own."""
    return random.Random(seed).randbytes(length)


def pass_time(database: Database, seconds: float) -> None:
    """Let everything in the database be so much older."""
    for column in _TIMES:
        database.write(
            lambda tx, column=column: tx.execute(
                update(column.table).values({column: column - int(seconds * 1000)})
            )
        )


def begin(registry: Registry, store: LocalStore, data: bytes) -> RegistryUpload:
    """An upload whose blocks are written, and whose version is not."""
    upload = registry.open_upload(BERT, Publication())
    write(upload, store, data)
    return upload


def gc(registry: Registry, store: Store, *, grace_s: float = 0, rewrites: bool = True) -> GcReport:
    options = GcOptions(grace_s=grace_s, embedded=True, rewrites=rewrites)
    return registry.gc(store, options)


def gc_twice(registry: Registry, store: Store, database: Database) -> GcReport:
    """Past the grace of everything: one run condemns, and a week later another deletes."""
    pass_time(database, 15 * DAY_S)
    registry.gc(store)
    pass_time(database, 15 * DAY_S)
    registry.gc(store)
    pass_time(database, 15 * DAY_S)
    return registry.gc(store)


def files(store: Store) -> set[str]:
    """All that gc may touch."""
    folders = (layout.PACKS, layout.MANIFESTS, layout.STAGING)
    return {file.path.text for folder in folders for file in store.list(folder)}


def rows(database: Database) -> dict[str, int]:
    """How many rows each table has."""
    return {
        table.name: database.read(
            lambda tx, table=table: tx.scalar(select(func.count()).select_from(table))
        )
        for table in schema.metadata.sorted_tables
    }


def states(database: Database) -> list[str]:
    """The states of all packs, by id."""
    packs = schema.packs
    return database.read(lambda tx: list(tx.scalars(select(packs.c.state).order_by(packs.c.id))))


def require_no_orphan(database: Database, store: LocalStore) -> None:
    """Every file is needed by a version, and nothing is left in staging."""
    p, m = schema.packs, schema.manifests
    packs = database.read(lambda tx: set(tx.scalars(select(p.c.name).where(p.c.state == "live"))))
    live = database.read(lambda tx: set(tx.scalars(select(m.c.name).where(m.c.state == "live"))))
    names = {path.rpartition("/")[2] for path in files(store)}
    assert names == packs | live
    assert not [*(store.folder / "staging").iterdir()], "an empty folder is an object, too"
