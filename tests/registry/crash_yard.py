"""The yard that operations crash in: all of it can be taken down and put back.

So one run serves many points: what a process that is killed at a call leaves in a yard is what
there was before that call, and whoever goes on there cannot tell the one from the other.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import crash_world
import psycopg
from blake3 import blake3
from psycopg.types.string import TextLoader
from sqlalchemy import Table
from sqlalchemy.ext.compiler import compiles
from waiting import eventually

from weightyard.registry import migrate, schema
from weightyard.registry.database import Database, now_ms
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store

_CONTENT_COUNTS = ("packs", "manifests", "staging")
"""Folders of the store; in the others are records, which have times in them."""

Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = Mapping[str, Sequence[Row]]


@compiles(now_ms, "sqlite")
@compiles(now_ms, "postgresql")
def _standing_still(element: now_ms, compiler: Any, **options: Any) -> str:
    """The database's clock here: an operation that is done again leaves the very same yard."""
    return "1800000000000"


@dataclass(frozen=True, slots=True)
class State:
    """All that is in a yard."""

    rows: Rows
    """By table. PostgreSQL's sequences, too, which are not rolled back."""
    files: Mapping[str, bytes | None]
    """By path below the store. Folders have no content."""

    def fingerprint(self) -> str:
        """The same for states that differ in nothing but times."""
        seen = blake3()
        for path, content in sorted(self.files.items()):
            if content is not None:
                seen.update(f"{path} {len(content)}\n".encode())
                if path.startswith(_CONTENT_COUNTS):
                    seen.update(content)
        for table in schema.metadata.sorted_tables:
            kept = [i for i, column in enumerate(table.c) if not _is_time(column.name)]
            rows = [[row[i] for i in kept] for row in self.rows[table.name]]
            seen.update(repr(rows).encode())
        return seen.hexdigest()


def _is_time(column: str) -> bool:
    """Or has times in it."""
    return column.endswith(("_ms", "content"))


