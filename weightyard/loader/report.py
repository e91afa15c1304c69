"""What a load did: bytes and time by stage, where the bytes came from, and what went wrong.

A yard has one hook, `on_event`. It is told of what happens to reads (`ReadEvent`), and once at the
end of each load what it did (`LoadReport`) or that it failed (`LoadFailed`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from weightyard.errors import YardError
from weightyard.logs import Log
from weightyard.records import Version
from weightyard.transfer.report import ReadEvent, ReadReport

_log = Log(__name__)

BY_SERVICE = "service"
"""The way of bytes that came as files or blocks through the service, not from the store."""

OF_READ = ("locate", "fetch", "decode")
"""Stages that are parts of `read`, summed over all threads; the others are by the clock."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, and how long that took."""

    ref: str
    digest: str
    device: str
    tensors: int
    bytes: int
    """Of the tensors, as they are stored: before a cast."""
    read_bytes: int
    """Raw bytes of the chunks read for them: more than `bytes` where some of a chunk is not wanted,
    as at the ends of a slice and between its stripes."""
    stored_bytes: int
    """Bytes that came from the store, encoded as they lie there."""
    requests: int
    seconds: float
    """All of it, from the ref to the last tensor; for a stream, with what its caller did between
    tensors (the stage `use`)."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage; for those in OF_READ, the sum over threads. Stages overlap."""
    stage_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by stage: for `fetch` as they are stored, for all others raw, as before a cast.
    Stages that move none are left out."""
    read_paths: Mapping[str, int] = field(default_factory=dict)
    """Stored bytes by the way they came; through the service they come decoded."""
    datanodes: Mapping[str, int] = field(default_factory=dict)
    """Stored bytes by the DataNode that served them."""
    hosts: Mapping[str, int] = field(default_factory=dict)
    """The same by its host."""
    distances: Mapping[str, int] = field(default_factory=dict)
    """Stored bytes by how far away that was."""
    hedged: int = 0
    """Requests also sent to a second replica, since the first was slow."""
    failed_over: int = 0
    """Replicas that failed or had wrong bytes, each request counted."""
    failed: tuple[str, ...] = ()
    """What went wrong on the way and was then got from elsewhere: the first few."""
    ranks: int = 1
    """How many loaded together."""
    received_bytes: int = 0
    """Raw bytes that other ranks read for this one."""
    group_bytes: int = 0
    """What all ranks together wanted, counted once if it is the same."""
    group_read_bytes: int = 0
    """Raw bytes that all ranks together read for it."""
    from_snapshot: bool = False
    """Whether the tensors were mapped from this node's snapshot, also one made for this load."""
    cached_bytes: int = 0
    """Bytes of tensors that this node had in a snapshot before this load."""
    resolved_s_ago: float | None = None
    """Offline: how old the remembered answer is that resolved the ref."""
    missing: tuple[str, ...] = ()
    """`load_into` with strict=False: keys of the module that the version does not have."""
    unexpected: tuple[str, ...] = ()
    """The same: tensors that the module has no key for."""

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / max(self.seconds, 1e-9)

    @property
    def amplification(self) -> float:
        """Raw bytes read for each byte of a tensor; by a group, for each byte wanted in it."""
        if self.group_bytes:
            return self.group_read_bytes / self.group_bytes
        return self.read_bytes / self.bytes if self.bytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "seconds": round(self.seconds, 4),
            "stages": {name: round(seconds, 4) for name, seconds in self.stages.items()},
            "bytes_per_s": round(self.bytes_per_s),
            "amplification": round(self.amplification, 3),
        }


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load that ended without its tensors."""

    ref: str
    """As it was asked for."""
    error: str
    """The code of the YardError; else the name of the exception, such as KeyboardInterrupt."""
    reason: str
    seconds: float


LoadEvent: TypeAlias = ReadEvent | LoadReport | LoadFailed

OnLoadEvent: TypeAlias = Callable[[LoadEvent], None]
"""Is called from any thread, several at once. What it raises ends the load."""


class Tally:
    """What a load has done so far. Thread-safe."""

    def __init__(self, on_event: OnLoadEvent | None = None) -> None:
        self.began = time.monotonic()
        self._on_event = on_event
        self._lock = threading.Lock()
        self._read = ReadReport()
        self._stages: dict[str, float] = {}
        self._stage_bytes: Counter[str] = Counter()
        self._inside: dict[str, tuple[int, float]] = {}
        self._tensors = self._bytes = self._by_service = 0

    @contextmanager
    def stage(self, name: str, moved_bytes: int = 0) -> Iterator[None]:
        """Counts the time inside; once, however many threads are in it at the same time."""
        with self._lock:
            self._stage_bytes[name] += moved_bytes
            threads, began = self._inside.get(name, (0, time.monotonic()))
            self._inside[name] = threads + 1, began
        try:
            yield
        finally:
            with self._lock:
                threads, began = self._inside.pop(name)
                if threads > 1:
                    self._inside[name] = threads - 1, began
                else:
                    took_s = time.monotonic() - began
                    self._stages[name] = self._stages.get(name, 0.0) + took_s

    def moved(self, name: str, moved_bytes: int) -> None:
        """Count bytes of a stage whose time is counted elsewhere."""
        with self._lock:
            self._stage_bytes[name] += moved_bytes

    def say(self, event: LoadEvent) -> None:
        """Tell the yard's hook of something."""
        if self._on_event is not None:
            self._on_event(event)

    @contextmanager
    def watched(self, ref: str) -> Iterator[None]:
        """Tells the hook if what is inside fails; a stream that is left early does not."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as why:
            code = why.code if isinstance(why, YardError) else type(why).__name__
            self.say(LoadFailed(ref, code, str(why), time.monotonic() - self.began))
            raise

    def read(self, report: ReadReport) -> None:
        with self._lock:
            self._read += report

    def through_service(self, raw_bytes: int) -> None:
        """So many came through the service."""
        with self._lock:
            self._by_service += raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that came from the store so far."""
        with self._lock:
            return self._read.stored_bytes

    @property
    def bytes(self) -> int:
        """Of the tensors handed over so far."""
        with self._lock:
            return self._bytes

    def delivered(self, names: int, raw_bytes: int) -> None:
        """A tensor, under so many names, was handed over."""
        with self._lock:
            self._tensors += names
            self._bytes += raw_bytes

    def _moved(self) -> dict[str, int]:
        """Bytes by stage, without those that moved none."""
        read = self._read
        moved = Counter(
            fetch=read.stored_bytes, decode=read.decoded_bytes, snapshot=self._by_service
        )
        return dict(moved + self._stage_bytes)

    def report(self, version: Version, device: str, **more: Any) -> LoadReport:
        """What was done, which is logged and told. Once for each load."""
        read = self._read
        read_paths = {str(path): amount for path, amount in read.by_path.items()}
        if self._by_service:
            read_paths[BY_SERVICE] = self._by_service
        report = LoadReport(
            ref=version.ref,
            digest=version.digest,
            device=device,
            tensors=self._tensors,
            bytes=self._bytes,
            read_bytes=read.decoded_bytes + self._by_service,
            stored_bytes=read.stored_bytes,
            requests=read.requests,
            seconds=time.monotonic() - self.began,
            stages={
                **self._stages,
                "locate": read.locate_s,
                "fetch": read.fetch_s,
                "decode": read.decode_s,
            },
            stage_bytes=self._moved(),
            read_paths=read_paths,
            datanodes=dict(read.by_datanode),
            hosts=dict(read.by_host),
            distances={str(distance): amount for distance, amount in read.by_distance.items()},
            hedged=read.hedged,
            failed_over=read.failed_over,
            failed=tuple(read.failed),
            **more,
        )
        _log.info(
            "version.loaded",
            version=version.ref,
            device=device,
            tensors=report.tensors,
            bytes=report.bytes,
            stored_bytes=report.stored_bytes,
            seconds=round(report.seconds, 3),
            mb_per_s=round(report.bytes_per_s / 1e6),
            paths="+".join(report.read_paths) or ("snapshot" if report.from_snapshot else "none"),
            failed=len(report.failed),
        )
        self.say(report)
        return report
