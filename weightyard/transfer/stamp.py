"""Stamp: by which a file is recognised, as long as nobody writes to it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")
_MARKING = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs"}
"""File systems that mark a file as changed when a program writes to it through a mapping. Those in
memory do not, others do so late, and one on another host may be asked only once a minute."""


class Stamp(NamedTuple):
    """What the system says of a file. Writing to the file changes at least the last field."""

    device: int
    inode: int
    bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, seen: os.stat_result) -> Stamp:
        return cls(seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


def marking_devices() -> frozenset[int]:
    """The devices on which files that others may have mapped are recognised by their stamps."""
    found = set()
    with suppress(OSError, ValueError, IndexError):
        for line in _MOUNTS.read_text().splitlines():
            # proc(5): number, parent, device, …, "-", kind of file system, …
            before, _, after = line.partition(" - ")
            if after.split()[0] in _MARKING:
                major, minor = before.split()[2].split(":")
                found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)
