"""RetryingStore: tries again under one deadline, and reads back where an answer was lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from typing_extensions import Buffer

from weightyard import jitter
from weightyard.errors import (
    AlreadyThere,
    DataNodeFailed,
    DeadlineExceeded,
    FileMissing,
    Retryable,
    StaleLocation,
    StoreUnavailable,
)
from weightyard.logs import Log
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
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

_log = Log(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long to try again.

    No new attempt begins after `deadline_s`; how long one may take is the store's affair. Between
    attempts it waits a random time up to a bound that doubles, so that many clients do not come
    back together.
    """

    deadline_s: float = 30.0
    first_wait_s: float = 0.05
    longest_wait_s: float = 2.0

    def run(self, call: str, attempt: Callable[[], _T], deadline: Deadline | None = None) -> _T:
        """What `attempt` returns once it does not raise Retryable. `deadline`: if it is sooner."""
        end = time.monotonic() + self.deadline_s
        if deadline is not None:
            end = min(end, deadline.at)
        for number in itertools.count(1):
            try:
                return attempt()
            except Retryable as why:
                longest_s = min(self.first_wait_s * 2 ** (number - 1), self.longest_wait_s)
                pause_s = jitter.up_to(longest_s)
                if time.monotonic() + pause_s >= end:
                    raise
                _log.warning("store.retried", call=call, attempt=number, reason=why)
                time.sleep(pause_s)
        raise AssertionError("unreachable")


class RetryingStore(Store):
    """A store whose calls survive passing failures.

    A failure may mean that only the answer was lost, and hdfs-native's own retry after a fail-over
    shows such a call as "already exists" or "not found". Hence, for what is not idempotent:

    - stage: a name that is taken may be ours; the next attempt uses the next staging name.
    - write, close: whether the file is whole is unknown; all is written again under the next name.
    - publish: if the staged file is gone and one of its length is at the path, it was ours.
    - delete: a file that is gone after a lost answer counts as deleted.
    """

    def __init__(self, store: Store, retry: Retry | None = None) -> None:
        self._store = store
        self._retry = retry or Retry()
        self.url = store.url
        self.replicates = store.replicates

    def init(self, ownership: Ownership | None = None) -> None:
        self._retry.run("init", lambda: self._store.init(ownership))

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        return _ReplayingStage(self._store, self._retry, path, options)

    def publish(self, staged: StagedFile, path: StorePath) -> None:
        def attempt() -> None:
            try:
                self._store.publish(staged, path)
            except (AlreadyThere, FileMissing):
                if not self._was_published(staged, path):
                    raise

        self._retry.run("publish", attempt)

    def stat(self, path: StorePath) -> FileStat:
        return self._retry.run("stat", lambda: self._store.stat(path))

    def top(self) -> Sequence[StorePath]:
        return self._retry.run("list", self._store.top)

    def list(self, folder: StorePath) -> Iterator[FileStat]:
        """As the store's; a failure before the first file is retried, a later one is raised."""

        def begin() -> tuple[FileStat | None, Iterator[FileStat]]:
            files = self._store.list(folder)
            return next(files, None), files

        first, rest = self._retry.run("list", begin)
        if first is not None:
            yield first
            yield from rest

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        limit_s = self._retry.deadline_s if timeout_s is None else timeout_s
        deadline = Deadline.after(limit_s)

        def attempt() -> Location:
            return self._store.locate(path, timeout_s=deadline.left(f"locating {path}"))

        return self._retry.run("locate", attempt, deadline)

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        """As the store's. With a replica named its failure is raised: the next is the caller's."""
        if replica is not None:
            return self._store.read(
                location, reads, replica=replica, timeout_s=timeout_s, cancel=cancel
            )
        current = location
        limit_s = self._retry.deadline_s if timeout_s is None else timeout_s
        deadline = Deadline.after(limit_s, cancel)

        def attempt() -> Served:
            nonlocal current
            left_s = deadline.left(f"reading {location.path}")
            try:
                return self._store.read(current, reads, timeout_s=left_s, cancel=cancel)
            except (StaleLocation, DataNodeFailed) as why:
                try:
                    left_s = deadline.left(f"locating {location.path} again")
                except DeadlineExceeded:
                    raise why from None  # it says what used the time up
                current = self._store.locate(location.path, timeout_s=left_s)
                raise

        return self._retry.run("read", attempt, deadline)

    def delete(self, path: StorePath) -> bool:
        lost_answer = False

        def attempt() -> bool:
            nonlocal lost_answer
            try:
                return self._store.delete(path) or lost_answer
            except Retryable:
                lost_answer = True
                raise

        return self._retry.run("delete", attempt)

    def adjust(self, path: StorePath, options: FileOptions) -> None:
        self._retry.run("adjust", lambda: self._store.adjust(path, options))

    def close(self) -> None:
        self._store.close()

    def _was_published(self, staged: StagedFile, path: StorePath) -> bool:
        try:
            self._store.stat(staged.path)
        except FileMissing:
            return self._store.stat(path).length == staged.length
        return False


class _ReplayingStage(Stage):
    """Remembers what was written, or how to have it once more, and can write it again."""

    def __init__(
        self, store: Store, retry: Retry, path: StorePath, options: FileOptions | None
    ) -> None:
        self._store = store
        self._retry = retry
        self._next_path = path
        self._options = options
        self._written: list[Again] = []
        self._stage: Stage | None = None
        self._attempt("stage", lambda stage: None)

    def write(self, data: Buffer, again: Again | None = None) -> None:
        same: Again = again or (lambda: data)
        self._attempt("write", lambda stage: stage.write(data, same))
        self._written.append(same)

    def close(self) -> StagedFile:
        staged = self._attempt("close", lambda stage: stage.close())
        self._written.clear()
        return staged

    def abort(self) -> None:
        self._written.clear()
        if self._stage is not None:
            self._stage.abort()

    def _attempt(self, call: str, step: Callable[[Stage], _T]) -> _T:
        def attempt() -> _T:
            try:
                return step(self._ready())
            except Retryable:
                if self._stage is not None:
                    self._stage.abort()
                    self._stage = None
                raise

        return self._retry.run(call, attempt)

    def _ready(self) -> Stage:
        """The open stage: under a fresh name, with all that was written before."""
        if self._stage is None:
            path, self._next_path = self._next_path, layout.next_attempt(self._next_path)
            try:
                self._stage = self._store.stage(path, self._options)
            except AlreadyThere as why:
                raise StoreUnavailable(f"staging name {path} is taken") from why
            for again in self._written:
                self._stage.write(again(), again)
        return self._stage
