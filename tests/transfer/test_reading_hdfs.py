"""Reading from a real HDFS whose DataNodes stop, die and come back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from begun import begun, left
from connected import connections_to
from patience import be_patient
from strategies import content

from weightyard.errors import Cancelled, DeadlineExceeded, YardError
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import BlockId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.hdfs.datanode import STALL_S
from weightyard.storage.opening import open_store
from weightyard.storage.store import Read, ReadPath, Store
from weightyard.testing.cluster import Daemon, MiniCluster
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.estimates import FIRST_PENALTY_S, LONGEST_PENALTY_S
from weightyard.transfer.hedging import ENOUGH_SAMPLES, HedgeBudget
from weightyard.transfer.learned import Learned
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.replicas import Distance
from weightyard.transfer.report import ReadEvent, ReadEventKind, ReadReport
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

pytestmark = pytest.mark.cluster

BLOCK_BYTES = 4 * MIB
BLOCKS = 24
LIMIT_S = 60.0
AT_ONCE_S = 15.0
"""Long for a busy machine, and half of what a read takes that nobody ends: the store's deadline."""
SPREAD_READS = 8
"""A busy machine may have one DataNode look slower than the other, for a while."""
TRIES = 3
"""In one of them at least, nothing else keeps this machine from what is promised."""
PROMISED_S = 3.0
"""What the death of a replica adds to a load."""
BUSY_S = 8.0
"""What a busy machine may add to a time that is promised."""
ADDED_S = STALL_S + BUSY_S
"""What the death of a replica may cost a read: that it is waited for once, not by each read."""


