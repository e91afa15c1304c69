"""Ports for a cluster's daemons that no other cluster on this machine is given."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from weightyard.errors import ClusterFailed
from weightyard.testing.cluster.configuration import LOOPBACK

FIRST, LAST = 20_000, 32_000
"""Below the range the kernel takes for outgoing connections: a daemon that is restarted must get
its port again, and would not if some connection had been given it meanwhile."""

BLOCK = 64
"""Ports one cluster gets: enough for MAX_DATANODES and their NameNodes."""


@dataclass(frozen=True, slots=True)
class PortBlock:
    """Neighbouring ports, held for as long as this object is open."""

    first: int
    _claim: socket.socket

    @classmethod
    def reserve(cls) -> Self:
        """Claim ports that are free on every address a daemon may listen on."""
        firsts = list(range(FIRST, LAST - BLOCK, BLOCK))
        random.Random().shuffle(firsts)
        for first in firsts:
            claim = socket.socket(socket.AF_UNIX)
            try:
                # An abstract socket: one holder per machine, given back by the kernel.
                claim.bind(f"\0weightyard-ports-{first}")
            except OSError:
                claim.close()
                continue
            if all(_is_free(host, first + n) for host in LOOPBACK for n in range(BLOCK)):
                return cls(first, claim)
            claim.close()
        raise ClusterFailed(f"no {BLOCK} neighbouring free ports between {FIRST} and {LAST}")

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + BLOCK))

    def close(self) -> None:
        self._claim.close()


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemons do
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
