from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from weightyard.errors import (
    AlreadyThere,
    Cancelled,
    DataNodeFailed,
    DeadlineExceeded,
    StaleLocation,
    StoreUnavailable,
)
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import PackId, UploadId
from weightyard.settings import Settings
from weightyard.storage import deadline, layout, retry
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.limit import AdaptiveLimit, LimitedStore, Rate
from weightyard.storage.local import LocalStore
from weightyard.storage.opening import folder_of, open_store
from weightyard.storage.retry import Retry, RetryingStore
from weightyard.storage.store import Location, Read, Replica, Served, Store, StorePath
from weightyard.testing.faults import Fault, FaultyStore
from weightyard.testing.store_contract import StoreContract, files_of, get, put, stage
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, Writer

LIMIT_S = 60.0
QUICK = Retry(deadline_s=LIMIT_S, first_wait_s=0.001, longest_wait_s=0.002)


class TestRetryingStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with RetryingStore(LocalStore(tmp_path / "yard"), QUICK) as store:
            yield store


class TestLimitedStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with LimitedStore(LocalStore(tmp_path / "yard"), rate=Rate(1e9)) as store:
            yield store


class TestStoreOpenedWithARate(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with open_store(str(tmp_path / "yard"), Settings(max_rate=10**10)) as store:
            yield store


class TestFaultyStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with FaultyStore(LocalStore(tmp_path / "yard")) as store:
            yield store


def _publish_one(store: Store, upload: UploadId, pack: PackId) -> None:
    with store.stage(layout.staging(upload, pack.hex)) as stage_:
        for i in range(3):
            stage_.write(bytes([i]) * 1000)
        store.publish(stage_.close(), layout.pack(pack))


EXPECTED = b"".join(bytes([i]) * 1000 for i in range(3))


@pytest.mark.parametrize("fault", Fault)
def test_publishing_survives_a_failure_at_any_single_call(tmp_path: Path, fault: Fault) -> None:
    clean = FaultyStore(LocalStore(tmp_path / "clean"))
    clean.init()
    _publish_one(RetryingStore(clean, QUICK), UploadId.new(), PackId.new())
    assert len(clean.calls) > 5
    for index in range(1, len(clean.calls) + 1):
        root = tmp_path / f"{fault.value}-{index}"
        store = FaultyStore(LocalStore(root), {index: fault})
        store.init()
        pack = PackId.new()
        _publish_one(RetryingStore(store, QUICK), UploadId.new(), pack)
        assert get(LocalStore(root), layout.pack(pack)) == EXPECTED


@pytest.mark.parametrize("fault", Fault)
def test_what_is_written_again_is_what_was_meant_though_its_memory_was_used_for_more(
    tmp_path: Path, fault: Fault
) -> None:
    for index in range(1, 7):
        root = tmp_path / f"{fault.value}-{index}"
        faulty = FaultyStore(LocalStore(root), {index: fault})
        faulty.init()
        pack, memory = PackId.new(), bytearray(1000)
        store = RetryingStore(faulty, QUICK)
        with store.stage(layout.staging(UploadId.new(), pack.hex)) as stage_:
            for i in range(3):
                memory[:] = bytes([i]) * 1000
                stage_.write(memory, lambda i=i: bytes([i]) * 1000)  # type: ignore[misc]
            store.publish(stage_.close(), layout.pack(pack))
        assert get(LocalStore(root), layout.pack(pack)) == EXPECTED


@pytest.mark.parametrize("fault", Fault)
def test_publishing_survives_failures_at_any_two_calls(tmp_path: Path, fault: Fault) -> None:
    for first, second in itertools.combinations(range(1, 9), 2):
        root = tmp_path / f"{first}-{second}"
        store = FaultyStore(LocalStore(root), {first: fault, second: Fault.AFTER})
        store.init()
        pack = PackId.new()
        _publish_one(RetryingStore(store, QUICK), UploadId.new(), pack)
        assert get(LocalStore(root), layout.pack(pack)) == EXPECTED


def test_a_lost_publish_answer_is_not_mistaken_for_someone_elses_file(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    path = put(inner, b"theirs")
    ours = stage(inner, b"ours, of another length")
    store = RetryingStore(FaultyStore(inner, {0: Fault.BEFORE}), QUICK)
    with pytest.raises(AlreadyThere):
        store.publish(ours, path)
    assert get(inner, path) == b"theirs"


def test_a_delete_whose_answer_was_lost_counts_as_done(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    path = put(inner, b"x")
    assert RetryingStore(FaultyStore(inner, {0: Fault.AFTER}), QUICK).delete(path) is True


def test_a_staging_name_is_never_used_again_after_a_failure(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    upload = UploadId.new()
    store = RetryingStore(FaultyStore(inner, {0: Fault.AFTER, 2: Fault.AFTER}), QUICK)
    with store.stage(layout.staging(upload, "p")) as stage_:
        stage_.write(b"abc")
        staged = stage_.close()
    assert staged.path == layout.staging(upload, "p", 2)
    assert get(inner, staged.path) == b"abc"


def test_retrying_ends_at_the_deadline_with_the_stores_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    failing = FaultyStore(LocalStore(tmp_path), dict.fromkeys(range(10_000), Fault.BEFORE))
    with pytest.raises(StoreUnavailable, match="injected"):
        RetryingStore(failing, Retry(0.3, 0.01, 0.05)).stat(layout.YARD)
    assert 1 < len(failing.calls) < 10_000
    assert 0.2 < now < 0.3


class _OneAnswer(FaultyStore):
    """Raises what it is given on reads, then serves."""

    def __init__(self, store: Store, *errors: Exception) -> None:
        super().__init__(store)
        self._errors = list(errors)

    def before_read(self, *_: object) -> None:
        if self._errors:
            raise self._errors.pop(0)


def test_a_stale_location_is_looked_up_once_more(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    path = put(inner, b"abc")
    location = inner.locate(path)
    flaky = _OneAnswer(inner, StaleLocation("token expired"), DataNodeFailed("dn1:1", "gone"))
    out = bytearray(3)
    RetryingStore(flaky, QUICK).read(location, [Read(0, memoryview(out))])
    assert out == b"abc"
    assert flaky.calls == ["locate", "locate", "read"]


def test_a_failure_that_used_up_the_time_is_told_and_not_that_there_is_none_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(deadline, "time", clock)
    monkeypatch.setattr(retry, "time", clock)

    class Silent(FaultyStore):
        def before_read(self, *_: object) -> None:
            nonlocal now
            now += 2 * 30.0
            raise DataNodeFailed("dn1:1", "sent nothing")

    store = RetryingStore(Silent(inner), Retry(30.0))
    with pytest.raises(DataNodeFailed, match="sent nothing"):
        store.read(location, [Read(0, memoryview(bytearray(3)))])


class _Slow(_OneAnswer):
    """Takes as long as it may, and fails then."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.given_s: list[float] = []

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        assert timeout_s is not None
        self.given_s.append(timeout_s)
        time.sleep(min(0.5, timeout_s / 2))
        raise DeadlineExceeded("no time left")


def test_all_tries_of_a_read_share_the_time_the_caller_gave(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    slow = _Slow(inner)
    with pytest.raises(DeadlineExceeded):
        RetryingStore(slow, QUICK).read(location, [Read(0, memoryview(bytearray(3)))], timeout_s=1)
    assert slow.given_s[0] <= 1
    assert all(later < sooner for sooner, later in itertools.pairwise(slow.given_s))


def test_a_read_that_looks_its_file_up_again_does_so_in_the_time_the_caller_gave(
    tmp_path: Path,
) -> None:
    class Located(_OneAnswer):
        given_s: float | None = None

        def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
            self.given_s = timeout_s
            return super().locate(path)

    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    moved = Located(inner, StaleLocation("token expired"))
    RetryingStore(moved, QUICK).read(location, [Read(0, memoryview(bytearray(3)))], timeout_s=2)
    assert moved.given_s is not None
    assert 0 < moved.given_s <= 2


def test_the_failure_of_a_replica_the_caller_named_is_the_callers(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    store = RetryingStore(_OneAnswer(inner, DataNodeFailed("dn1:1", "gone")), QUICK)
    with pytest.raises(DataNodeFailed, match="dn1:1"):
        store.read(
            location, [Read(0, memoryview(bytearray(3)))], replica=location.spans[0].replicas[0]
        )


def test_a_rate_is_held_over_a_longer_while() -> None:
    now = 0.0

    def sleep(seconds: float, cancel: Cancel | None, doing: str) -> None:
        nonlocal now
        now += seconds

    rate = Rate(1000.0, clock=lambda: now, sleep=sleep)
    for _ in range(50):
        rate.spend(100)
    assert now == pytest.approx(4.9)


def test_who_cannot_have_a_share_of_the_rate_in_time_is_told_at_once_and_spends_nothing() -> None:
    slept_s: list[float] = []
    rate = Rate(1.0, clock=lambda: 0.0, sleep=lambda seconds, *_: slept_s.append(seconds))
    rate.spend(1000)
    with pytest.raises(DeadlineExceeded, match=r"1000\.0 s"):
        rate.spend(50, Deadline.after(LIMIT_S))
    rate.spend(1, Deadline.after(2000))
    assert slept_s == [1000.0]


def test_a_read_that_waits_for_its_share_of_the_rate_can_be_cancelled(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    rate, cancel = Rate(1.0), Cancel()
    rate.spend(10**6)
    free_at = rate._free_at
    later = threading.Timer(0.1, cancel.cancel)
    later.start()
    began = time.monotonic()
    with LimitedStore(inner, rate=rate) as store, pytest.raises(Cancelled):
        store.read(location, [Read(0, memoryview(bytearray(3)))], cancel=cancel)
    assert time.monotonic() - began < LIMIT_S / 2
    assert rate._free_at == pytest.approx(free_at), "what was not read is not owed"
    later.join()


def test_waiting_for_a_share_of_the_rate_is_not_a_stores_slowness(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    slept_s: list[float] = []
    rate = Rate(1.0, clock=lambda: 0.0, sleep=lambda seconds, *_: slept_s.append(seconds))
    rate.spend(1000)
    out = bytearray(3)
    with LimitedStore(inner, rate=rate) as store:
        store.read(location, [Read(0, memoryview(out))], timeout_s=LIMIT_S)
    assert (out, slept_s) == (b"abc", [1000.0])


def test_waiting_for_a_place_and_reading_share_the_time_the_caller_gave(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    slow, limit = _Slow(inner), AdaptiveLimit(first=1, lowest=1, highest=1)
    is_held = threading.Event()

    def hold() -> None:
        with limit.transfer(1):
            is_held.set()
            time.sleep(0.5)

    other = threading.Thread(target=hold)
    other.start()
    assert is_held.wait(LIMIT_S)
    with LimitedStore(slow, reads=limit) as store, pytest.raises(DeadlineExceeded):
        store.read(location, [Read(0, memoryview(bytearray(3)))], timeout_s=LIMIT_S)
    other.join()
    (given_s,) = slow.given_s
    assert given_s < LIMIT_S - 0.3


def test_who_waits_for_the_rate_takes_no_place_from_others(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    limit = AdaptiveLimit(first=2, lowest=2, highest=2)

    def sleep(seconds: float, cancel: Cancel | None, doing: str) -> None:
        with limit.transfer(1, timeout_s=0.01), limit.transfer(1, timeout_s=0.01):
            pass

    rate = Rate(1.0, clock=lambda: 0.0, sleep=sleep)
    rate.spend(1000)
    with LimitedStore(inner, reads=limit, rate=rate) as store:
        store.read(location, [Read(0, memoryview(bytearray(3)))])


def test_writes_and_what_a_reader_reads_are_held_to_the_rate_that_was_set(tmp_path: Path) -> None:
    """Once nothing is owed, each call waits for what those before it moved."""
    rate, size = 8 << 20, 1 << 20
    with open_store(str(tmp_path), Settings(max_rate=rate)) as store:
        store.init()
        catalogue = MemoryCatalogue()
        content = [random.Random(seed).randbytes(size) for seed in range(4)]
        tensors = [StateTensor(f"t{seed}", DType.U8, (size,)) for seed in range(4)]
        began = time.monotonic()
        (ids,) = Writer(store, catalogue.upload()).write(
            [Content(split_state(tensors, size), [MemorySource(data) for data in content])]
        )
        written_s = time.monotonic() - began
        for _ in range(2):
            out = [bytearray(size) for _ in ids]
            wanted = [Wanted(id_, 0, memoryview(into)) for id_, into in zip(ids, out, strict=True)]
            Reader(store, catalogue).read(wanted)
            assert out == content
        read_s = time.monotonic() - began
    assert written_s > 3 * size / rate
    assert read_s > (4 + 4) * size / rate, "the last read may be owed"


def test_all_stores_of_a_process_share_the_rate(tmp_path: Path) -> None:
    settings = Settings(max_rate=12_345)
    opened = [open_store(str(tmp_path / name), settings) for name in "ab"]
    assert all(isinstance(store, LimitedStore) for store in opened)
    assert len({id(store._rate) for store in opened if isinstance(store, LimitedStore)}) == 1
    assert not isinstance(open_store(str(tmp_path)), LimitedStore)


def test_a_folder_with_a_rate_is_still_a_folder_of_this_machine(tmp_path: Path) -> None:
    assert folder_of(open_store(str(tmp_path), Settings(max_rate=1))) == tmp_path
    assert folder_of(FaultyStore(LocalStore(tmp_path))) is None


def test_no_more_transfers_run_at_once_than_the_limit(tmp_path: Path) -> None:
    limit = AdaptiveLimit(first=2, lowest=2, highest=2)
    running = 0
    most = 0
    lock = threading.Lock()
    have_met = threading.Event()

    def work() -> None:
        nonlocal running, most
        with limit.transfer(1):
            with lock:
                running += 1
                most = max(most, running)
                if running == 2:
                    have_met.set()
            have_met.wait(LIMIT_S)
            time.sleep(0.002)  # so that one too many would be seen
            with lock:
                running -= 1

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert most == 2
    with limit.transfer(1), limit.transfer(1), pytest.raises(DeadlineExceeded):
        limit.transfer(1, timeout_s=0.01).__enter__()


def test_a_read_that_waits_for_its_turn_can_be_cancelled(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    location = inner.locate(put(inner, b"abc"))
    limit, cancel = AdaptiveLimit(first=2, lowest=2, highest=2), Cancel()
    store, wanted = LimitedStore(inner, reads=limit), [Read(0, memoryview(bytearray(3)))]
    later = threading.Timer(0.1, cancel.cancel)
    later.start()
    began = time.monotonic()
    with limit.transfer(1), limit.transfer(1), pytest.raises(Cancelled):
        store.read(location, wanted, timeout_s=LIMIT_S, cancel=cancel)
    assert time.monotonic() - began < LIMIT_S / 2
    later.join()


def test_an_aborted_stage_leaves_nothing_through_all_wrappers(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    store = LimitedStore(RetryingStore(inner, QUICK))
    upload = UploadId.new()
    with store.stage(layout.staging(upload, "p")) as stage_:
        stage_.write(b"abc")
    assert files_of(inner, upload) == []
