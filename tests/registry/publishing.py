"""Many who publish versions of one model at the same moment.

A program: `python publishing.py DATABASE FOLDER FIRST` says that it is ready, waits until its
standard input ends, publishes eight versions at once, and says in JSON what went wrong.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crash_world import OPTIONS
from ending import end_with_parent
from pushing import BERT, write

from weightyard.errors import YardError
from weightyard.records import Publication
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore
from weightyard.transfer.publish import publish

LIMIT_S = 150.0


def publish_at_once(registry: Registry, store: LocalStore, seeds: Iterable[int]) -> list[str]:
    """Each seed a version, of which none is committed before all are there. What went wrong."""
    seeds = list(seeds)
    ready = threading.Barrier(len(seeds), timeout=LIMIT_S)

    def work(seed: int) -> str | None:
        said = Publication()
        try:
            upload = registry.open_upload(BERT, said)
            manifest = write(upload, store, b"%d" % seed * 100, options=OPTIONS)
            ready.wait()
            publish(store, upload, manifest, said, upload.id.hex)
        except (YardError, threading.BrokenBarrierError) as why:
            ready.abort()
            return repr(why)
        return None

    with ThreadPoolExecutor(len(seeds)) as pool:
        return [wrong for wrong in pool.map(work, seeds, timeout=LIMIT_S) if wrong is not None]


def main() -> None:
    end_with_parent()
    url, folder, first = sys.argv[1:]
    with Registry(Database(url)) as registry:
        registry.models()
        print("ready", flush=True)
        sys.stdin.read()
        at = int(first)
        wrong = publish_at_once(registry, LocalStore(Path(folder)), range(at, at + 8))
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
