"""Schema versions: Alembic migrations that ship with the package."""

from __future__ import annotations

import secrets
from importlib import resources

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, select

from weightyard.errors import SchemaUnknown
from weightyard.format.block import DEFAULT_BLOCK_BYTES
from weightyard.registry import schema
from weightyard.registry.database import Database

_UPGRADE = "run `weightyard db upgrade`"


def upgrade(database: Database) -> None:
    """Bring a database, also an empty one, to the schema of this weightyard. Idempotent."""

    def work(tx: Connection) -> None:
        config = _config()
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

    require_known(database)
    database.write(work)


def current(database: Database) -> str | None:
    """The schema a database has, or None for an empty one."""
    return database.read(lambda tx: MigrationContext.configure(tx).get_current_revision())


def newest() -> str:
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def require_known(database: Database) -> None:
    """Raises SchemaUnknown for a schema made by a newer weightyard."""
    found = current(database)
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if found is not None and found not in known:
        raise SchemaUnknown(f"database schema {found} is newer than this weightyard: upgrade it")


def require_current(database: Database) -> None:
    """Raises SchemaUnknown unless the database has exactly this weightyard's schema."""
    require_known(database)
    found = current(database)
    if found != newest():
        state = f"has schema {found}" if found else "has no schema yet"
        raise SchemaUnknown(f"database {state}, {newest()} is needed: {_UPGRADE}")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("weightyard") / "migrations"))
    return config
