"""FaultyStore: fails on purpose at the calls it is told to, before or after they take effect."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from typing_extensions import Buffer

from weightyard.errors import StoreUnavailable
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import (
    Again,
    FileOptions,
    FileStat,
    Location,
    Ownership,
    Read,
    Replica,
    Served,
    Stage,
    StagedFile,
    Store,
    StorePath,
)

_T = TypeVar("_T")


class Fault(enum.Enum):
    """When a call fails."""

    BEFORE = "before"
    """Nothing happened."""
    AFTER = "after"
    """It took effect, and the answer was lost."""


class FaultyStore(Store):
    """Counts its calls, and fails those whose index is in `faults`.

    A clean run tells how many calls there are (`calls`); a sweep then fails each in turn.
    """

    def __init__(
        self,
        store: Store,
        faults: Mapping[int, Fault] | None = None,
        on_call: Callable[[int, str], None] | None = None,
    ) -> None:
        self._store = store
        self._faults = dict(faults or {})
        self._on_call = on_call
        self._lock = threading.Lock()
        self.calls: list[str] = []
        self.url = store.url
        self.replicates = store.replicates

    def call(self, name: str, run: Callable[[], _T]) -> _T:
        """Run one call, or fail it as planned."""
        with self._lock:
            index = len(self.calls)
            self.calls.append(name)
        if self._on_call is not None:
            self._on_call(index, name)
        fault = self._faults.get(index)
        if fault is Fault.BEFORE:
            raise StoreUnavailable(f"injected before call {index}, {name}")
        result = run()
        if fault is Fault.AFTER:
            raise StoreUnavailable(f"injected after call {index}, {name}")
        return result

    def init(self, ownership: Ownership | None = None) -> None:
        self.call("init", lambda: self._store.init(ownership))

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        return _FaultyStage(self, self.call("stage", lambda: self._store.stage(path, options)))

    def publish(self, staged: StagedFile, path: StorePath) -> None:
        self.call("publish", lambda: self._store.publish(staged, path))

    def stat(self, path: StorePath) -> FileStat:
        return self.call("stat", lambda: self._store.stat(path))

    def list(self, folder: StorePath) -> Iterator[FileStat]:
        return iter(self.call("list", lambda: [*self._store.list(folder)]))

    def top(self) -> Sequence[StorePath]:
        return self.call("list", self._store.top)

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        return self.call("locate", lambda: self._store.locate(path, timeout_s=timeout_s))

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        self.before_read(location, reads, replica, cancel)
        return self.call(
            "read",
            lambda: self._store.read(
                location, reads, replica=replica, timeout_s=timeout_s, cancel=cancel
            ),
        )

    def before_read(
        self,
        location: Location,
        reads: Sequence[Read],
        replica: Replica | None,
        cancel: Cancel | None,
    ) -> None:
        """What is to happen before a read is served, and counted; may raise. Tests override it."""

    def delete(self, path: StorePath) -> bool:
        return self.call("delete", lambda: self._store.delete(path))

    def adjust(self, path: StorePath, options: FileOptions) -> None:
        self.call("adjust", lambda: self._store.adjust(path, options))

    def close(self) -> None:
        self._store.close()


class _FaultyStage(Stage):
    def __init__(self, store: FaultyStore, stage: Stage) -> None:
        self._store = store
        self._stage = stage

    def write(self, data: Buffer, again: Again | None = None) -> None:
        self._store.call("write", lambda: self._stage.write(data, again))

    def close(self) -> StagedFile:
        return self._store.call("close", self._stage.close)

    def abort(self) -> None:
        self._stage.abort()
