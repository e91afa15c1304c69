"""Closing: a base class for what `with` closes; Closed: takes the place of what was closed."""

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
        """Give up what is held. May be repeated; nothing else may be called afterwards."""

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
    """Takes the place of something that was closed: everything asked of it is refused."""

    def __init__(self, what: str) -> None:
        self._what = what

    def close(self) -> None:
        """Nothing to do: it is closed already."""

    def refuse(self) -> NoReturn:
        raise Refused(f"{self._what} was closed: open it again")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()
