"""A store elsewhere, whose snapshots are by-products of loads. Run as a program: loads from it.

    byproduct_world.py FOLDER [hold]

prints what a load came from. With `hold` the snapshot is begun and never done.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loader_world import BERT, our_threads
from snapshot_world import settings_in

from weightyard.format.block import MIB
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore
from weightyard.testing.faults import FaultyStore
from weightyard.yard import Yard


class Elsewhere:
    """A yard whose store is not this host's, as far as it can tell.

    While the gate is shut, what makes a snapshot gets nothing from the store.
    """

    def __init__(self, folder: Path, **settings: object) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = threading.Event()
        """What makes a snapshot is at the gate."""
        self.database = Database(f"sqlite:///{folder}/store/registry.db")
        self.store = FaultyStore(LocalStore(folder / "store"), on_call=self._called)
        self.yard = Yard(
            self.store,
            Registry(self.database, store=self.store),
            block_bytes=MIB,
            settings=settings_in(folder, **settings),
        )

    def made(self) -> None:
        """Wait for what is being made."""
        self.gate.set()
        assert self.yard.byproducts.wait(60)

    def _called(self, index: int, name: str) -> None:
        if name == "read" and "weightyard-snapshot" in our_threads():
            while not self.gate.is_set() and not self.yard.byproducts.is_closed:
                self.is_held.set()
                time.sleep(0.01)


@contextmanager
def elsewhere(folder: Path, **settings: object) -> Iterator[Elsewhere]:
    world = Elsewhere(folder, **settings)
    with world.yard:
        yield world


def main(folder: Path, *, hold: bool) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with elsewhere(folder) as world:
        if hold:
            world.gate.clear()
        weights = world.yard.load(BERT)
        reads = world.store.calls.count("read")
        print("snapshot" if weights.report.from_snapshot else "store", reads, flush=True)
        if hold:
            assert world.is_held.wait(60)
            print("at it", flush=True)
            time.sleep(300)
        world.made()  # closing would wait for it too, but not for long


if __name__ == "__main__":
    main(Path(sys.argv[1]), hold="hold" in sys.argv)
