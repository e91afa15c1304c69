"""Kills a process that makes a snapshot, at one system call after the other. Run as a program.

Each child counts what it does to files of the cache (by audit events, so nothing is patched) and
kills itself at the n-th. After each a fresh child must find nothing half made, make the snapshot,
and leave nothing of the dead one behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from snapshot_world import BERT, content, leftovers, settings_in

from weightyard.format.block import MIB
from weightyard.loader.snapshots import Snapshots
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore
from weightyard.yard import Yard

_EVENTS = {
    "open", "os.mkdir", "os.rename", "os.link", "os.chmod", "os.remove", "os.utime", "fcntl.flock",
    "mmap.__new__", "os.truncate",
}  # fmt: skip


def make(folder: Path, kill_at: int | None) -> int:
    """Make the snapshot in a child; how many events that took, or -1 if it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event in _EVENTS and (
                not isinstance(arguments[0], str | Path) or is_ours(arguments)
            ):
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        def is_ours(arguments: tuple[Any, ...]) -> bool:
            return str(folder / "cache" / "snapshots") in str(arguments[0])

        with _quickly_opened(folder) as yard:
            sys.addaudithook(hook)
            yard.snapshot(BERT)
            os.write(writer, str(count).encode())
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 100)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return -1
    assert os.waitstatus_to_exitcode(status) == 0
    return int(said)


def _quickly_opened(folder: Path) -> Yard:
    """The yard that is there already, without looking whether it is."""
    store = LocalStore(folder / "store")
    registry = Registry(Database(f"sqlite:///{folder}/store/registry.db"), store=store)
    return Yard(store, registry, block_bytes=MIB, settings=settings_in(folder))


def check(folder: Path, expected: dict[str, bytes], moment: int) -> None:
    """A fresh look: all or nothing, then all, then nothing left over."""
    root = folder / "cache" / "snapshots"
    for visible in root.glob("[0-9a-f]*"):
        assert content(visible) == expected, f"half a snapshot at moment {moment}"
    assert make(folder, None) >= 0, moment
    snapshots = Snapshots(folder / "cache")
    (one,) = snapshots.listed()
    assert content(one.place.folder) == expected, moment
    assert not one.is_used, moment
    snapshots.sweep()
    assert leftovers(folder / "cache") == [], moment


def main(folder: Path, model: Path, step: int) -> None:
    expected = dict(content(model))
    shutil.rmtree(folder / "cache" / "snapshots", ignore_errors=True)
    events = make(folder, None)
    killed = 0
    for moment in range(1, events + 1, step):
        shutil.rmtree(folder / "cache" / "snapshots")
        killed += make(folder, moment) == -1
        check(folder, expected, moment)
    print(json.dumps({"events": events, "killed": killed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
