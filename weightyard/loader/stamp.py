"""Stamp: by what a file is known again as long as nobody wrote to it."""

from __future__ import annotations

import os
from typing import NamedTuple


class Stamp(NamedTuple):
    """What the system says of a file. Whoever writes to one changes the last of it at least."""

    device: int
    inode: int
    bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, seen: os.stat_result) -> Stamp:
        return cls(seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