class Kept:
    """Blocks on all three DataNodes, half of them raw, half encoded."""

    def __init__(self, cluster: MiniCluster) -> None:
        self.cluster = cluster
        self.url = cluster.fresh_dir()
        self.store = self.opened()
        self.store.init()
        self.catalogue = MemoryCatalogue()
        data = [content(BLOCK_BYTES, ("noise", "weights")[i % 2], i) for i in range(BLOCKS)]
        tensors = [StateTensor(f"t{i:02}", DType.BF16, (BLOCK_BYTES // 2,)) for i in range(BLOCKS)]
        options = WriteOptions(replication=3, min_replicas=3, pack_bytes=4 * BLOCK_BYTES)
        writer = Writer(self.store, self.catalogue.upload(), options)
        sources = [MemorySource(one) for one in data]
        (ids,) = writer.write([Content(split_state(tensors, BLOCK_BYTES), sources)])
        self.blocks: dict[BlockId, bytes] = dict(zip(ids, data, strict=True))

    def opened(self) -> Store:
        return open_store(self.url, Settings(hadoop_conf_dir=self.cluster.conf_dir))

    def wanted(self) -> tuple[dict[BlockId, bytearray], list[Wanted]]:
        """Buffers, and for them a read of each block by itself, so that there are many."""
        out = {block: bytearray(BLOCK_BYTES) for block in self.blocks}
        half = BLOCK_BYTES // 2
        return out, [
            Wanted(block, at, memoryview(into)[at : at + half])
            for block, into in out.items()
            for at in (0, half)
        ]

    def near(self, rack: str) -> Settings:
        return Settings(hadoop_conf_dir=self.cluster.conf_dir, location=rack)

    def datanode(self, rack: str) -> Daemon:
        """The only DataNode of a rack."""
        racks = self.cluster.plan.datanodes
        (found,) = [
            daemon
            for daemon, plan in zip(self.cluster.datanodes, racks, strict=True)
            if plan.rack == rack
        ]
        return found


@pytest.fixture(scope="module")
def kept(cluster: MiniCluster) -> Iterator[Kept]:
    kept = Kept(cluster)
    yield kept
    kept.store.close()


@pytest.fixture
def patient(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Their store, to which a silent DataNode has not failed: so may one be on a busy machine."""
    be_patient(monkeypatch)
    with kept.opened() as store:
        yield store


class Reading:
    """Reads from one place, and what came of the last one."""

    def __init__(
        self,
        kept: Kept,
        rack: str,
        learned: Learned,
        *,
        store: Store | None = None,
        threads: int | None = None,
    ) -> None:
        self.events: list[ReadEvent] = []
        self.learned = learned
        self.took_s = 0.0
        self._kept = kept
        self._reader = Reader(
            store or kept.store,
            kept.catalogue,
            settings=kept.near(rack),
            on_event=self.events.append,
            threads=threads,
            learned=learned,
        )

    def read(self, progress: Callable[[int], None] | None = None) -> ReadReport:
        out, wanted = self._kept.wanted()
        self.events.clear()
        began = time.monotonic()
        report = self._reader.read(wanted, progress)
        self.took_s = time.monotonic() - began
        assert out == self._kept.blocks
        return report

    def kinds(self) -> set[ReadEventKind]:
        return {event.kind for event in self.events}


def unhedged() -> Learned:
    return Learned(hedges=HedgeBudget(share=0, burst=0))


@contextmanager
def paused(daemon: Daemon) -> Iterator[None]:
    daemon.pause()
    try:
        yield
    finally:
        daemon.resume()


def test_reads_go_to_the_readers_own_rack(kept: Kept, patient: Store) -> None:
    report = Reading(kept, "/rack-b", unhedged(), store=patient).read()
    assert report.by_path == {ReadPath.DIRECT: report.stored_bytes}
    assert report.by_datanode == {kept.datanode("/rack-b").plan.address: report.stored_bytes}
    assert report.by_distance == {Distance.SAME_RACK: report.stored_bytes}


def test_reads_spread_over_equally_near_replicas(kept: Kept, patient: Store) -> None:
    reading = Reading(kept, "/rack-a", unhedged(), store=patient)
    far = kept.datanode("/rack-b").plan.address
    near = {one.plan.address for one in kept.cluster.datanodes} - {far}
    served: Counter[str] = Counter()
    for _ in range(SPREAD_READS):
        report = reading.read()
        assert set(report.by_datanode) == near
        assert report.by_distance == {Distance.SAME_RACK: report.stored_bytes}
        served += report.by_datanode
        if min(served.values()) >= served.total() / 4:
            break
    assert min(served.values()) >= served.total() / 4, "each has at least a quarter"


def test_without_a_place_all_replicas_are_equally_near(kept: Kept, patient: Store) -> None:
    reader = Reader(patient, kept.catalogue, learned=unhedged())
    report = reader.read(kept.wanted()[1])
    assert len(report.by_datanode) == 3
    assert report.by_distance == {Distance.UNKNOWN: report.stored_bytes}


def test_reads_leave_a_stopped_datanode_and_come_back_to_it(kept: Kept) -> None:
    near = kept.datanode("/rack-b")
    reading = Reading(kept, "/rack-b", unhedged())
    reading.read()
    usual_s = reading.took_s
    with paused(near):
        report = reading.read()
        assert reading.took_s < usual_s * 2 + ADDED_S
        assert near.plan.address not in report.by_datanode
        assert report.failed_over >= 1
        assert any(near.plan.address in failure for failure in report.failed)
        assert ReadEventKind.REPLICA_FAILED in reading.kinds()
        left_alone = reading.read()
        trials = 1 + reading.took_s / FIRST_PENALTY_S
        assert left_alone.failed_over <= trials, "at most one read at a time tries it"
    kept.cluster.wait_until_live(near)
    deadline = time.monotonic() + LONGEST_PENALTY_S + LIMIT_S
    back: list[ReadEvent] = []
    while near.plan.address not in reading.read().by_datanode:
        back += reading.events
        assert time.monotonic() < deadline
        time.sleep(0.2)
    back += reading.events
    # On a busy machine another one may have been silent for a while, and recovered too.
    recovered = [event.datanode for event in back if event.kind is ReadEventKind.RECOVERED]
    assert recovered.count(near.plan.address) == 1


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_datanode_that_ends_in_the_middle_costs_little_and_no_byte(kept: Kept, end: str) -> None:
    added_s = []
    while len(added_s) < TRIES and (not added_s or added_s[-1] >= PROMISED_S):
        usual_s, took_s = _ended_in_the_middle(kept, end)
        assert took_s < usual_s * 2 + ADDED_S
        added_s.append(took_s - usual_s)
    assert added_s[-1] < PROMISED_S, f"in one of {TRIES} tries: {added_s}"


def _ended_in_the_middle(kept: Kept, end: str) -> tuple[float, float]:
    """How long a read takes, and one during which the nearest DataNode ends."""
    near = kept.datanode("/rack-b")
    reading = Reading(kept, "/rack-b", Learned(), threads=2)
    reading.read()
    usual_s = reading.took_s
    is_gone = False

    def strike(done_bytes: int) -> None:
        nonlocal is_gone
        if not is_gone:
            is_gone = True
            near.kill() if end == "killed" else near.pause()

    try:
        report = reading.read(strike)
        took_s = reading.took_s
    finally:
        if end == "killed":
            kept.cluster.restart(near)
        else:
            near.resume()
            kept.cluster.wait_until_live(near)
    assert report.by_distance[Distance.OTHER_RACK] > 0
    assert report.failed_over + report.hedges_won >= 1
    return usual_s, took_s


def test_a_slow_read_is_hedged_and_the_quicker_replica_wins(kept: Kept, patient: Store) -> None:
    near = kept.datanode("/rack-b")
    learned = Learned(hedges=HedgeBudget(burst=1000))
    reading = Reading(kept, "/rack-b", learned, store=patient)
    reading.read()
    for exponent in range(10, 30):
        for _ in range(ENOUGH_SAMPLES):
            learned.pace.add(1 << exponent, 0.001)
    with paused(near):
        report = reading.read()
    kept.cluster.wait_until_live(near)
    assert report.hedges_won >= 1
    assert report.hedged >= report.hedges_won
    assert report.failed_over == 0, "nobody waited until it counted as failed"
    assert any(near.plan.address in failure for failure in report.failed), "it says which"
    assert ReadEventKind.HEDGED in reading.kinds()
    assert report.by_distance[Distance.OTHER_RACK] == report.stored_bytes


def test_a_cancelled_direct_read_returns_at_once_and_writes_no_more(
    kept: Kept, patient: Store
) -> None:
    near = kept.datanode("/rack-b")
    location = kept.store.locate(layout.pack(next(iter(kept.catalogue.packs))))
    (replica,) = [one for one in location.spans[0].replicas if one.rack == "/rack-b"]
    out = bytearray(location.length)
    cancel = Cancel()
    timer = threading.Timer(0.2, cancel.cancel)
    with paused(near):
        timer.start()
        began = time.monotonic()
        with pytest.raises(Cancelled):
            patient.read(location, [Read(0, memoryview(out))], replica=replica, cancel=cancel)
        took_s = time.monotonic() - began
        timer.join()
    seen = bytes(out)
    kept.cluster.wait_until_live(near)
    assert took_s < AT_ONCE_S
    assert bytes(out) == seen


@pytest.mark.parametrize("why", ["time-out", "ctrl-c", "cancel"])
def test_giving_up_leaves_no_thread_and_no_connection(kept: Kept, patient: Store, why: str) -> None:
    """All DataNodes stand still, so that every read is under way when it is given up."""
    ports = {int(one.plan.address.rpartition(":")[2]) for one in kept.cluster.datanodes}
    raised: type[BaseException] = {
        "time-out": DeadlineExceeded,
        "ctrl-c": KeyboardInterrupt,
        "cancel": Cancelled,
    }[why]
    of_others = connections_to(ports)  # which stores of other tests keep for their next read
    cancel = Cancel()
    timer = threading.Timer(
        0.4, cancel.cancel if why == "cancel" else lambda: os.kill(os.getpid(), signal.SIGINT)
    )

    def read_until_it_is_given_up() -> None:
        if why != "time-out":
            timer.start()  # not before: wherever Ctrl-C is heard, it must be expected
        reader.read(kept.wanted()[1], timeout_s=0.4 if why == "time-out" else None, cancel=cancel)

    with patient as store:
        reader = Reader(store, kept.catalogue, learned=Learned())
        reader.read(kept.wanted()[1])
        for daemon in kept.cluster.datanodes:
            daemon.pause()
        try:
            began = time.monotonic()
            with begun() as threads, pytest.raises(raised) as caught:
                read_until_it_is_given_up()
            took_s = time.monotonic() - began
        finally:
            for daemon in kept.cluster.datanodes:
                daemon.resume()
        reading = [one for one in threads if one.name.startswith(_THREADS)]
        assert reading
        still_there = left(reading)
    for daemon in kept.cluster.datanodes:
        kept.cluster.wait_until_live(daemon)
    assert took_s < AT_ONCE_S
    assert still_there == []
    assert connections_to(ports) <= of_others
    assert why == "ctrl-c" or isinstance(caught.value, YardError)


_THREADS = ("weightyard-fetch", "weightyard-decode", "weightyard-locate")
