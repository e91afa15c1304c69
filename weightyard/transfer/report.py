"""What reading did, and what it says while it does."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from weightyard.storage.store import ReadPath
from weightyard.transfer.replicas import Distance

MOST_FAILURES = 100
"""How many failures a report spells out; `failed_over` counts them all."""


class ReadEventKind(enum.StrEnum):
    """What happened to a read."""

    REPLICA_FAILED = "replica-failed"
    HEDGED = "hedged"
    LOCATED_AGAIN = "located-again"
    LOOKED_UP_AGAIN = "looked-up-again"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """Something worth knowing that happened while reading and did not end it."""

    kind: ReadEventKind
    pack: str
    datanode: str | None = None
    """The one that failed, is asked as well, or serves again."""
    reason: str = ""


OnEvent: TypeAlias = Callable[[ReadEvent], None]


@dataclass(slots=True)
class ReadReport:
    """What reading did. Times of stages are summed over threads, so they may exceed `wall_s`."""

    raw_bytes: int = 0
    """Raw bytes that were wanted."""
    decoded_bytes: int = 0
    """Raw bytes of the chunks read for them: a chunk is the least that can be checked."""
    stored_bytes: int = 0
    """Stored bytes that were read, including bases of deltas."""
    requests: int = 0
    by_path: Counter[ReadPath] = field(default_factory=Counter)
    """Stored bytes by the way they came."""
    by_datanode: Counter[str] = field(default_factory=Counter)
    by_host: Counter[str] = field(default_factory=Counter)
    by_distance: Counter[Distance] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    """What went wrong on the way and was then got from elsewhere: the first few."""
    failed_over: int = 0
    """Replicas that failed or had wrong bytes, each read counted."""
    hedged: int = 0
    """Reads asked of a second replica because the first was slow."""
    hedges_won: int = 0
    located_again: int = 0
    looked_up_again: int = 0
    """Packs that were gone when they were read, and whose blocks were found elsewhere."""
    plan_s: float = 0.0
    locate_s: float = 0.0
    fetch_s: float = 0.0
    decode_s: float = 0.0
    wall_s: float = 0.0
    most_host_bytes: int = 0
    """The most memory used at once besides the destination."""

    @property
    def bytes_per_s(self) -> float:
        """Raw bytes over the time it took."""
        return self.raw_bytes / self.wall_s if self.wall_s else 0.0

    def __iadd__(self, other: ReadReport) -> ReadReport:
        """Add a read that came after this one."""
        self.raw_bytes += other.raw_bytes
        self.decoded_bytes += other.decoded_bytes
        self.stored_bytes += other.stored_bytes
        self.requests += other.requests
        self.by_path += other.by_path
        self.by_datanode += other.by_datanode
        self.by_host += other.by_host
        self.by_distance += other.by_distance
        self.failed = (self.failed + other.failed)[:MOST_FAILURES]
        self.failed_over += other.failed_over
        self.hedged += other.hedged
        self.hedges_won += other.hedges_won
        self.located_again += other.located_again
        self.looked_up_again += other.looked_up_again
        self.plan_s += other.plan_s
        self.locate_s += other.locate_s
        self.fetch_s += other.fetch_s
        self.decode_s += other.decode_s
        self.wall_s += other.wall_s
        self.most_host_bytes = max(self.most_host_bytes, other.most_host_bytes)
        return self
