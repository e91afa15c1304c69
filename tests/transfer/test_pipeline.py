"""The pipeline: as many fetches as the network rewards, as many decoders as there are cores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from filled import Filled

from weightyard.storage.cancel import Cancel
from weightyard.storage.store import Location, Read, Replica, Served, Store
from weightyard.testing.faults import FaultyStore
from weightyard.transfer import fetching
from weightyard.transfer.pipeline import how_many_more

LIMIT_S = 60.0
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
    return Filled(tmp_path_factory.mktemp("store"), BLOCKS)


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

    monkeypatch.setattr("weightyard.transfer.reader.cores", lambda: cores)
    monkeypatch.setattr(fetching, "decode_run", decode)
    filled.read_all(filled.store)
    assert meeting.most == cores
