"""Schema versions: Alembic migrations that ship with the package.

Alembic is imported only to migrate. To see which version a database has takes one query; the import
would take most of a command's start.
"""

from __future__ import annotations

import secrets
from importlib import resources

from sqlalchemy import Connection, column, func, insert, inspect, select, table

from weightyard.errors import SchemaUnknown
from weightyard.format.block import DEFAULT_BLOCK_BYTES
from weightyard.registry import schema
from weightyard.registry.database import Database

_UPGRADE = "run `weightyard db upgrade`"
_NEWER = "run `pip install --upgrade weightyard`"

_LOCK = 0x77792D736368656D

_alembic_version = table("alembic_version", column("version_num"))


def upgrade(database: Database) -> None:
    """Bring a database, also an empty one, to the schema of this weightyard. Idempotent."""
    require_known(database)
    if current(database) != newest():
        database.write(_migrate)


def current(database: Database) -> str | None:
    """The schema a database has, or None for an empty one."""

    def look(tx: Connection) -> str | None:
        if not inspect(tx).has_table(_alembic_version.name):
            return None
        return tx.scalar(select(_alembic_version.c.version_num))

    return database.read(look)


def newest() -> str:
    return max(_known())


def require_known(database: Database) -> None:
    """Raises SchemaUnknown for a schema made by a newer weightyard."""
    found = current(database)
    if found is not None and found not in _known():
        raise SchemaUnknown(f"database schema {found} is newer than this weightyard: {_NEWER}")


def require_current(database: Database) -> None:
    """Raises SchemaUnknown unless the database has exactly this weightyard's schema."""
    require_known(database)
    found = current(database)
    if found != newest():
        state = f"has schema {found}" if found else "has no schema yet"
        raise SchemaUnknown(f"database {state}, {newest()} is needed: {_UPGRADE}")


def _known() -> set[str]:
    """The revisions there are: the first word of each migration's file name."""
    folder = resources.files("weightyard") / "migrations" / "versions"
    return {file.name.partition("_")[0] for file in folder.iterdir() if file.name.endswith(".py")}


def _migrate(tx: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    if tx.dialect.name == "postgresql":
        # On SQLite every transaction that writes is alone anyway. Alembic sees what is left to do
        # only after this, so a process that had to wait finds nothing to do.
        tx.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    config = Config()
    config.set_main_option("script_location", str(resources.files("weightyard") / "migrations"))
    config.attributes["connection"] = tx
    command.upgrade(config, "head")
    if tx.scalar(select(schema.registry.c.id)) is None:
        tx.execute(
            insert(schema.registry).values(
                id=1,
                registry_id=secrets.token_hex(16),
                block_bytes=DEFAULT_BLOCK_BYTES,
                generation=0,
            )
        )
