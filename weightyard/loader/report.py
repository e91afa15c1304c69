"""What a load did: bytes and time by stage, where the bytes came from, and what went wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from weightyard.logs import Log
from weightyard.records import Version
from weightyard.transfer.reader import ReadReport

_log = Log(__name__)


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
    """Raw bytes read for them; more than `bytes` where slices had to be picked out."""
    stored_bytes: int
    """Bytes that came from the store, encoded as they lie there."""
    requests: int
    seconds: float
    """All of it, from the ref to the last tensor."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage. Stages overlap, and run on several threads: they add up to more."""
    read_paths: Mapping[str, int] = field(default_factory=dict)
    """Stored bytes by the way they came."""
    datanodes: Mapping[str, int] = field(default_factory=dict)
    """Stored bytes by the DataNode that served them."""
    distances: Mapping[str, int] = field(default_factory=dict)
    """Stored bytes by how far away that was."""
    hedged: int = 0
    """Requests also sent to a second replica, since the first was slow."""
    failed: tuple[str, ...] = ()
    """What went wrong on the way and was got from elsewhere."""
    ranks: int = 1
    """How many loaded together."""
    received_bytes: int = 0
    """Raw bytes that other ranks read for this one."""
    group_bytes: int = 0
    """What all ranks together wanted, counted once if it is the same."""
    group_read_bytes: int = 0
    """Raw bytes that all ranks together read for it."""
    from_snapshot: bool = False
    """Whether the tensors were mapped from this node's snapshot."""
    resolved_s_ago: float | None = None
    """Offline: how old the answer is by which the ref was resolved."""

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


class Tally:
    """What a load has done so far. Thread-safe."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._read = ReadReport()
        self._stages: dict[str, float] = {}
        self._tensors = self._bytes = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                took_s = time.monotonic() - began
                self._stages[name] = self._stages.get(name, 0.0) + took_s

    def read(self, report: ReadReport) -> None:
        with self._lock:
            self._read += report

    def delivered(self, names: int, raw_bytes: int) -> None:
        """A tensor, under so many names, was handed over."""
        with self._lock:
            self._tensors += names
            self._bytes += raw_bytes

    def report(self, version: Version, device: str, **more: Any) -> LoadReport:
        """What was done, which is logged."""
        read = self._read
        report = LoadReport(
            ref=version.ref,
            digest=version.digest,
            device=device,
            tensors=self._tensors,
            bytes=self._bytes,
            read_bytes=read.raw_bytes,
            stored_bytes=read.stored_bytes,
            requests=read.requests,
            seconds=time.monotonic() - self.began,
            stages={
                **self._stages,
                "locate": read.locate_s,
                "fetch": read.fetch_s,
                "decode": read.decode_s,
            },
            read_paths={str(path): amount for path, amount in read.by_path.items()},
            datanodes=dict(read.by_datanode),
            distances={str(distance): amount for distance, amount in read.by_distance.items()},
            hedged=read.hedged,
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
        return report
