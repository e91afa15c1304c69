"""What a ref means is asked of the database again as soon as anyone changed anything in it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from weightyard.errors import NoSuchThing
from weightyard.opening import open_yard
from weightyard.registry.database import Database
from weightyard.settings import Settings
from weightyard.yard import Yard


@pytest.fixture
def two(tmp_path: Path) -> tuple[Yard, Yard]:
    """Two that know nothing of each other, as those of two processes."""
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    url = str(tmp_path / "store")
    return open_yard(url, settings=settings), open_yard(url, settings=settings)


def test_a_ref_that_another_process_moved_means_the_new_version_at_once(
    two: tuple[Yard, Yard],
) -> None:
    reading, writing = two
    with reading, writing:
        for number in range(1, 4):
            writing.push({"w": torch.full((3,), float(number))}, "team/bert", alias="prod")
            for ref in ("team/bert", "team/bert@prod"):
                assert [reading.resolve(ref).number for _ in range(3)] == [number] * 3


def test_a_version_that_another_process_removed_is_gone_at_once(two: tuple[Yard, Yard]) -> None:
    reading, writing = two
    with reading, writing:
        writing.push({"w": torch.zeros(3)}, "team/bert")
        writing.push({"w": torch.ones(3)}, "team/bert")
        assert reading.resolve("team/bert@v1").number == 1
        writing.delete("team/bert@v1")
        with pytest.raises(NoSuchThing):
            reading.resolve("team/bert@v1")


def test_what_a_ref_meant_is_forgotten_with_the_database_file(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "store"), settings=settings) as yard:
        yard.push({"w": torch.zeros(3)}, "team/bert")
        yard.settle()
        database = yard.registry.database
        file, other = Path(str(database.url.database)), tmp_path / "other.db"
        with closing(sqlite3.connect(file)) as now, closing(sqlite3.connect(other)) as copy:
            now.backup(copy)
        yard.push({"w": torch.ones(3)}, "team/bert")
        yard.settle()
        assert yard.resolve("team/bert").number == 2
        other.replace(file)  # as who puts yesterday's back
        for beside in ("-wal", "-shm"):
            file.with_name(file.name + beside).unlink(missing_ok=True)
        database.engine.dispose()  # afterwards: a thread may have connected until now
        assert yard.resolve("team/bert").number == 1


def test_an_unchanged_database_is_asked_for_a_ref_once(
    two: tuple[Yard, Yard], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = two
    with reading, writing:
        writing.push({"w": torch.zeros(3)}, "team/bert")
        writing.settle()
        _ = writing.registry  # what was done is written
        reading.load("team/bert", cache=False)  # notes that it is used
        asked: list[object] = []
        ask = Database.ask

        def counted(database: Database, work: Any) -> Any:
            asked.append(work)
            return ask(database, work)

        monkeypatch.setattr(Database, "ask", counted)
        reading.load("team/bert", cache=False)
        assert not asked
        monkeypatch.setattr(Database, "stamp", lambda self: None)  # as of PostgreSQL
        reading.resolve("team/bert")
        reading.resolve("team/bert")
        assert len(asked) == 2
