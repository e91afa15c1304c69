"""Live estimates of DataNodes: how fast each is, how busy, and whether to leave it alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightyard.format.block import MIB
from weightyard.storage.store import Replica
from weightyard.transfer.replicas import Outlook

FIRST_PENALTY_S = 1.0
LONGEST_PENALTY_S = 60.0

_FRESH_SHARE = 0.25
"""How much of an estimate a large read replaces."""

_LARGE_BYTES = 4 * MIB
_FIRST_GUESS = 100e6
_MOST_DATANODES = 16_384


@dataclass(frozen=True, slots=True)
class Begun:
    """A read of one DataNode that was begun, until it is told how it ended."""

    datanode: str
    at: float
    beside: int
    """Reads it had in flight then, including this one."""


class Estimates:
    """What the reads of this process have shown of DataNodes. Thread-safe.

    A DataNode that fails, or is so slow that another replica was quicker, is left alone: for a
    second, and twice as long each time it happens again. Then one read is tried; when that
    succeeds, its failures are forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._datanodes: dict[str, _DataNode] = {}
        self._turn = 0

    def outlooks(self, datanodes: Iterable[str]) -> dict[str, Outlook]:
        with self._lock:
            return self._outlooks(datanodes)

    def begin_first(
        self,
        replicas: Sequence[Replica],
        order: Callable[[Mapping[str, Outlook]], Sequence[Replica]],
    ) -> tuple[Replica, Begun]:
        """Choose a replica and count a read on it, in one step: so that many readers spread."""
        with self._lock:
            chosen = order(self._outlooks(replica.datanode for replica in replicas))[0]
            self._turn += 1
            one = self._of(chosen.datanode)
            one.in_flight += 1
            one.last_used = self._turn
            return chosen, Begun(chosen.datanode, self._clock(), one.in_flight)

    def served(self, begun: Begun, length: int) -> bool:
        """A read went well. True if its DataNode had been left alone before."""
        with self._lock:
            one = self._end(begun)
            took_s = max(self._clock() - begun.at, 1e-6)
            # What it sent to other reads at the same time counts too: the estimate is of the
            # DataNode, not of one connection.
            share = _FRESH_SHARE * min(1.0, length / _LARGE_BYTES)
            measured = length * begun.beside / took_s
            known = one.bytes_per_s
            one.bytes_per_s = measured if known is None else known + share * (measured - known)
            if not one.strikes or begun.at < one.struck_at:
                return False
            one.strikes = 0
            return True

    def failed(self, begun: Begun) -> None:
        """A read failed, or was overtaken by one that began later on another replica."""
        with self._lock:
            one = self._end(begun)
            # Reads that were in flight together fail together: that is one failure.
            if one.strikes and begun.at < one.struck_at:
                return
            one.strikes += 1
            one.struck_at = self._clock()
            penalty_s = FIRST_PENALTY_S * 2 ** min(one.strikes - 1, 16)
            one.alone_until = one.struck_at + min(penalty_s, LONGEST_PENALTY_S)

    def ended(self, begun: Begun) -> None:
        """A read ended in a way that says nothing of its DataNode."""
        with self._lock:
            self._end(begun)

    def _end(self, begun: Begun) -> _DataNode:
        one = self._of(begun.datanode)
        one.in_flight = max(0, one.in_flight - 1)
        return one

    def _of(self, datanode: str) -> _DataNode:
        found = self._datanodes.get(datanode)
        if found is None:
            if len(self._datanodes) >= _MOST_DATANODES:
                self._datanodes = {
                    name: one for name, one in self._datanodes.items() if one.in_flight
                }
            found = self._datanodes[datanode] = _DataNode()
        return found

    def _outlooks(self, datanodes: Iterable[str]) -> dict[str, Outlook]:
        known = {name: self._datanodes.get(name, _DataNode()) for name in datanodes}
        # A DataNode never read is taken to be as good as the best, so that it is tried.
        best = max((one.bytes_per_s or 0.0 for one in known.values()), default=0.0) or _FIRST_GUESS
        now = self._clock()
        return {
            name: Outlook(
                expected_s=(one.in_flight + 1) * 1e6 / max(one.bytes_per_s or best, 1.0),
                is_left_alone=one.strikes > 0 and (now < one.alone_until or one.in_flight > 0),
                last_used=one.last_used,
            )
            for name, one in known.items()
        }


@dataclass(slots=True)
class _DataNode:
    bytes_per_s: float | None = None
    in_flight: int = 0
    last_used: int = 0
    strikes: int = 0
    struck_at: float = 0.0
    alone_until: float = 0.0
