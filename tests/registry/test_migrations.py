from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, select, text

from weightyard.registry import migrate, schema
from weightyard.registry.database import Database


def test_each_migration_is_named_by_its_revision_and_the_newest_is_the_head() -> None:
    config = Config()
    config.set_main_option("script_location", str(resources.files("weightyard") / "migrations"))
    scripts = ScriptDirectory.from_config(config)
    assert {script.revision for script in scripts.walk_revisions()} == migrate._known()
    assert migrate.newest() == scripts.get_current_head()


def test_a_database_of_the_first_schema_keeps_what_it_has_and_gets_what_is_new(
    tmp_path: Path,
) -> None:
    config = Config()
    config.set_main_option("script_location", str(resources.files("weightyard") / "migrations"))
    database = Database(f"sqlite:///{tmp_path}/old.db")

    def make_old(tx: Connection) -> None:
        config.attributes["connection"] = tx
        command.upgrade(config, "0001")
        tx.execute(text("INSERT INTO registry VALUES (1, 'mine', NULL, 1024, 0)"))

    database.write(make_old)
    migrate.upgrade(database)
    row = database.read(lambda tx: tx.execute(select(schema.registry)).one())
    assert (row.registry_id, row.block_bytes, row.dedup) == ("mine", 1024, "yard")
    database.close()


def test_migrations_make_the_tables_that_are_worked_with(database: Database) -> None:
    def look(tx: Connection) -> list[object]:
        context = MigrationContext.configure(tx, opts={"compare_type": True})
        return list(compare_metadata(context, schema.metadata))

    assert database.read(look) == []


def test_opening_a_yard_that_is_up_to_date_does_not_load_alembic(tmp_path: object) -> None:
    script = f"""
import sys
from weightyard.yard import open_yard
open_yard({str(tmp_path)!r}).close()
for name in [name for name in sys.modules if name.startswith("alembic")]:
    del sys.modules[name]
open_yard({str(tmp_path)!r}).close()
print("alembic" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr
