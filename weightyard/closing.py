"""Closing: what holds something open until it is closed, by `with` or by hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn, Self

from weightyard.errors import Refused


class Closing(ABC):
    """A context manager that closes itself when it is left, whatever happened inside."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give up what is held. Idempotent; nothing else is called afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


class Closed:
    """In the place of what was closed: whatever is asked of it is refused."""

    def __init__(self, what: str) -> None:
        self._what = what

    def close(self) -> None:
        """It is."""

    def refuse(self) -> NoReturn:
        raise Refused(f"{self._what} was closed: open it again")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()
