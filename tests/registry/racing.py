"""Two at once, in a set order: one stops at a statement, the other comes, the first goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from weightyard.registry.database import Database

LIMIT_S = 60.0
SOON_S = 0.3
"""Long enough for whoever is not kept waiting."""

_T = TypeVar("_T")


class Stopped:
    """Someone who stands before a statement, until told to go on."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.go_on = threading.Event()

    def wait(self) -> None:
        assert self.is_there.wait(LIMIT_S), "the statement was not reached"


@contextmanager
def _looking(database: Database, look: Callable[[str], None]) -> Iterator[None]:
    """Shows `look` each statement that this database object is about to run."""
    dialect: Any = database.engine.dialect

    def watched(execute: Callable[..., None]) -> Callable[..., None]:
        def run(cursor: Any, statement: str, *arguments: Any, **options: Any) -> None:
            look(statement)
            execute(cursor, statement, *arguments, **options)

        return run

    names = ("do_execute", "do_executemany")
    for name in names:
        setattr(dialect, name, watched(getattr(dialect, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(dialect, name)


@contextmanager
def stopping(database: Database, before: str) -> Iterator[Stopped]:
    """Whoever uses this database stops once, before the first statement that begins so.

    Others have a database object of their own.
    """
    stopped = Stopped()

    def look(statement: str) -> None:
        if statement.startswith(before) and not stopped.is_there.is_set():
            stopped.is_there.set()
            assert stopped.go_on.wait(LIMIT_S), "nobody said to go on"

    with _looking(database, look):
        try:
            yield stopped
        finally:
            stopped.go_on.set()


@contextmanager
def reaching(database: Database, *statements: str) -> Iterator[threading.Event]:
    """An event that is set once whoever uses this database comes to one that begins so."""
    reached = threading.Event()

    def look(statement: str) -> None:
        if statement.startswith(statements):
            reached.set()

    with _looking(database, look):
        yield reached


class Race(Generic[_T]):
    """What became of two who raced."""

    def __init__(self, first: Future[_T], second: Future[_T], second_waited: bool) -> None:
        self.first = first
        self.second = second
        self.second_waited = second_waited

    @property
    def errors(self) -> list[BaseException]:
        both = (self.first.exception(), self.second.exception())
        return [error for error in both if error is not None]


def race(
    database: Database,
    before: str,
    first: Callable[[], _T],
    second: Callable[[], _T],
    patience_s: float = SOON_S,
    second_reached: threading.Event | None = None,
) -> Race[_T]:
    """`first`, on this database, stops before a statement; `second` comes, and has its time.

    That is enough where it does not matter how far `second` came. Where it does, `second_reached`
    is waited for before.
    """
    with ThreadPoolExecutor(2) as pool, stopping(database, before) as stopped:
        one = pool.submit(first)
        stopped.wait()
        two = pool.submit(second)
        if second_reached is not None:
            assert second_reached.wait(LIMIT_S / 2), "the second did not come that far"
        try:
            two.exception(timeout=patience_s)
            waited = False
        except TimeoutError:
            waited = True
        stopped.go_on.set()
        one.exception(timeout=LIMIT_S)
        two.exception(timeout=LIMIT_S)
    return Race(one, two, waited)
