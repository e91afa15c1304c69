"""What whoever reads relies on: bounded memory, a whole report, and an end to everything."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from begun import begun, left
from strategies import content

from weightyard.codec import encode, encode_delta
from weightyard.codec.arena import ARENA_BYTES
from weightyard.errors import (
    BadSetting,
    Cancelled,
    DataNodeFailed,
    DeadlineExceeded,
    StaleLocation,
)
from weightyard.format.block import MIB, Codec, block_id
from weightyard.format.dtypes import DType
from weightyard.format.pack import PACK_HEADER, PackBuilder, padding
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import BlockId, PackId, UploadId
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Location, Read, ReadPath, Replica, Served, Span, Store
from weightyard.testing.faults import FaultyStore
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.cores import cores
from weightyard.transfer.hedging import ENOUGH_SAMPLES
from weightyard.transfer.learned import Learned, learned_of
from weightyard.transfer.locations import LIFE_S, MOST_LOCATIONS, Locations
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.replicas import Distance
from weightyard.transfer.report import ReadEvent, ReadEventKind, ReadReport
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

BLOCK_BYTES = 8 * MIB
LIMIT_S = 60.0
REQUEST_S = 30.0
"""What one request of a reader may take, unless it is told otherwise."""


class Filled:
    """A store with some blocks, each in a pack of its own or a few together."""

    def __init__(self, folder: Path, kind: str = "weights", count: int = 12) -> None:
        self.store = LocalStore(folder)
        self.store.init()
        self.catalogue = MemoryCatalogue()
        data = [content(BLOCK_BYTES, kind, seed) for seed in range(count)]
        tensors = [StateTensor(f"t{i:02}", DType.BF16, (BLOCK_BYTES // 2,)) for i in range(count)]
        writer = Writer(
            self.store, self.catalogue.upload(), WriteOptions(pack_bytes=3 * BLOCK_BYTES)
        )
        sources = [MemorySource(one) for one in data]
        (ids,) = writer.write([Content(split_state(tensors, BLOCK_BYTES), sources)])
        self.blocks: dict[BlockId, bytes] = dict(zip(ids, data, strict=True))

    def buffers(self) -> dict[BlockId, bytearray]:
        return {block: bytearray(len(data)) for block, data in self.blocks.items()}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return Filled(tmp_path_factory.mktemp("yard"))


def wanted(buffers: dict[BlockId, bytearray]) -> list[Wanted]:
    return [Wanted(block, 0, memoryview(into)) for block, into in buffers.items()]


def test_the_report_says_what_was_done_and_how_long_each_stage_took(filled: Filled) -> None:
    out = filled.buffers()
    told: list[int] = []
    report = Reader(filled.store, filled.catalogue, learned=Learned()).read(
        wanted(out), told.append
    )
    assert out == filled.blocks
    assert report.raw_bytes == sum(told) == 12 * BLOCK_BYTES
    assert report.stored_bytes < 0.7 * report.raw_bytes
    assert report.by_path == {ReadPath.LOCAL: report.stored_bytes}
    assert report.by_host == {"localhost": report.stored_bytes}
    assert report.by_distance == {Distance.SAME_HOST: report.stored_bytes}
    stages = (report.plan_s, report.locate_s, report.fetch_s, report.decode_s)
    assert all(stage > 0 for stage in stages)
    assert report.wall_s >= report.plan_s
    assert report.bytes_per_s == pytest.approx(report.raw_bytes / report.wall_s)
    assert (report.hedged, report.failed_over, report.looked_up_again) == (0, 0, 0)


def test_reports_of_reads_after_each_other_add_up(filled: Filled) -> None:
    report = ReadReport()
    for block in list(filled.blocks)[:2]:
        report += Reader(filled.store, filled.catalogue).read(
            [Wanted(block, 0, memoryview(bytearray(BLOCK_BYTES)))]
        )
    assert report.raw_bytes == 2 * BLOCK_BYTES
    assert report.requests == 2


def test_hooks_are_called_in_the_thread_that_reads(filled: Filled) -> None:
    threads = set()
    Reader(filled.store, filled.catalogue).read(
        wanted(filled.buffers()), lambda _: threads.add(threading.get_ident())
    )
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("budget", [8 * MIB, 64 * MIB])
def test_memory_in_flight_stays_within_its_budget(filled: Filled, budget: int) -> None:
    out = filled.buffers()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        report = Reader(filled.store, filled.catalogue, threads=16, max_host_bytes=budget).read(
            wanted(out)
        )
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert out == filled.blocks
    assert 0 < report.most_host_bytes <= budget
    # Each thread that decodes has an arena of its own, and the plan is not free.
    assert peak < budget + cores() * ARENA_BYTES + 4 * MIB


def test_raw_blocks_take_no_memory_but_their_destination(tmp_path: Path) -> None:
    raw = Filled(tmp_path, "noise", count=4)
    out = raw.buffers()
    report = Reader(raw.store, raw.catalogue).read(wanted(out))
    assert out == raw.blocks
    assert report.most_host_bytes == 0


def test_a_budget_too_small_to_read_anything_is_refused(filled: Filled) -> None:
    with pytest.raises(BadSetting, match="max_host_bytes"):
        Reader(filled.store, filled.catalogue, max_host_bytes=MIB)


def test_many_deltas_that_store_next_to_nothing_stay_within_the_budget(tmp_path: Path) -> None:
    """Each needs its whole base in memory, however little it stores itself."""
    store = LocalStore(tmp_path)
    store.init()
    base = content(BLOCK_BYTES, "weights", 1)
    changed = []
    for i in range(16):
        one = bytearray(base)
        one[i] ^= 1
        changed.append(bytes(one))
    encoded = [encode(base, hint=Codec.PLANES_BF16)]
    encoded += [encode_delta(one, base, block_id(base), hint=Codec.PLANES_BF16) for one in changed]
    builder = PackBuilder(PackId.new())
    with store.stage(layout.staging(UploadId.new(), "p")) as stage:
        stage.write(PACK_HEADER)
        for one in encoded:
            builder.add(one.encoding)
            for segment in one.segments:
                stage.write(segment)
                stage.write(padding(memoryview(segment).nbytes))
        stage.write(builder.finish())
        store.publish(stage.close(), layout.pack(builder.pack))
    catalogue = MemoryCatalogue()
    catalogue.add_pack(builder.pack, builder.placements)
    out = {block_id(one): bytearray(BLOCK_BYTES) for one in changed}
    report = Reader(store, catalogue, threads=8, max_host_bytes=64 * MIB).read(wanted(out))
    assert list(out.values()) == changed
    assert report.most_host_bytes <= 64 * MIB


def test_a_time_out_bounds_the_whole_read_and_leaves_no_thread(filled: Filled) -> None:
    slow = FaultyStore(filled.store, on_call=lambda index, name: time.sleep(0.2))
    with begun() as threads, pytest.raises(DeadlineExceeded, match="bytes are done"):
        Reader(slow, filled.catalogue, threads=1, learned=Learned()).read(
            wanted(filled.buffers()), timeout_s=0.3
        )
    assert slow.calls.count("read") < len(filled.catalogue.packs), "the others are not begun"
    assert threads
    assert left(threads) == []


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_a_hook_ends_the_read_and_leaves_no_thread(
    filled: Filled, raised: type[BaseException]
) -> None:
    def interrupt(done_bytes: int) -> None:
        raise raised

    with begun() as threads, pytest.raises(raised):
        Reader(filled.store, filled.catalogue).read(wanted(filled.buffers()), interrupt)
    assert threads
    assert left(threads) == []


def test_another_thread_can_cancel_a_read(filled: Filled) -> None:
    cancel = Cancel()
    is_reading, is_cancelled = threading.Event(), threading.Event()

    def hold(index: int, name: str) -> None:
        if name == "read":
            is_reading.set()
            is_cancelled.wait(LIMIT_S)

    def cancel_it() -> None:
        is_reading.wait(LIMIT_S)
        cancel.cancel()
        is_cancelled.set()

    held = FaultyStore(filled.store, on_call=hold)
    other = threading.Thread(target=cancel_it)
    other.start()
    with begun() as threads, pytest.raises(Cancelled):
        Reader(held, filled.catalogue, threads=1).read(wanted(filled.buffers()), cancel=cancel)
    assert threads
    assert left(threads) == []
    other.join()
    with pytest.raises(Cancelled):
        Reader(held, filled.catalogue).read(wanted(filled.buffers()), cancel=cancel)


class OneFailsOneHangs(FaultyStore):
    """Has two replicas: the first that is asked fails when the second is asked, which hangs."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock_asked = threading.Lock()
        self._asked = 0
        self.is_chased = threading.Event()

    def locate(self, path: layout.StorePath, *, timeout_s: float | None = None) -> Location:
        found = super().locate(path, timeout_s=timeout_s)
        replicas = tuple(Replica(f"dn{number}:1", f"dn{number}") for number in range(2))
        spans = (Span(0, found.length, replicas),)
        return Location(found.path, found.length, spans)

    def read(
        self,
        location: Location,
        reads: list[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        with self._lock_asked:
            self._asked += 1
            is_first = self._asked == 1
        assert replica is not None
        assert cancel is not None
        if is_first:
            assert self.is_chased.wait(LIMIT_S)
            raise DataNodeFailed(replica.datanode, "it is gone")
        ended = threading.Event()
        with cancel.ending(ended.set, "hanging"):
            self.is_chased.set()
            ended.wait(LIMIT_S)
        cancel.check("hanging")
        raise AssertionError("nobody ended it")


def test_a_read_that_waits_for_its_second_replica_is_cancelled_too(filled: Filled) -> None:
    block, data = next(iter(filled.blocks.items()))
    store, cancel, learned = OneFailsOneHangs(filled.store), Cancel(), Learned()
    for length in range(10, 30):
        for _ in range(ENOUGH_SAMPLES):
            learned.pace.add(1 << length, 0.001)
    later: list[threading.Timer] = []

    def cancel_soon(event: ReadEvent) -> None:
        if event.kind is ReadEventKind.HEDGED:
            later.append(threading.Timer(0.5, cancel.cancel))
            later[0].start()

    reader = Reader(store, filled.catalogue, learned=learned, on_event=cancel_soon)
    began = time.monotonic()
    with begun() as threads, pytest.raises(Cancelled):
        reader.read([Wanted(block, 0, memoryview(bytearray(len(data))))], cancel=cancel)
    assert 0.4 < time.monotonic() - began < LIMIT_S / 2
    assert threads
    assert left([one for one in threads if one is not later[0]]) == []
    later[0].join()


@contextmanager
def held(learned: Learned) -> Iterator[None]:
    """Other reads have all the places."""
    with ExitStack() as others:
        for _ in range(learned.limit.limit):
            others.enter_context(learned.limit.transfer(1))
        yield


def test_a_read_that_waits_for_others_ends_with_its_time_and_when_it_is_cancelled(
    filled: Filled,
) -> None:
    learned, cancel = Learned(), Cancel()
    reader = Reader(filled.store, filled.catalogue, learned=learned)
    later = threading.Timer(0.2, cancel.cancel)
    later.start()
    began = time.monotonic()
    with held(learned):
        with pytest.raises(DeadlineExceeded):
            reader.read(wanted(filled.buffers()), timeout_s=0.2)
        with pytest.raises(Cancelled):
            reader.read(wanted(filled.buffers()), cancel=cancel)
    assert time.monotonic() - began < REQUEST_S / 2
    later.join()
    out = filled.buffers()
    reader.read(wanted(out))
    assert out == filled.blocks


def test_waiting_for_others_is_no_failure_of_a_replica(filled: Filled) -> None:
    learned, events = Learned(), list[ReadEvent]()
    reader = Reader(
        filled.store, filled.catalogue, learned=learned, timeout_s=1.0, on_event=events.append
    )
    block, data = next(iter(filled.blocks.items()))
    out = bytearray(len(data))
    with ExitStack() as others:
        others.enter_context(held(learned))
        later = threading.Timer(1.5, others.pop_all().close)
        later.start()
    report = reader.read([Wanted(block, 0, memoryview(out))])
    later.join()
    assert out == data
    assert (report.failed_over, report.failed, events) == (0, [], [])


def test_a_read_that_succeeds_leaves_no_thread(filled: Filled) -> None:
    with begun() as threads:
        Reader(filled.store, filled.catalogue).read(wanted(filled.buffers()))
    assert threads
    assert left(threads) == []


def test_locations_are_asked_for_once_and_used_by_later_reads(filled: Filled) -> None:
    counted = FaultyStore(filled.store)
    learned = Learned()
    for _ in range(3):
        Reader(counted, filled.catalogue, learned=learned).read(wanted(filled.buffers()))
    assert counted.calls.count("locate") == len(filled.catalogue.packs)


def test_readers_of_one_store_share_what_they_learned_and_clusters_do_not(tmp_path: Path) -> None:
    class Named(LocalStore):
        def __init__(self, url: str) -> None:
            super().__init__(tmp_path)
            self.url = url

    one, other = learned_of(Named("hdfs://nn:1/a")), learned_of(Named("hdfs://nn:1/b"))
    assert one is learned_of(Named("hdfs://nn:1/a"))
    assert one.estimates is other.estimates
    assert one.locations is not other.locations, "paths are below the store's folder"
    assert one.estimates is not learned_of(Named("hdfs://nn2:1/a")).estimates


def test_locations_are_forgotten_in_time_and_bounded(tmp_path: Path) -> None:
    now = 0.0
    store = LocalStore(tmp_path)
    store.init()
    with store.stage(layout.staging(UploadId.new(), "p")) as stage:
        stage.write(b"x")
        store.publish(stage.close(), layout.YARD)
    locations = Locations(lambda: now)
    assert locations.get(layout.YARD) is None
    found = locations.ask(store, layout.YARD)
    assert locations.get(layout.YARD) is found
    now = LIFE_S + 1
    assert locations.get(layout.YARD) is None

    class Anywhere(LocalStore):
        def locate(self, path: object, *, timeout_s: float | None = None) -> Location:
            return found

    anywhere = Anywhere(tmp_path)
    for i in range(MOST_LOCATIONS + 5):
        locations.ask(anywhere, layout.pack(PackId(f"{i:032x}")))
    assert locations.get(layout.pack(PackId(f"{4:032x}"))) is None
    assert locations.get(layout.pack(PackId(f"{5:032x}"))) is found


class StaleOnce(FaultyStore):
    """Refuses each pack's first location, as a DataNode does when a block token has expired."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._located: dict[str, int] = {}

    def locate(self, path: layout.StorePath, *, timeout_s: float | None = None) -> Location:
        self._located[path.text] = self._located.get(path.text, 0) + 1
        return super().locate(path, timeout_s=timeout_s)

    def read(
        self,
        location: Location,
        reads: list[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        if self._located[location.path.text] < 2:
            raise StaleLocation("the token expired")
        return super().read(location, reads, replica=replica, timeout_s=timeout_s, cancel=cancel)


def test_a_stale_location_is_asked_for_again_and_told(filled: Filled) -> None:
    events: list[ReadEvent] = []
    out = filled.buffers()
    learned = Learned()
    report = Reader(
        StaleOnce(filled.store), filled.catalogue, on_event=events.append, learned=learned
    ).read(wanted(out))
    assert out == filled.blocks
    assert report.located_again >= len(filled.catalogue.packs)
    assert {event.kind for event in events} == {ReadEventKind.LOCATED_AGAIN}
    assert report.failed_over == 0


def test_what_is_not_wanted_stays_untouched(filled: Filled) -> None:
    block, data = next(iter(filled.blocks.items()))
    out = np.full(3 * MIB, 0xAA, np.uint8)
    Reader(filled.store, filled.catalogue).read([Wanted(block, 12345, out.data[MIB : 2 * MIB])])
    assert out[MIB : 2 * MIB].tobytes() == data[12345 : 12345 + MIB]
    assert set(out[:MIB]) | set(out[2 * MIB :]) == {0xAA}


class HangsAtTheSecondLook(StaleOnce):
    """Tells where a pack lies once; whoever asks again waits, as for a NameNode that is silent."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.is_asked, self.is_over = threading.Event(), threading.Event()
        self.asked_within_s: list[float | None] = []

    def locate(self, path: layout.StorePath, *, timeout_s: float | None = None) -> Location:
        found = super().locate(path, timeout_s=timeout_s)
        if self._located[path.text] == 2:
            self.asked_within_s.append(timeout_s)
            self.is_asked.set()
            self.is_over.wait(LIMIT_S)
        return found


@pytest.fixture
def silent(filled: Filled) -> Iterator[HangsAtTheSecondLook]:
    store = HangsAtTheSecondLook(filled.store)
    yield store
    store.is_over.set()


def test_asking_again_where_a_pack_lies_ends_with_the_reads_time(
    filled: Filled, silent: HangsAtTheSecondLook
) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        Reader(silent, filled.catalogue, learned=Learned()).read(
            wanted(filled.buffers()), timeout_s=2.0
        )
    assert time.monotonic() - began < LIMIT_S / 2
    assert silent.asked_within_s
    assert all(one is not None and one <= 2.0 for one in silent.asked_within_s)


def test_asking_again_where_a_pack_lies_ends_when_the_read_is_cancelled(
    filled: Filled, silent: HangsAtTheSecondLook
) -> None:
    cancel = Cancel()
    other = threading.Thread(target=lambda: silent.is_asked.wait(LIMIT_S) and cancel.cancel())
    other.start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        Reader(silent, filled.catalogue, learned=Learned()).read(
            wanted(filled.buffers()), cancel=cancel
        )
    assert time.monotonic() - began < LIMIT_S / 2
    other.join(LIMIT_S)
