"""How weightyard's store reads a file of HDFS into memory, by each of its paths."""

from __future__ import annotations

from collections.abc import Mapping

from bench.buffers import Team, fresh, touched
from bench.site import Site
from bench.worker import Action, Prepare
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.store import Read, ReadPath, StorePath


def read_file(
    site: Site, *, path: str, length: int, threads: int, by: str, is_fresh: bool
) -> Action:
    """The store's `locate` and `read`; locating counts, as it does for the peers."""
    folder, _, name = path.rpartition("/")
    store = HdfsStore(f"{site.url}{folder}", Settings(), read_paths=(ReadPath(by),))
    kept = None if is_fresh else touched(length)
    team = Team(threads)

    def read() -> list[memoryview]:
        into = fresh(length) if kept is None else kept
        location = store.locate(StorePath(name))

        def read_range(offset: int, length: int) -> None:
            served = store.read(location, [Read(offset, into[offset : offset + length])])
            if served.path != by:
                raise RuntimeError(f"read by {served.path}, not by {by}")

        if threads == 1:
            read_range(0, length)
        else:
            team.share(length, read_range)
        return [into]

    return read


TASKS: Mapping[str, Prepare] = {"ours.read_file": read_file}
