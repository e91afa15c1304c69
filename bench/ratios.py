"""How rows compare: our best against each rival, like with like. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.samples import Kind, Row, fastest


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast one row is as another."""

    ours: Row
    rival: Row
    is_of_quickest: bool
    """Whether no other peer is faster than the rival."""

    @property
    def value(self) -> float:
        return self.ours.best_rate / self.rival.best_rate

    @property
    def what(self) -> str:
        role = "the fastest peer, " if self.is_of_quickest else ""
        if self.rival.kind is Kind.LIMIT:
            role = "the limit, "
        return (
            f"{self.ours.name} ({self.ours.best_rate:.0f} MB/s) against {role}{self.rival.name} "
            f"({self.rival.best_rate:.0f} MB/s)"
        )

    def __str__(self) -> str:
        return f"**{self.value:.2f}×** {self.what}"


def ratios_of(rows: Sequence[Row]) -> list[Ratio]:
    """What a section is about, group by group."""
    groups = dict.fromkeys(row.group for row in rows)
    return [
        ratio for group in groups for ratio in _ratios([row for row in rows if row.group == group])
    ]


def _ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Rivals get our fastest row of their kind of memory: touching fresh pages costs a copy."""
    quickest = fastest(rows, Kind.PEER)
    peers = dict.fromkeys(row.who for row in rows if row.kind is Kind.PEER)
    rivals = [*(fastest(rows, Kind.PEER, who) for who in peers), fastest(rows, Kind.LIMIT)]
    ratios = []
    for rival in filter(None, rivals):
        alike = [row for row in rows if row.is_fresh is rival.is_fresh]
        ours = fastest(alike, Kind.OURS)
        if ours is not None:
            ratios.append(Ratio(ours, rival, rival is quickest))
    return ratios
