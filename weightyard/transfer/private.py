"""Private: folders and small files of this user alone, below the cache."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from weightyard.errors import NotAllowed
from weightyard.transfer.source import translated

_ADVICE = "remove it, or set WEIGHTYARD_CACHE to a folder of your own"


def private_folder(folder: Path) -> Path:
    """Make a folder only this user can enter, or see that it is one. Raises NotAllowed.

    What lies in it is mapped into processes without being read first, so nobody else may have had
    a hand in it: a link, or a folder of someone else, is refused.
    """
    with translated(folder):
        try:
            seen = os.lstat(folder)
        except FileNotFoundError:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            seen = os.lstat(folder)
        above = os.stat(folder.parent)
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            raise NotAllowed(f"{folder.parent} can be changed by every user: chmod o-w it")
        if not stat.S_ISDIR(seen.st_mode):
            raise NotAllowed(f"{folder} is a link, or no folder: {_ADVICE}")
        if seen.st_uid != os.geteuid():
            raise NotAllowed(f"{folder} belongs to user id {seen.st_uid}: {_ADVICE}")
        if seen.st_mode & 0o077:
            folder.chmod(0o700)
    return folder


def is_own_file(file: Path | str, file_bytes: int) -> bool:
    """Whether this is a plain file of this user, of that length."""
    try:
        seen = os.lstat(file)
    except OSError:
        return False
    return stat.S_ISREG(seen.st_mode) and seen.st_uid == os.geteuid() and seen.st_size == file_bytes


def is_own_folder(folder: Path | str) -> bool:
    """Whether this is a folder of this user, and no link."""
    try:
        seen = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid()


def write_small(file: Path, content: bytes) -> None:
    """Give a small file this content: readers see the old or the new, never a part."""
    partial = file.with_name(f".{secrets.token_hex(8)}.partial")
    with translated(file):
        try:
            handle = os.open(
                partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            with open(handle, "wb") as opened:
                opened.write(content)
            partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def read_small(file: Path, limit_bytes: int) -> bytes | None:
    """What is in a small file; None if it is not there, not this user's, or too long."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid():
            return None
        with open(handle, "rb", closefd=False) as opened:
            # Not up to the limit at once: `read` makes memory for as much as it is asked for.
            content = opened.read(min(seen.st_size, limit_bytes) + 1)
    finally:
        os.close(handle)
    return content if len(content) <= limit_bytes else None


def keep_newest(
    folder: Path, most: int, most_bytes: int, kept: Collection[str] = frozenset()
) -> None:
    """Remove the files of a folder that were written longest ago, over a number and over a length
    of all together. Those of the names `kept` stay, and do not count."""
    files = []
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):
                seen = file.lstat()
                files.append((seen.st_mtime, seen.st_size, file))
    for _, size, file in sorted(files, key=lambda one: one[0], reverse=True):
        if file.name in kept:
            continue
        most, most_bytes = most - 1, most_bytes - size
        if most < 0 or most_bytes < 0:
            file.unlink(missing_ok=True)
