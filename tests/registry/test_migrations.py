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
from pushing import BERT
from sqlalchemy import Connection, select, text

from weightyard.names import ModelName, Ref
from weightyard.registry import migrate, schema
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry


def scripts_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("weightyard") / "migrations"))
    return config


def older(folder: Path, revision: str, *statements: str) -> Database:
    """A database as an older weightyard left it, after these statements."""
    database = Database(f"sqlite:///{folder}/old.db")

    def make(tx: Connection) -> None:
        config = scripts_config()
        config.attributes["connection"] = tx
        command.upgrade(config, revision)
        for statement in statements:
            tx.execute(text(statement))

    database.write(make)
    return database


def test_each_migration_is_named_by_its_revision_and_the_newest_is_the_head() -> None:
    scripts = ScriptDirectory.from_config(scripts_config())
    assert {script.revision for script in scripts.walk_revisions()} == migrate._known()
    assert migrate.newest() == scripts.get_current_head()


def test_a_database_of_the_first_schema_keeps_what_it_has_and_gets_what_is_new(
    tmp_path: Path,
) -> None:
    database = older(tmp_path, "0001", "INSERT INTO registry VALUES (1, 'mine', NULL, 1024, 0)")
    migrate.upgrade(database)
    row = database.read(lambda tx: tx.execute(select(schema.registry)).one())
    assert (row.registry_id, row.block_bytes, row.dedup) == ("mine", 1024, "yard")
    database.close()


def test_models_and_versions_from_before_there_were_runs_are_as_they_were(
    database_url: str,
) -> None:
    database = Database(database_url)

    def make_old(tx: Connection) -> None:
        tx.execute(text("DROP TABLE upload_ranks"))
        tx.execute(text("DROP INDEX ix_versions_model_id_step"))
        tx.execute(text("ALTER TABLE versions DROP COLUMN step"))
        tx.execute(text("ALTER TABLE models DROP COLUMN generation"))
        tx.execute(text("UPDATE alembic_version SET version_num = '0002'"))
        for statement in _OLD_ROWS:
            tx.execute(text(statement))

    database.write(make_old)
    migrate.upgrade(database)
    registry = Registry(database, who="alice")
    version = registry.resolve(Ref.parse("team/bert@prod"))
    assert (version.number, version.step) == (1, None)
    model = registry.model(BERT)
    assert (model.kind, model.generation, model.latest_step) == ("model", None, None)
    assert registry.begin_generation(ModelName("team", "run42")).generation == 1
    database.close()


def test_an_older_sqlite_database_gets_statistics_of_tables_and_indexes_that_are_there(
    tmp_path: Path,
) -> None:
    row = "INSERT INTO registry VALUES (1, 'mine', NULL, 1024, 0, 'yard')"
    database = older(tmp_path, "0003", row, "ANALYZE")
    migrate.upgrade(database)
    said = select(text("tbl"), text("coalesce(idx, tbl)")).select_from(text("sqlite_stat1"))
    there = select(text("tbl_name"), text("name")).select_from(text("sqlite_master"))
    of_indexes = database.read(lambda tx: {tuple(row) for row in tx.execute(said)})
    assert ("placements", "ix_placements_block_id") in of_indexes
    assert of_indexes <= database.read(lambda tx: {tuple(row) for row in tx.execute(there)})
    database.close()


_OLD_ROWS = (
    "INSERT INTO models (id, project, name, kind, created_ms, created_by, last_number)"
    " VALUES (77, 'team', 'bert', 'model', 0, 'alice', 1)",
    "INSERT INTO manifests (id, name, state, state_ms, bytes)"
    f" VALUES (77, '{'5f' * 32}', 'live', 0, 1)",
    "INSERT INTO versions (id, model_id, number, manifest_id, author, message, metrics, tags,"
    " metadata, structure, files, tensors, logical_bytes, created_ms)"
    " VALUES (77, 77, 1, 77, 'alice', '', '{}', '{}', '{}', '{}', 0, 0, 0, 0)",
    "INSERT INTO aliases (model_id, alias, version_id) VALUES (77, 'prod', 77)",
)


def test_migrations_make_the_tables_that_are_worked_with(database: Database) -> None:
    def look(tx: Connection) -> list[object]:
        context = MigrationContext.configure(tx, opts={"compare_type": True})
        return list(compare_metadata(context, schema.metadata))

    assert database.read(look) == []


def test_opening_a_yard_that_is_up_to_date_does_not_load_alembic(tmp_path: object) -> None:
    script = f"""
import sys
from weightyard.opening import open_yard
open_yard({str(tmp_path)!r}).close()
for name in [name for name in sys.modules if name.startswith("alembic")]:
    del sys.modules[name]
open_yard({str(tmp_path)!r}).close()
print("alembic" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "False", done.stderr
