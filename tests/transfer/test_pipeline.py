"""The pipeline: as many fetches as the network rewards, as many decoders as there are cores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from strategies import content

from weightyard.format.block import KIB, MIB
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import BlockId
from weightyard.storage.cancel import Cancel
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Location, Read, Replica, Served, Store
from weightyard.testing.faults import FaultyStore
from weightyard.transfer import fetching
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.learned import Learned
from weightyard.transfer.pipeline import how_many_more
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

LIMIT_S = 60.0
BLOCK_BYTES = 64 * KIB
"""The least that has a block of its own."""
BLOCKS = 96


@pytest.mark.parametrize(
    ("limit", "decoders", "under_way", "fetched", "more"),
    [
        # As many as the network rewards.
        (8, 2, 0, 0, 8),
        (8, 2, 5, 0, 3),
        (64, 2, 10, 2, 54),
        (8, 2, 8, 0, 0),
        # The limit has shrunk below what is under way: none is begun, none is ended.
        (4, 2, 8, 0, 0),
        # One more than can decode at once, though the network rewards fewer.
        (2, 8, 0, 0, 9),
        (2, 8, 8, 8, 1),
        (2, 8, 9, 0, 0),
        # Every decoder busy is fine; one run waiting for a decoder is not.
        (8, 2, 3, 2, 5),
        (8, 2, 3, 3, 0),
        (64, 1, 2, 2, 0),
    ],
)
def test_how_many_runs_are_begun(
    limit: int, decoders: int, under_way: int, fetched: int, more: int
) -> None:
    assert how_many_more(limit, decoders, under_way, fetched) == more


class Meeting:
    """Lets the first calls go on only when so many are inside; knows the most there were ever."""

    def __init__(self, parties: int) -> None:
        self.most = 0
        self._inside = 0
        self._lock = threading.Lock()
        self._parties = parties
        self._all_here = threading.Event()

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
            if self._inside == self._parties:
                self._all_here.set()
        try:
            assert self._all_here.wait(LIMIT_S), f"only {self.most} at once"
            yield
        finally:
            with self._lock:
                self._inside -= 1


class MeetingStore(FaultyStore):
    """Its reads meet."""

    def __init__(self, store: Store, meeting: Meeting) -> None:
        super().__init__(store)
        self._meeting = meeting

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        with self._meeting.inside():
            return super().read(
                location, reads, replica=replica, timeout_s=timeout_s, cancel=cancel
            )


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return Filled(tmp_path_factory.mktemp("store"))


class Filled:
    """A store with many small blocks, each in a pack of its own: each is a read of its own."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)
        self.store.init()
        self.catalogue = MemoryCatalogue()
        data = [content(BLOCK_BYTES, "weights", seed) for seed in range(BLOCKS)]
        tensors = [StateTensor(f"t{i:02}", DType.BF16, (BLOCK_BYTES // 2,)) for i in range(BLOCKS)]
        writer = Writer(self.store, self.catalogue.upload(), WriteOptions(pack_bytes=BLOCK_BYTES))
        sources = [MemorySource(one) for one in data]
        (ids,) = writer.write([Content(split_state(tensors, MIB), sources)])
        self.blocks: dict[BlockId, bytes] = dict(zip(ids, data, strict=True))
        assert len(self.catalogue.packs) == BLOCKS

    def read_all(self, store: Store, **how: Any) -> None:
        out = {block: bytearray(BLOCK_BYTES) for block in self.blocks}
        reader = Reader(store, self.catalogue, learned=Learned(), **how)
        reader.read(Wanted(block, 0, memoryview(into)) for block, into in out.items())
        assert out == self.blocks


@pytest.mark.parametrize("threads", [2, 6, 32])
def test_so_many_reads_are_under_way_as_the_limit_allows_and_no_more(
    filled: Filled, threads: int
) -> None:
    meeting = Meeting(threads)
    filled.read_all(MeetingStore(filled.store, meeting), threads=threads)
    assert meeting.most == threads


@pytest.mark.parametrize("cores", [1, 3, 8])
def test_so_many_runs_are_decoded_at_once_as_there_are_cores_and_no_more(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    meeting = Meeting(cores)
    decode_run: Callable[..., float] = fetching.decode_run

    def decode(*arguments: Any) -> float:
        with meeting.inside():
            return decode_run(*arguments)

    monkeypatch.setattr("weightyard.transfer.pipeline.cores", lambda: cores)
    monkeypatch.setattr(fetching, "decode_run", decode)
    filled.read_all(filled.store)
    assert meeting.most == cores
