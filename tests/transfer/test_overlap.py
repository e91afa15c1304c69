"""What a read does at the same time: asking where packs lie, fetching, decoding, hedging."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from filled import Filled
from replicated import Replicated
from waiting import SOON_S

from weightyard.errors import Cancelled
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import Location, Read, Replica, Served, Store, StorePath
from weightyard.testing.faults import FaultyStore
from weightyard.transfer import fetching
from weightyard.transfer.hedging import ENOUGH_SAMPLES, HedgeBudget
from weightyard.transfer.learned import Learned
from weightyard.transfer.pipeline import _LOCATORS

PACKS = 80
SLOW, QUICK = Replica("slow:9866", "slow"), Replica("quick:9866", "quick")
SLOW_S = 0.3
"""What the slow replica takes: three times what any read is given before it is hedged."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return Filled(tmp_path_factory.mktemp("store"), PACKS)


class Watched(FaultyStore):
    """Calls something before it says where a file lies, and before it reads."""

    def __init__(
        self,
        store: Store,
        locating: Callable[[], object] = lambda: None,
        reading: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(store)
        self._locating = locating
        self._reading = reading

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        self._locating()
        return super().locate(path, timeout_s=timeout_s)

    def read(self, location: Location, reads: Sequence[Read], **how: Any) -> Served:
        self._reading()
        return super().read(location, reads, **how)


def test_where_packs_lie_is_asked_for_many_at_the_same_time(filled: Filled) -> None:
    together = threading.Barrier(_LOCATORS)
    calls = iter(range(10 * PACKS))

    def meet() -> None:
        if next(calls) < _LOCATORS:
            together.wait(SOON_S)  # raises unless all of them are there

    filled.read_all(Watched(filled.store, locating=meet))
    assert not together.broken


def test_where_packs_lie_is_asked_for_ahead_of_the_reads(filled: Filled) -> None:
    """Not one read is done before all packs were asked for."""
    asked, all_asked = iter(range(1, 10 * PACKS)), threading.Event()

    def ask() -> None:
        if next(asked) == PACKS:
            all_asked.set()

    def wait() -> None:
        assert all_asked.wait(SOON_S)

    filled.read_all(Watched(filled.store, locating=ask, reading=wait), threads=2)


def test_blocks_are_fetched_while_another_one_is_decoded(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_run: Callable[..., float] = fetching.decode_run
    decodes, reads = iter(range(10 * PACKS)), iter(range(10 * PACKS))
    is_decoding, is_fetched_meanwhile = threading.Event(), threading.Event()

    def decode(*arguments: Any) -> float:
        if next(decodes) == 0:
            is_decoding.set()
            assert is_fetched_meanwhile.wait(SOON_S)
        return decode_run(*arguments)

    def read() -> None:
        if next(reads) > 0:
            assert is_decoding.wait(SOON_S)
            is_fetched_meanwhile.set()

    monkeypatch.setattr(fetching, "decode_run", decode)
    filled.read_all(Watched(filled.store, reading=read), threads=2)


class SlowReplica(Replicated):
    """Every file on two DataNodes, of which one takes long to answer."""

    def before_read(
        self,
        location: Location,
        reads: Sequence[Read],
        replica: Replica | None,
        cancel: Cancel | None,
    ) -> None:
        if replica == SLOW:
            assert cancel is not None
            ended = threading.Event()
            with cancel.ending(ended.set, "reading slowly"):
                if ended.wait(SLOW_S):
                    raise Cancelled("another one was quicker")


def test_of_reads_that_all_take_long_few_are_hedged(filled: Filled) -> None:
    burst = 4
    learned = Learned(hedges=HedgeBudget(burst=burst))
    for exponent in range(10, 30):
        for _ in range(ENOUGH_SAMPLES):
            learned.pace.add(1 << exponent, 0.001)
    report = filled.read_all(
        SlowReplica(filled.store, SLOW, QUICK),
        threads=16,
        learned=learned,
        choose=lambda span: (SLOW, QUICK),
    )
    assert report.requests == PACKS
    assert 1 <= report.hedged <= 0.05 * report.requests + burst
