"""Which replica to read: the nearest; among equally near ones, the most promising. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightyard.storage.store import Replica


class Distance(enum.StrEnum):
    """How far a replica is, in words for reports."""

    SAME_HOST = "same-host"
    SAME_RACK = "same-rack"
    OTHER_RACK = "other-rack"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reader is in the cluster's topology."""

    rack: str | None = None
    """A path as in Hadoop's topology, `/rack-b` or `/hall-2/rack-b`; None: not known."""
    host: str | None = None
    """The name the cluster has for this host, if it runs a DataNode."""

    def hops(self, replica: Replica) -> int:
        """Hadoop's measure: steps up to the nearest common level, and down again."""
        if replica.host == self.host:
            return 0
        if self.rack is None:
            return _UNKNOWN_HOPS
        here, there = _levels(self.rack), _levels(replica.rack)
        shared = 0
        for one, other in zip(here, there, strict=False):
            if one != other:
                break
            shared += 1
        return len(here) + len(there) - 2 * shared + 2

    def distance(self, replica: Replica) -> Distance:
        match self.hops(replica):
            case 0:
                return Distance.SAME_HOST
            case 2:
                return Distance.SAME_RACK
            case hops:
                return Distance.UNKNOWN if hops >= _UNKNOWN_HOPS else Distance.OTHER_RACK


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect of a DataNode."""

    expected_s: float = 1.0
    """How long a megabyte more would take, beside what it is doing already."""
    is_left_alone: bool = False
    """It failed or was slow a short while ago, or is busy with the one read that tries it again."""
    last_used: int = 0
    """The greater, the later."""


def rank(
    replicas: Sequence[Replica], place: Place, outlooks: Mapping[str, Outlook]
) -> list[Replica]:
    """Replicas in the order in which to ask them. None is left out: any may be the last hope."""

    def key(replica: Replica) -> tuple[int, int, int, int, int]:
        outlook = outlooks.get(replica.datanode, _NO_OUTLOOK)
        doubts = _DOUBTS.get(replica.state, 1)
        return (
            # What happened to us just now says more than the NameNode's word.
            2 if doubts == 2 else int(outlook.is_left_alone),
            doubts,
            place.hops(replica),
            # Estimates that differ by less than their noise are equal: such DataNodes take turns.
            round(math.log(max(outlook.expected_s, 1e-9), _NOISE)),
            outlook.last_used,
        )

    return sorted(replicas, key=key)


_UNKNOWN_HOPS = 1 << 16
_NOISE = 1.5
_DOUBTS = {"normal": 0, "corrupt": 2}
_NO_OUTLOOK = Outlook()


def _levels(rack: str) -> list[str]:
    return [level for level in rack.split("/") if level]
