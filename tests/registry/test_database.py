"""A database's errors mean to callers what they can do about them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select, text

from weightyard.errors import BadSetting, Bug, RegistryUnavailable
from weightyard.registry import schema
from weightyard.registry.database import Database

QUOTA = insert(schema.quotas).values(project="team", versions=1)

WRONG = ("SELECT nothing FROM packs", "SELECT 1 FROM no_such_table", "SELEC 1")


@pytest.mark.parametrize("statement", WRONG)
def test_a_wrong_statement_is_a_bug_and_not_tried_again(database: Database, statement: str) -> None:
    tried: list[str] = []

    def work(tx: Connection) -> None:
        tried.append(statement)
        tx.execute(text(statement))

    with pytest.raises(Bug, match="database: "):
        database.read(work)
    with pytest.raises(Bug):
        database.write(work)
    assert len(tried) == 2


def test_a_broken_rule_of_the_schema_is_a_bug(database: Database) -> None:
    database.write(lambda tx: tx.execute(QUOTA))
    with pytest.raises(Bug):
        database.write(lambda tx: tx.execute(QUOTA))
    edge = insert(schema.version_lists).values(version_id=7, list_id=7)
    with pytest.raises(Bug):
        database.write(lambda tx: tx.execute(edge))


def test_work_that_met_another_writer_finds_what_that_one_left(
    postgres: Callable[[], str], opened: Callable[[str], Database]
) -> None:
    database = opened(postgres())
    looked, written = threading.Barrier(2, timeout=10), []

    def put(tx: Connection) -> str:
        if tx.scalar(select(schema.quotas.c.project)) is not None:
            return "found"
        if not looked.broken and len(written) < 2:
            written.append(1)
            looked.wait()  # both have seen nothing before either writes
        tx.execute(QUOTA)
        return "made"

    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(database.write(put))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(answers) == ["found", "made"]


def test_a_database_that_is_away_is_unavailable(
    tmp_path: Path, opened: Callable[[str], Database]
) -> None:
    nowhere = opened(f"sqlite:///{tmp_path}/no/such/folder/registry.db")
    with pytest.raises(RegistryUnavailable):
        nowhere.read(lambda tx: tx.scalar(select(1)))
    silent = opened("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(RegistryUnavailable):
        silent.write(lambda tx: tx.scalar(select(1)))


def test_a_user_without_rights_is_a_matter_of_setting_up(
    postgres: Callable[[], str], opened: Callable[[str], Database]
) -> None:
    database = opened(postgres())

    def work(tx: Connection) -> None:
        tx.execute(text("CREATE ROLE weightyard_stranger"))
        tx.execute(text("SET LOCAL ROLE weightyard_stranger"))
        tx.execute(QUOTA)

    with pytest.raises(BadSetting, match="permission denied"):
        database.write(work)


@pytest.fixture
def opened() -> Iterator[Callable[[str], Database]]:
    """Opens databases, and closes them after the test."""
    databases: list[Database] = []

    def open_database(url: str) -> Database:
        databases.append(Database(url))
        return databases[-1]

    yield open_database
    for database in databases:
        database.close()
