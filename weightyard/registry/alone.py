"""Alone: a lock for work, such as gc, that two processes should not do at the same time.

It saves work; safety does not depend on it. Should a process lose the lock without noticing, the
row locks still keep it apart from the next one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import exc, func, select

from weightyard.errors import Conflict, RegistryUnavailable
from weightyard.registry.database import Database
from weightyard.transfer.source import translated

_LOCKS = {"gc": 0x77792D67632D2D31}


@contextmanager
def only_one(database: Database, what: str) -> Iterator[None]:
    """Hold the lock for `what` on this database; a process that dies gives it up.

    Raises Conflict at once if another one holds it, NotAllowed, RegistryUnavailable.
    """
    with _sqlite(database, what) if database.is_sqlite else _postgresql(database, what):
        yield


@contextmanager
def _postgresql(database: Database, what: str) -> Iterator[None]:
    try:
        opened = database.engine.connect()
    except (exc.DBAPIError, exc.TimeoutError) as why:
        raise RegistryUnavailable("database: cannot connect") from why
    with opened as connection:
        try:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            is_mine = connection.scalar(select(func.pg_try_advisory_lock(_LOCKS[what])))
        except exc.DBAPIError as why:
            # It may hold the lock, and would keep it when the pool gives it to others.
            connection.invalidate()
            raise RegistryUnavailable(f"database: the lock for {what} cannot be had") from why
        if not is_mine:
            raise Conflict(_running(what))
        try:
            yield
        finally:
            try:
                connection.execute(select(func.pg_advisory_unlock(_LOCKS[what])))
            except exc.DBAPIError:
                connection.invalidate()  # closing a connection gives up its locks


@contextmanager
def _sqlite(database: Database, what: str) -> Iterator[None]:
    database_file = database.url.database
    if not database_file or database_file == ":memory:":  # nobody else can open it
        yield
        return
    beside = Path(f"{database_file}.{what}")
    with translated(beside):  # its mode, 0666 less the umask: other users take this lock, too
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(_running(what)) from None
        yield
    finally:
        os.close(file)


def _running(what: str) -> str:
    return f"{what} is running already on this database: wait until it is done"
