"""Stitched: runs of files, mapped behind each other so that they are one run of memory.

Nothing is copied, nothing is written back. Python's `mmap` maps only one run of one file, at an
address of its own choice. So it reserves room for all runs here, and the C library's `mmap` then
maps each of them at its place in that room.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
"""Size of a large page. The kernel can map a run by large pages, with 512 times fewer entries to
make, if its address and its place in the file are equally far behind a multiple of this."""
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class FileRun:
    """Neighbouring bytes of a file."""

    file: Path
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def can_stitch(runs: Sequence[FileRun]) -> bool:
    """Whether each begins as far into a page as the one before it ends."""
    return all(before.end % _PAGE == after.start % _PAGE for before, after in pairwise(runs))


def stitched(runs: Sequence[FileRun]) -> memoryview:
    """Memory that holds these runs, which can be stitched, one behind the other.

    It is private: what is changed is copied first, by the kernel. The files may be removed
    meanwhile, but not be cut. Raises OSError, also for a file that ends before its run does.
    """
    skew = runs[0].start % _HUGE
    length = skew + sum(run.length for run in runs)
    # Since Linux 6.7, room whose length is a multiple of _HUGE also begins at such a multiple.
    room = mmap.mmap(-1, length + -length % _HUGE, mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    at = skew
    for number, run in enumerate(runs):
        page = at - at % _PAGE if number else 0
        ends = room[page:at] if number else b""  # of the run before, in the page where both meet
        _map_at(address + page, run, at - page)
        room[page : page + len(ends)] = ends
        at += run.length
    return memoryview(room)[skew:length]


def have_at_hand(memory: memoryview) -> None:
    """Read the pages of mapped memory that are not in memory yet. Raises OSError.

    Without this, touching a page that the disk cannot deliver kills the process (SIGBUS). Needs
    Linux 5.14.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    skew = address % _PAGE
    if _libc.madvise(address - skew, memory.nbytes + skew, _MADV_POPULATE_READ):
        raise _failure("mapped memory")


def _map_at(address: int, run: FileRun, skew: int) -> None:
    with open(run.file, "rb", buffering=0) as opened:
        file = opened.fileno()
        if os.fstat(file).st_size < run.end:
            raise OSError(f"{run.file} is shorter than {run.end} bytes")
        protection, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        start, length = run.start - skew, run.length + skew
        if _libc.mmap(address, length, protection, how, file, start) == _FAILED:
            raise _failure(str(run.file))


def _failure(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), what)
