"""The database: SQLite or PostgreSQL, with transactions, and its errors turned into ours."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Integer,
    LargeBinary,
    Text,
    any_,
    bindparam,
    cast,
    create_engine,
    event,
    exc,
    func,
    make_url,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from weightyard import jitter
from weightyard.errors import BadSetting, Bug, NotAllowed, RegistryUnavailable, StoreFull, YardError
from weightyard.logs import Log

_log = Log(__name__)

_T = TypeVar("_T")

_ATTEMPTS = 8
_TRY_AGAIN = {"40001", "40P01", "55P03"}
"""PostgreSQL: serialisation failure, deadlock, lock not available. Nothing happened."""
_MET = "23505"
"""PostgreSQL: another transaction inserted the same key first. Run again, the work finds it."""
_MEETINGS = 3
"""How many attempts may meet that before it counts as an error."""
_BUSY_S = 30
"""How long SQLite may wait for a file that others use."""
_SQLITE: dict[str, Any] = {"timeout": _BUSY_S, "check_same_thread": False}
_DEADLINES = {
    "connect_timeout": 10,
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
"""PostgreSQL: how long a server may say nothing before it is taken for gone (libpq's own names).

Without them a host that vanished is waited for until the kernel gives up, a quarter of an hour.
"""
_LOCK_TIMEOUT = "60s"
"""PostgreSQL: how long a statement may wait for others; then the transaction is run again."""
_FORBIDDEN = "42501"
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""SQLite: no room to write; no room for the file its processes share, which even a read needs."""
_INVALID = re.compile("connection is bad: invalid .* value")
"""What libpq says of a wrong option, before it connects; such an error has no code."""
_MISTAKES = (exc.ProgrammingError, exc.IntegrityError, exc.DataError, exc.NotSupportedError)
"""Errors that tell of the statement, not of the database's state."""


_DRIVERS = ("sqlite", "sqlite+pysqlite", "postgresql+psycopg")


class now_ms(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it is
    """The database's clock: every host measures leases and grace times by it."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _now_sqlite(element: now_ms, compiler: Any, **options: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(now_ms, "postgresql")
def _now_postgresql(element: now_ms, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch from clock_timestamp()) * 1000 AS BIGINT)"


class Database:
    """SQLite or PostgreSQL. Thread-safe; SQLAlchemy pools the connections."""

    def __init__(self, url: str) -> None:
        try:
            self.url = make_url(url)
        except (exc.ArgumentError, ValueError):  # not chained: its text has the URL's password
            raise BadSetting("the database's URL: use sqlite:///… or postgresql://…") from None
        if self.url.drivername == "postgresql":
            self.url = self.url.set(drivername="postgresql+psycopg")
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.url.drivername not in _DRIVERS:
            raise BadSetting(f"database {self.url.drivername}: use sqlite:/// or postgresql://")
        try:
            self.engine = self._make_engine()
        except (exc.ArgumentError, ValueError) as why:
            raise _bad_url(why) from None
        self._watching: sqlite3.Connection | None = None
        self._watched: tuple[int, int] | None = None
        self._watch_lock = threading.Lock()

    @property
    def shown(self) -> str:
        """Its URL without its password."""
        try:
            return self.url.render_as_string(hide_password=True)
        except UnicodeEncodeError:  # a file of SQLite in a folder whose name is not UTF-8
            return f"sqlite:///{self.url.database}"

    @property
    def is_there(self) -> bool:
        """Whether connecting makes no new database, as it does where SQLite finds no file."""
        return not self.is_sqlite or Path(str(self.url.database)).exists()

    def write(self, work: Callable[[Connection], _T]) -> _T:
        """Run work in one transaction that may change things, and commit it.

        On SQLite nothing else writes meanwhile. Where the database says that nothing happened
        (a deadlock, a busy file), the work is run again: so it must change nothing but the
        database. Raises RegistryUnavailable, after which it is unknown whether it happened.
        Nothing happened, and trying again is no use, after NotAllowed and StoreFull (SQLite's
        file), BadSetting (rights in PostgreSQL), and Bug (a statement that is wrong).
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._connected(write=True) as connection, connection.begin():
                    return work(connection)
            except exc.DBAPIError as why:
                if not _is_worth_another_go(why, attempt):
                    raise self._as_ours(why) from why
                _log.info("registry.tried_again", attempt=attempt, reason=_said(why))
                time.sleep(jitter.up_to(0.02 * 2**attempt))
        raise AssertionError("unreachable")

    def write_twice(self, work: Callable[[Connection], _T]) -> _T:
        """As `write`, repeated if its answer was lost: for work that may be done twice."""
        try:
            return self.write(work)
        except RegistryUnavailable:
            return self.write(work)

    def write_soon(self, work: Callable[[Connection], _T], within_s: float) -> _T:
        """As `write`, for work that must not make its caller wait; it is tried only once.

        `within_s`: how long to wait while others write. Raises as `write`.
        """
        try:
            with (
                self._connected(write=True) as connection,
                self._impatient(connection, round(1000 * within_s)),
                connection.begin(),
            ):
                if not self.is_sqlite:
                    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {1000 * within_s:.0f}")
                return work(connection)
        except exc.DBAPIError as why:
            raise self._as_ours(why) from why

    def read(self, work: Callable[[Connection], _T]) -> _T:
        """Run work that changes nothing, on one consistent view.

        Raises as `write`.
        """
        try:
            with self._connected(write=False) as connection, connection.begin():
                return work(connection)
        except exc.DBAPIError as why:
            raise self._as_ours(why) from why

    def ask(self, work: Callable[[Connection], _T]) -> _T:
        """As `read`, for work that is one statement: it sees one view without a transaction.

        Beginning and ending one would take about as long as the answer.
        """
        try:
            with self._connected(write=None) as connection:
                return work(connection)
        except exc.DBAPIError as why:
            raise self._as_ours(why) from why

    def stamp(self) -> tuple[int, ...] | None:
        """Changes whenever anything is committed. None where that cannot be told quickly.

        SQLite's `data_version` counts what other connections commit, so this connection is used for
        nothing else. It is of the file that was opened; if another took its place, that shows in
        the stamp, too.
        """
        if not self.is_sqlite or self.url.database in (None, "", ":memory:"):
            return None
        try:
            with self._watch_lock:
                seen = os.stat(str(self.url.database))
                file = seen.st_dev, seen.st_ino
                if self._watching is None or self._watched != file:
                    where, how = self.engine.dialect.create_connect_args(self.url)
                    self._stop_watching()
                    self._watching = sqlite3.connect(where[0], **{**how, **_SQLITE})
                    self._watched = file
                (version,) = self._watching.execute("PRAGMA data_version").fetchone()
                return *file, version
        except (sqlite3.Error, OSError):
            return None  # the query that follows will tell what is wrong

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.close()
            self._watching = None

    def close(self) -> None:
        with self._watch_lock:
            self._stop_watching()
        self.engine.dispose()

    @contextmanager
    def _connected(self, *, write: bool | None) -> Iterator[Connection]:
        """`write`: whether the transaction may change things; None: there is no transaction."""
        try:
            opened = self.engine.connect()
        except exc.TimeoutError as why:
            raise RegistryUnavailable("database: all connections are in use") from why
        with opened as connection:
            if not write and not self.is_sqlite:
                level = "AUTOCOMMIT" if write is None else "REPEATABLE READ"
                connection = connection.execution_options(
                    isolation_level=level, postgresql_readonly=True
                )
            yield connection.execution_options(weightyard_write=write)

    @contextmanager
    def _impatient(self, connection: Connection, within_ms: int) -> Iterator[None]:
        """Have SQLite wait only so long. Said beforehand, as it waits when a transaction begins."""
        if not self.is_sqlite:
            yield
            return
        driver: Any = connection.connection.driver_connection
        driver.execute(f"PRAGMA busy_timeout={within_ms}")
        try:
            yield
        finally:
            driver.execute(f"PRAGMA busy_timeout={_BUSY_S}000")

    def _as_ours(self, why: exc.DBAPIError) -> YardError:
        """The error of ours that a database's error is: it is away, set up wrongly, or misused."""
        said = f"database: {_said(why)}"
        if getattr(why.orig, "sqlstate", None) == _FORBIDDEN:
            return BadSetting(f"{said}: grant it to the user of the database's URL")
        # SQLite has one class for a file that is locked, a disk that is full and a wrong statement.
        code = getattr(why.orig, "sqlite_errorcode", None)
        if code in _FULL:
            return StoreFull(f"{said}: {self.url.database}: make room on its disk")
        if code is not None and _is_forbidden(code, str(self.url.database)):
            return NotAllowed(
                f"{said}: {self.url.database}: this user must be able to write it and its folder"
            )
        is_mistake = isinstance(why, _MISTAKES) or code == sqlite3.SQLITE_ERROR
        return Bug(said) if is_mistake else RegistryUnavailable(said)

    def files_in(self, folder: Path | None) -> str | None:
        """What the names of its files in a folder begin with; None: it has none there.

        SQLite puts files beside the database, and so does `alone`.
        """
        if not self.is_sqlite or folder is None or not self.url.database:
            return None
        file = Path(self.url.database).absolute()
        return file.name if file.parent.resolve() == folder.resolve() else None

    def _make_engine(self) -> Engine:
        if not self.is_sqlite:
            try:
                engine = create_engine(
                    self.url,
                    pool_pre_ping=True,
                    pool_size=8,
                    max_overflow=24,
                    connect_args={
                        name: value
                        for name, value in _DEADLINES.items()
                        if name not in self.url.query
                    },
                )
            except ModuleNotFoundError:
                raise BadSetting("PostgreSQL needs psycopg: install weightyard[service]") from None
            event.listen(engine, "do_connect", _connect_postgresql)
            return engine
        engine = create_engine(self.url, connect_args=_SQLITE)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine


def _connect_postgresql(
    dialect: Dialect, record: object, arguments: list[Any], named: dict[str, Any]
) -> Any:
    """Connect. Raises BadSetting for a wrong option, or a database that cannot keep every text.

    Where the server's locale is C, PostgreSQL makes databases in SQL_ASCII. Such a one returns
    texts as bytes, which would fail far from the cause.
    """
    try:
        connection: Any = dialect.connect(*arguments, **named)
    except dialect.loaded_dbapi.ProgrammingError as why:  # an option that libpq does not know
        raise _bad_url(why) from None
    except dialect.loaded_dbapi.OperationalError as why:
        if _INVALID.match(str(why)):
            raise _bad_url(why) from None
        raise
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in (None, "UTF8"):  # a proxy in between may not tell
        connection.close()
        raise BadSetting(
            f"the database's encoding is {encoding}, which cannot keep every text: make one by "
            "CREATE DATABASE … TEMPLATE template0 ENCODING 'UTF8'"
        )
    _limit_waiting(connection)
    return connection


def _bad_url(why: Exception) -> BadSetting:
    return BadSetting(f"the database's URL: {str(why).partition(chr(10))[0][:300]}")


def _limit_waiting(connection: Any) -> None:
    """Limit how long a lock is waited for, unless the URL, the role or the server says it."""
    connection.autocommit = True
    connection.execute(
        "SELECT set_config('lock_timeout', %s, false) WHERE current_setting('lock_timeout') = '0'",
        [_LOCK_TIMEOUT],
    )
    connection.autocommit = False


def _prepare_sqlite(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # transactions are begun by _begin_sqlite, not by the driver
    cursor = connection.cursor()
    _use_wal(cursor)
    for pragma in (
        "synchronous=FULL",  # in WAL mode NORMAL may lose acknowledged commits in a power cut
        "foreign_keys=ON",
        f"busy_timeout={_BUSY_S}000",
        "temp_store=MEMORY",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Switch to WAL. Where several open a new file together, SQLite lets one of them switch.

    It refuses the others immediately, whatever the time-out, as they would wait for each other.
    """
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as why:
            if "locked" not in str(why) or time.monotonic() > until:
                raise
            time.sleep(jitter.about(0.01))
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that turns into a writer fails if another one wrote meanwhile.
    write = connection.get_execution_options().get("weightyard_write", True)
    if write is not None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def is_one_of(
    connection: Connection, column: ColumnElement[Any], values: Sequence[Any]
) -> ColumnElement[bool]:
    """`column IN values` for thousands of values: one array on PostgreSQL, not a bind for each.

    Knowing that there are five thousand, PostgreSQL would read a table of a million rows from end
    to end. From a subquery it expects few values, and looks each of them up in the index.
    """
    if connection.dialect.name == "sqlite":
        return column.in_(values)
    one = select(func.unnest(as_array(values, column.type)))
    return column == any_(func.array(one.scalar_subquery(), type_=ARRAY(column.type)))


def as_array(values: Sequence[Any], kind: TypeEngine[Any]) -> ColumnElement[Any]:
    """Values as one array for PostgreSQL.

    psycopg converts an array value by value, which for thousands takes as long as the server needs
    to look them up. So arrays of integers and of bytes are written as text here.
    """
    array = ARRAY(kind)
    if isinstance(kind, Integer):
        said = ",".join("NULL" if value is None else f"{value:d}" for value in values)
    elif isinstance(kind, LargeBinary):
        # In an array's text a backslash stands for the character after it.
        said = ",".join("NULL" if value is None else rf"\\x{value.hex()}" for value in values)
    else:
        return bindparam(None, list(values), array, unique=True)
    return cast(bindparam(None, f"{{{said}}}", Text, unique=True), array)


def _is_worth_another_go(why: exc.DBAPIError, attempt: int) -> bool:
    """Whether the transaction did nothing, and may succeed if tried again."""
    original = why.orig
    if isinstance(original, sqlite3.OperationalError):
        return attempt < _ATTEMPTS and ("locked" in str(original) or "busy" in str(original))
    state = getattr(original, "sqlstate", None) or ""
    if state == _MET:
        return attempt < _MEETINGS
    return state in _TRY_AGAIN and attempt < _ATTEMPTS


def _is_forbidden(code: int, file: str) -> bool:
    """Whether permissions, or a read-only disk, kept SQLite from using a file."""
    match code & 0xFF:  # the higher bits tell details
        case sqlite3.SQLITE_READONLY:
            return code != sqlite3.SQLITE_READONLY_DBMOVED  # another file took its place
        case sqlite3.SQLITE_CANTOPEN:  # also if its folder is away, or too many files are open
            used = [folder] if os.path.isdir(folder := os.path.dirname(file) or ".") else []
            used += [file] if os.path.exists(file) else []
            mode = os.R_OK | os.W_OK
            return not all(os.access(one, mode, effective_ids=True) for one in used)
    return False


def _said(why: exc.DBAPIError) -> str:
    """The database's own words, without the statement and its values."""
    return str(why.orig).strip().partition("\n")[0][:300]