class World:
    """Where workers have their yards: each a folder with a store and, with SQLite, the database."""

    def __init__(self, work: Path, server: str | None) -> None:
        self.work = work
        self.server = server
        # Without a name of its own, PostgreSQL's client takes it from the environment, and SQLite
        # looks into the current folder: an engine that is warm before forking serves every yard.
        self.database = self._open()
        self.gc_database = self._open()
        """For gc while another operation is under way: its calls are counted apart."""

    def begin(self, jobs: int) -> None:
        """Make the yard that every point begins with, and a place for each worker's."""
        for folder in ("known", "base"):
            (self.work / folder).mkdir(parents=True)
        if self.server is not None:
            self._execute("CREATE DATABASE crash_base")
        os.chdir(self.work / "base")
        os.environ["PGDATABASE"] = "crash_base"
        migrate.upgrade(self.database)
        self.registry = Registry(self.database, store=LocalStore(Path("store")), who="alice")
        self.gc_registry = Registry(self.gc_database, who="bob")
        crash_world.begin(self.database, LocalStore(Path("store")))
        self.close()
        yard = self.yard("base")
        yard.wait_until_left()
        self.base = yard.take()
        yard.close()
        for job in range(jobs):
            shutil.copytree(self.work / "base", self.work / str(job))
            if self.server is not None:
                self._execute(f"CREATE DATABASE crash_{job} TEMPLATE crash_base")

    def yard(self, job: int | str) -> Yard:
        """That of a worker, which this process is in from now on."""
        os.chdir(self.work / str(job))
        os.environ["PGDATABASE"] = f"crash_{job}"
        return Yard(self.server)

    def answer(self, job: int) -> Path:
        return self.work / f"answer-{job}"

    def is_new(self, state: str) -> bool:
        """Whether no worker has judged this state yet."""
        try:
            (self.work / "known" / blake3(state.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def close(self) -> None:
        self.database.close()
        self.gc_database.close()

    def end(self, jobs: int) -> None:
        self.close()
        if self.server is not None:
            for name in ("base", *range(jobs)):
                self._execute(f"DROP DATABASE IF EXISTS crash_{name} WITH (FORCE)")

    def _open(self) -> Database:
        return Database(self.server or "sqlite:///file:registry.db?uri=true")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.server or "", dbname="postgres", autocommit=True) as connection:
            connection.execute(statement)


class Yard:
    """The yard in the current folder."""

    _stores = count()

    def __init__(self, server: str | None) -> None:
        self._folder = Path("store").absolute()
        self._tables = _Tables() if server is None else _PostgresTables(server)

    def store(self) -> Store:
        store = LocalStore(self._folder)
        # Names of packs come again at every point, and readers remember where a store's packs lie.
        store.url += f"?{next(self._stores)}"
        return store

    def take(self) -> State:
        """What others would find if all who are at work here were killed now."""
        return State(self._tables.take(), dict(self._walk(self._folder)))

    def put(self, state: State) -> State:
        """Make the yard what it was. Returns what it is until then.

        What is so already is not touched: a file that someone has open, and is not to find gone,
        stays the same file.
        """
        was = self.take()
        self._tables.put(state.rows, was.rows)
        there = was.files
        for path in sorted(there.keys() - state.files.keys(), reverse=True):
            target = self._folder / path
            target.rmdir() if there[path] is None else target.unlink()
        for path, content in state.files.items():
            target = self._folder / path
            if content is None:
                target.mkdir(exist_ok=True)
            elif there.get(path) != content:
                target.write_bytes(content)
        return was

    def wait_until_left(self) -> None:
        """A server ends a session some time after its client has gone; only then its locks go."""
        self._tables.wait_until_left()

    def close(self) -> None:
        self._tables.close()

    def _walk(self, folder: Path) -> Iterator[tuple[str, bytes | None]]:
        """Folders before what is in them."""
        for entry in os.scandir(folder):
            path = Path(entry.path)
            name = path.relative_to(self._folder).as_posix()
            if entry.is_dir():
                yield name, None
                yield from self._walk(path)
            else:
                yield name, path.read_bytes()


class _Tables:
    """A yard's tables, in SQLite."""

    _mark = "?"
    """Stands for a value."""

    def take(self) -> dict[str, list[Row]]:
        with self._connected() as connection:
            return self._take(connection)

    def put(self, rows: Rows, there: Rows) -> None:
        with self._connected() as connection:
            cursor = connection.cursor()
            cursor.execute("BEGIN")
            for table in schema.metadata.sorted_tables:
                self._change(cursor, table, there[table.name], rows[table.name])
            cursor.execute("COMMIT")

    def wait_until_left(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _connected(self) -> AbstractContextManager[Any]:
        # For each use: a process must not have SQLite's files open when it forks.
        return closing(sqlite3.connect("registry.db", isolation_level=None))

    def _take(self, connection: Any) -> dict[str, list[Row]]:
        return {name: connection.execute(one).fetchall() for name, one in _SELECTS.items()}

    def _change(
        self, cursor: Any, table: Table, there: Sequence[Row], wanted: Sequence[Row]
    ) -> None:
        if there == wanted:
            return
        gone, new = set(there).difference(wanted), set(wanted).difference(there)
        keys = [i for i, column in enumerate(table.c) if column.primary_key]
        which = " AND ".join(f'"{table.c[i].name}" = {self._mark}' for i in keys)
        marks = ", ".join(self._mark for _ in table.c)
        if gone:
            some = [[row[i] for i in keys] for row in gone]
            cursor.executemany(f"DELETE FROM {table} WHERE {which}", some)
        if new:
            cursor.executemany(f"INSERT INTO {table} ({_columns(table)}) VALUES ({marks})", new)


class _PostgresTables(_Tables):
    _mark = "%s"

    def __init__(self, server: str) -> None:
        self._connection = psycopg.connect(server, autocommit=True)
        self._connection.adapters.register_loader("json", TextLoader)  # goes back as it came
        self._connection.execute("SET session_replication_role = replica")  # in any order

    def put(self, rows: Rows, there: Rows) -> None:
        super().put(rows, there)
        for name, value in rows["sequences"]:
            setval = "SELECT setval(%s, coalesce(%s, 1), %s)"
            self._connection.execute(setval, [name, value, value is not None])

    def wait_until_left(self) -> None:
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        eventually(lambda: self._connection.execute(others).fetchone() == (0,))

    def close(self) -> None:
        self._connection.close()

    def _connected(self) -> AbstractContextManager[Any]:
        return nullcontext(self._connection)

    def _take(self, connection: Any) -> dict[str, list[Row]]:
        with connection.pipeline():
            asked = {name: connection.execute(one) for name, one in _SELECTS.items()}
            asked["sequences"] = connection.execute(
                "SELECT sequencename, last_value FROM pg_sequences ORDER BY 1"
            )
        return {name: cursor.fetchall() for name, cursor in asked.items()}


def _columns(table: Table) -> str:
    return ", ".join(f'"{column.name}"' for column in table.c)


_SELECTS = {
    table.name: f"SELECT {_columns(table)} FROM {table} ORDER BY "
    + ", ".join(f'"{column.name}"' for column in table.primary_key)
    for table in schema.metadata.sorted_tables
}
