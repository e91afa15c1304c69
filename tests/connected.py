"""Which connections this process has."""

from __future__ import annotations

from pathlib import Path


def connections_to(ports: set[int]) -> int:
    """Sockets of this process that are connected to these ports, by the kernel's tables."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            own.add(link.readlink().name)
        except OSError:
            continue
    fields = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(
        int(field[2].rpartition(":")[2], 16) in ports and f"socket:[{field[9]}]" in own
        for field in fields
    )
