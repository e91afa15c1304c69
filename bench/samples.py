"""What is measured, as data: samples, rows, sections. Kept in results.json, rendered by report."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

MB = 1_000_000
"""Rates are in 10⁶ bytes a second, as network rates are."""

MEMORY_LIMIT_BYTES = 512 * 2**20
"""What writing or reading a tensor may take beyond it, however large it is."""


class Kind(StrEnum):
    """Whose way a row shows."""

    OURS = "weightyard"
    FALLBACK = "weightyard, other paths"
    PEER = "peer"
    LIMIT = "limit"


class Sample(msgspec.Struct, frozen=True):
    """One repetition."""

    seconds: float
    client_cpu_s: float
    server_cpu_s: float
    """Of the DataNodes, or of whatever sent the bytes."""
    peak_rss_bytes: int
    """Of the client's process, its libraries and the received bytes included."""
    other_cpu_s: float = 0.0
    """Of everything else on the machine meanwhile: a disturbed repetition shows here."""
    stored_bytes: int = 0
    """What a push wrote, where that is known."""
    read_bytes: int = 0
    """What a load got from the store, encoded as it lies there, where that is known."""
    first_s: float = 0.0
    """When the first tensor was there, where they come one by one."""
    went_wrong: int = 0
    """Requests that failed, or were also sent to a second replica, and were served in the end."""


class Row(msgspec.Struct, frozen=True):
    """One way to do a section's task, with its repetitions."""

    kind: Kind
    who: str
    way: str
    moved_bytes: int
    samples: tuple[Sample, ...] = ()
    failed: str | None = None
    """Why there are no samples."""
    group: str = ""
    """Rows are compared within their group."""
    is_fresh: bool = False
    """Whether the bytes go into memory that was never touched before."""

    @property
    def name(self) -> str:
        return f"{self.who}, {self.way}"

    @property
    def best(self) -> Sample:
        return min(self.samples, key=lambda sample: sample.seconds)

    @property
    def best_rate(self) -> float:
        """MB/s of the best repetition; 0 for a row that failed."""
        return self.moved_bytes / MB / self.best.seconds if self.samples else 0.0

    @property
    def spread(self) -> float:
        """How far the worst repetition is below the best: 0.1 for 10 %."""
        if not self.samples:
            return 0.0
        return 1 - self.best.seconds / max(sample.seconds for sample in self.samples)

    @property
    def peak_rss_bytes(self) -> int:
        return max((sample.peak_rss_bytes for sample in self.samples), default=0)

    def with_sample(self, sample: Sample) -> Row:
        return msgspec.structs.replace(self, samples=(*self.samples, sample))


class Measured(msgspec.Struct, frozen=True):
    """When and on what."""

    date: str
    machine: dict[str, str]
    load: float = 0.0
    """Processes that wanted to run in the minute before: more than a few tenths spoils a run."""
    hadoop: str = ""
    stolen: float | None = None
    """The share of the cores' time that the host of a virtual machine gave to others meanwhile."""


class Timed(msgspec.Struct, frozen=True):
    """A section of rows that are compared with each other."""

    measured: Measured
    rows: tuple[Row, ...]


class Footprint(msgspec.Struct, frozen=True):
    """How much memory a task on one tensor took."""

    task: str
    tensor_bytes: int
    peak_rss_bytes: int
    seconds: float

    @property
    def beyond_bytes(self) -> int:
        """The peak less the tensor itself; libraries included."""
        return self.peak_rss_bytes - self.tensor_bytes


class Memory(msgspec.Struct, frozen=True):
    """The memory section."""

    measured: Measured
    rows: tuple[Footprint, ...]


class Table(msgspec.Struct, frozen=True):
    """A section that another module measured and laid out by itself."""

    measured: Measured
    content: dict[str, Any]


class Results(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything in results.json. A section not measured in a run is kept from the one before."""

    reads: Timed | None = None
    loading: Timed | None = None
    writing: Timed | None = None
    push: Timed | None = None
    memory: Memory | None = None
    codec: Table | None = None
    catalogue: Table | None = None
    service: Table | None = None
    load: Timed | None = None
    link: Timed | None = None
    node: Timed | None = None
    local: Timed | None = None
    swap: Timed | None = None
    rank: Timed | None = None
    stream: Timed | None = None
    faults: Timed | None = None
    checkpoints: Timed | None = None
    training: Table | None = None


def fastest(rows: Sequence[Row], kind: Kind, who: str = "") -> Row | None:
    """The fastest row of a kind, or of one of its members; None if all failed."""
    found = [row for row in rows if row.kind is kind and row.who.startswith(who) and row.samples]
    return max(found, key=lambda row: row.best_rate, default=None)
