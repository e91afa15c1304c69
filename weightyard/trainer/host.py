"""Host: how many of its cores, and how much of its memory, a rank may use."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from weightyard.transfer.cores import cores

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def ranks_here() -> int:
    """How many ranks torchrun has started on this host; 1 without torchrun."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks) if ranks.isdecimal() else 1)


def share_of_cores() -> int:
    """The cores that this process may use, divided among the host's ranks."""
    return max(1, cores() // ranks_here())


def share_of_memory() -> int:
    """The host's memory in bytes, or what a container may have of it, divided among its ranks."""
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([has, *cgroup_limits()]) // ranks_here()


def cgroup_limits(own: Path = _OWN_CGROUPS, root: Path = _CGROUPS) -> list[int]:
    """The memory limits, in bytes, of the control groups that this process is in.

    The limit of an outer group holds for its inner ones. `own` has lines `number:controllers:path`,
    with number 0 and no controllers for version 2 (cgroups(7)). A container may see its group not
    at that path, but as the root.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        limits += [_limit(top / group / file) for group in (inner, *inner.parents)]
    return [limit for limit in limits if limit is not None]


def _limit(file: Path) -> int | None:
    try:
        said = file.read_text().strip()
    except OSError:
        return None
    return int(said) if said.isdecimal() else None  # "max": none
