"""One collector at a time, and none for ever."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from weightyard.errors import Conflict, NotAllowed, RegistryUnavailable
from weightyard.registry.alone import only_one
from weightyard.registry.database import Database


def test_a_second_collector_is_told_that_one_is_running(
    database: Database, database_url: str
) -> None:
    other = Database(database_url)
    held, wanted = only_one(database, "gc"), only_one(other, "gc")
    with held, pytest.raises(Conflict, match="running already"), wanted:
        raise AssertionError("two at once")
    with only_one(other, "gc"):
        pass
    other.close()


def test_a_lock_that_another_user_left_behind_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        database = Database(f"sqlite:///{folder}/registry.db")
        with only_one(database, "gc"):
            pass
        left = Path(folder, "registry.db.gc")
        left.chmod(0o400)
        if is_root := os.geteuid() == 0:
            os.seteuid(65534)  # to root nothing is forbidden
        try:
            with pytest.raises(NotAllowed, match=r"registry\.db\.gc"), only_one(database, "gc"):
                raise AssertionError("two users at once")
        finally:
            if is_root:
                os.seteuid(0)
        database.close()


@pytest.mark.parametrize("lost", ["pg_try_advisory_lock", "pg_advisory_unlock"])
def test_a_lock_whose_answer_was_lost_is_not_kept_for_ever(
    postgres: Callable[[], str], lost: str
) -> None:
    url = postgres()
    database, other = Database(url), Database(url)
    dialect: Any = database.engine.dialect
    execute = dialect.do_execute

    def lose(cursor: Any, statement: str, *arguments: Any) -> None:
        execute(cursor, statement, *arguments)
        if lost in statement:
            raise psycopg.OperationalError("injected: the answer was lost")

    dialect.do_execute = lose
    try:
        with only_one(database, "gc"):
            pass
    except RegistryUnavailable:
        assert lost == "pg_try_advisory_lock"
    until = time.monotonic() + 60
    while not _can_be_had(other):  # the server has to notice that the connection was cut
        assert time.monotonic() < until
        time.sleep(0.01)
    database.close()
    other.close()


def _can_be_had(database: Database) -> bool:
    try:
        with only_one(database, "gc"):
            return True
    except Conflict:
        return False
