"""Store: what weightyard needs of a place that keeps files."""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from typing_extensions import Buffer

from weightyard.closing import Closing
from weightyard.errors import InvalidName
from weightyard.storage.cancel import Cancel

_PATH_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class StorePath:
    """A path below a store's root. Made by `storage.layout` from ids and parsed names."""

    text: str

    def __post_init__(self) -> None:
        if not all(_PATH_PART.fullmatch(part) for part in self.text.split("/")):
            raise InvalidName(f"store path {self.text[:80]!a}")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How a file is kept. None leaves the choice to the store."""

    replication: int | None = None
    planned_bytes: int | None = None
    """How long the file will be at most: it is laid out so that this fits one HDFS block."""
    policy: str | None = None
    """HDFS storage policy, such as `ALL_SSD` or `COLD`."""
    counts_replicas: bool = False
    """Whether `close` should count on how many machines the file lies, if the store can."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """A file as the store lists it."""

    path: StorePath
    length: int
    replication: int
    """Copies asked for; 1 on a store without replication."""
    modified_s: float
    """By the store's clock, seconds since the epoch."""


Again = Callable[[], Buffer]
"""Gives bytes that were written before once more."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A closed file under a staging name, its length verified, that nobody sees yet."""

    path: StorePath
    length: int
    replicas: int | None = None
    """On how many machines all of it lay when it was closed; None: that was not counted."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a span, and where it is."""

    datanode: str
    """`host:port` it is read from; the name used in errors and reports."""
    host: str
    rack: str = "/default-rack"
    state: str = "normal"
    """`normal`, or why it should rather not be read: `decommissioning`, `stale`, …"""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a file's bytes that lies on one set of replicas (an HDFS block)."""

    offset: int
    length: int
    replicas: tuple[Replica, ...]
    access: Any = field(default=None, repr=False, compare=False)
    """What the store needs to read it, such as a block token. A secret: never logged."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a file's bytes are. May be kept and used for many reads; it goes stale in time."""

    path: StorePath
    length: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes wanted: the run of a file that begins at `offset` and is as long as the buffer."""

    offset: int
    into: memoryview
    """Writable, C-contiguous, of format 'B'. Filled whole, or the call raises."""


class ReadPath(enum.StrEnum):
    """Which way bytes came."""

    LOCAL = "local"
    SHORT_CIRCUIT = "short-circuit"
    DIRECT = "direct"
    LIBHDFS = "libhdfs"
    NATIVE = "hdfs-native"
    WEBHDFS = "webhdfs"


@dataclass(frozen=True, slots=True)
class Served:
    """How a read was served."""

    path: ReadPath
    replica: Replica | None = None
    """The replica that served, where the path lets one know."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who a store's folders belong to. None leaves the store's default."""

    owner: str | None = None
    group: str | None = None
    folder_mode: int = 0o755
    """Files get the same without the x bits."""


class Stage(ABC):
    """A file being written under a staging name.

    Call order: write … write → close, or abort at any time. Leaving the context without close
    aborts: a writer that fails half-way never leaves a file that looks whole.
    """

    @abstractmethod
    def write(self, data: Buffer, again: Again | None = None) -> None:
        """Append bytes.

        Without `again`, the caller leaves `data` unchanged until close or abort, so that a wrapper
        can write it once more without keeping a copy. With `again`, which returns the same bytes
        whenever they are needed once more, `data` may be overwritten as soon as this returns.
        Raises StoreUnavailable, StoreFull, and what `again` raises.
        """

    @abstractmethod
    def close(self) -> StagedFile:
        """Make the bytes durable, compare the length the store reports with what was written.

        Raises StoreUnavailable (whether the file is whole is unknown: stage it anew under another
        name), StoreFull.
        """

    @abstractmethod
    def abort(self) -> None:
        """Stop writing and remove what is there, as far as possible. Never raises; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.abort()  # does nothing after close


class Store(Closing):
    """Immutable files, written once. Thread-safe.

    Call order: init once → stage → publish → locate → read; publish may race. Every method may
    raise StoreUnavailable (the answer may have been lost: look before trying again), NotAllowed
    and DeadlineExceeded; what else, each says. `weightyard.testing.StoreContract` is this text
    made executable.
    """

    url: str
    """What a user types to open this store again."""

    replicates: bool
    """Whether files lie on several machines; if not, only `replication=1` is understood."""

    @abstractmethod
    def init(self, ownership: Ownership | None = None) -> None:
        """Make the root and its folders with the modes stated. Idempotent; changes no file."""

    @abstractmethod
    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        """Open a new file under a staging name that was never used before.

        What already has that name stays untouched. Raises AlreadyThere (choose another name: an
        earlier writer may still hold this one), FileMissing if a file has the name of its folder.
        """

    @abstractmethod
    def publish(self, staged: StagedFile, path: StorePath) -> None:
        """Give a staged file its final name, or leave it staged.

        Atomic; never overwrites; makes missing folders. Raises AlreadyThere if `path` exists (read
        back and compare), FileMissing if the staged file does not, or a file has the name of the
        folder of `path`.
        """

    @abstractmethod
    def stat(self, path: StorePath) -> FileStat:
        """Length and settings of a file. Raises FileMissing."""

    @abstractmethod
    def list(self, folder: StorePath) -> Iterator[FileStat]:
        """All files below a folder, at any depth, in no order.

        A missing folder has none, nor has a file.
        """

    @abstractmethod
    def top(self) -> Sequence[StorePath]:
        """What lies right below the root, files and folders, in no order."""

    @abstractmethod
    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        """Where a file's bytes are, replica by replica. Raises FileMissing.

        It takes no longer than `timeout_s`, or than the store's calls do.
        """

    @abstractmethod
    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        """Fill every buffer, from the replica named, or from any if none is.

        With a replica named, all reads lie in spans it holds, and only it is asked: its failure
        is DataNodeFailed, so that the caller can choose the next. Raises StaleLocation (locate
        again), FileMissing, TooLarge (a read past the end), Cancelled (by `cancel`, from another
        thread). After an error the buffers' content is undefined, and no more is written to them.
        """

    @abstractmethod
    def delete(self, path: StorePath) -> bool:
        """Remove a file, or a folder if it is empty; True if it was there.

        A folder with anything in it stays, and the answer is False.
        """

    @abstractmethod
    def adjust(self, path: StorePath, options: FileOptions) -> None:
        """Change replication or policy of a file. The store follows in its own time.

        Raises FileMissing, Unsupported (a policy the store does not have).
        """

    @abstractmethod
    def close(self) -> None:
        """Give up connections and threads. Idempotent; the store is not used afterwards."""
