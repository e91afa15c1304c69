from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from pushing import BERT
from sqlalchemy import Connection, select, text

from weightyard.errors import SchemaUnknown
from weightyard.names import AliasName, ModelName, Ref
from weightyard.registry import migrate, schema
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry


def scripts_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("weightyard") / "migrations"))
    return config


def older(folder: Path, revision: str, *statements: str) -> Database:
    """An SQLite database as an older weightyard left it, after these statements."""
    return made_older(Database(f"sqlite:///{folder}/old.db"), revision, *statements)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database for `made_older` to make anew."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres")()  # type: ignore[no-any-return]
    return f"sqlite:///{tmp_path}/old.db"


def made_older(database: Database, revision: str, *statements: str) -> Database:
    """The database anew, as an older weightyard would have left it."""

    def make(tx: Connection) -> None:
        if not database.is_sqlite:
            tx.execute(text("DROP SCHEMA public CASCADE"))
            tx.execute(text("CREATE SCHEMA public"))
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


def test_those_who_upgrade_a_database_at_once_all_succeed(empty_url: str) -> None:
    made_older(Database(empty_url), "0001").close()
    databases = [Database(empty_url) for _ in range(4)]
    with ThreadPoolExecutor(len(databases)) as together:
        done = [together.submit(migrate.upgrade, database) for database in databases]
    assert [one.exception() for one in done] == [None] * len(databases)
    assert migrate.current(databases[0]) == migrate.newest()
    for database in databases:
        database.close()


def test_models_and_versions_from_before_there_were_runs_are_as_they_were(
    empty_url: str,
) -> None:
    database = made_older(Database(empty_url), "0002", *_OLD_ROWS)
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


@pytest.mark.parametrize("revision", ["0001", "0002", "0003", "0004"])
def test_a_lease_from_before_its_author_was_kept_still_holds_and_is_nobodys(
    empty_url: str, revision: str
) -> None:
    database = made_older(Database(empty_url), revision, *_OLD_ROWS, *_OLD_LEASE)
    with pytest.raises(SchemaUnknown, match=f"{revision}.*db upgrade"):
        Registry(database)
    migrate.upgrade(database)
    registry = Registry(database, who="alice")
    ref = Ref.parse("team/bert@prod")
    assert registry.resolve(ref).number == 1
    old = registry.find_lease(5)
    assert (old.ref, old.holder, old.author) == ("team/bert@v1", "serving-7", None)
    assert registry.take_lease(ref, "serving-8", 60).author == "alice"
    registry.move_alias(BERT, AliasName("prod"), None)
    registry.remove(Ref.parse("team/bert@v1"))
    assert registry.resolve_readable(BERT, 1).number == 1, "both leases hold it"
    database.close()


_OLD_LEASE = (
    "INSERT INTO read_leases (id, version_id, holder, until_ms)"
    " VALUES (5, 77, 'serving-7', 9000000000000)",
    "INSERT INTO registry (id, registry_id, block_bytes, generation)"
    f" VALUES (1, '{'ab' * 16}', 1024, 0)",
)
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
