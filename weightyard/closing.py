"""Closing: what holds something open until it is closed, by `with` or by hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


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
