"""Stamp: by which a file is recognised, as long as nobody writes to it."""

from __future__ import annotations

import os
from typing import NamedTuple


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
