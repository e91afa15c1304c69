"""Giving a local file its final name: atomically, and never over another."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from weightyard.errors import Unsupported

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS))
"""What link() says on exFAT, on many file systems in user space, and on some network shares."""

_NO_FLAGS = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS))


def move_to_final_name(source: Path, target: Path) -> None:
    """Raises OSError, FileExistsError among them, and Unsupported where no way is safe.

    A crash leaves the file under its first name, its final one, or both.
    """
    try:
        # rename() would overwrite; link() fails if the name is taken, atomically.
        os.link(source, target)
    except OSError as why:
        if why.errno not in _NO_LINKS:
            raise
        _rename(source, target, why)
        return
    sync(target.parent)
    source.unlink()


def sync(path: Path) -> None:
    """Make a file's bytes durable; or the names in a folder, which syncing their files does not."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _rename(source: Path, target: Path, no_link: OSError) -> None:
    failure = _rename_if_free(source, target)
    if failure in _NO_FLAGS:
        raise Unsupported(
            f"{target.parent}: its file system ({_file_system(target)}) has neither hard links nor "
            "a rename that never overwrites: take another file system, such as ext4, xfs or NFS"
        ) from no_link
    if failure:
        raise OSError(failure, os.strerror(failure), str(target))
    sync(target.parent)


def _rename_if_free(source: Path, target: Path) -> int:
    """Linux's rename that fails if the name is taken; returns its errno, 0 if all went well."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return errno.ENOSYS
    names = os.fsencode(source), os.fsencode(target)
    if not renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE):
        return 0
    return ctypes.get_errno()


def _file_system(path: Path) -> str:
    """Its type, such as `exfat`, by Linux's table of mounts."""
    best, found = "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return found
    for mount in mounts:
        _, at, kind, *_ = mount.split(" ")
        if len(at) >= len(best) and path.is_relative_to(at):
            best, found = at, kind
    return found
