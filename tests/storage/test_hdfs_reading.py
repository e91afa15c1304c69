"""Reading by whichever way works: which one it is, and that those that do not keep no memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
from waiting import eventually

from weightyard.errors import (
    Cancelled,
    DataNodeFailed,
    DeadlineExceeded,
    NotAllowed,
    ReplicasDamaged,
    StaleLocation,
    StoreUnavailable,
    Unsupported,
    YardError,
)
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.datanode import DataNodeReader, HungUp
from weightyard.storage.hdfs.fallbacks import Fallback, LibhdfsReads, NoneServed
from weightyard.storage.hdfs.reading import Directness, Reading
from weightyard.storage.store import Location, Read, ReadPath, Replica, Served, Span, StorePath

LENGTH = 1 << 20
LIMIT_S = 60.0
REPLICAS = (Replica("dn0:1", "dn0"), Replica("dn1:1", "dn1"))
LOCATION = Location(StorePath("packs/a"), LENGTH, (Span(0, LENGTH, REPLICAS, access="token"),))


class Way:
    """Fills nothing, or fails, with the buffers at hand as whoever reads has them."""

    path = ReadPath.NATIVE

    def __init__(self, failure: YardError | None = None) -> None:
        self._failure = failure

    def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
        if self._failure is not None:
            rest = reads[0].into[1:]
            raise type(self._failure)(f"{self._failure}, {len(rest)} bytes are left")

    def close(self) -> None:
        pass


class Deaf(DataNodeReader):
    """Reaches none of the DataNodes but those named."""

    def __init__(self, *well: str) -> None:
        self._well = well

    def read(self, replica: Replica, span: Span, reads: Sequence[Read], deadline: Deadline) -> None:
        rest = reads[0].into[1:]
        if replica.datanode not in self._well and len(rest) >= 0:
            raise DataNodeFailed(replica.datanode, "nobody listens")

    def close(self) -> None:
        pass


@pytest.fixture
def libhdfs() -> Iterator[LibhdfsReads]:
    """Where there is none."""
    settings = Settings(hadoop_conf_dir=None, hadoop_home=None, libhdfs_dir=None)
    one = LibhdfsReads(Cluster.of("hdfs://nn:8020/yard", settings), settings)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    """Memory is counted in buffers, and the collector counts objects: it comes late."""
    gc.disable()
    yield
    gc.enable()


def read(reading: Reading) -> tuple[bytearray, type[YardError] | None]:
    """The memory of a read that is over, and how it failed."""
    buffer = bytearray(LENGTH)
    failed = None
    try:
        reading.read(LOCATION, [Read(0, memoryview(buffer))], None, Deadline.after(LIMIT_S))
    except YardError as why:
        failed = type(why)
    return buffer, failed


def is_free(buffer: bytearray) -> bool:
    with suppress(BufferError):
        buffer.clear()
    return not buffer


def all_free(buffers: list[bytearray]) -> bool:
    return all(is_free(one) for one in buffers)


def test_a_way_that_is_not_there_keeps_no_memory_of_those_who_tried_it(
    libhdfs: LibhdfsReads,
) -> None:
    for ways in ([libhdfs, Way()], [libhdfs]):
        reading = Reading(None, ways)
        buffers = [read(reading)[0] for _ in range(3)]
        eventually(partial(all_free, buffers))


@pytest.mark.parametrize("failure", [StoreUnavailable("x"), Unsupported("x")])
@pytest.mark.parametrize("works", [True, False])
def test_no_way_that_failed_keeps_the_memory_of_a_read(failure: YardError, works: bool) -> None:
    ways: list[Fallback] = [Way(failure)] + [Way()] * works
    for reading in (Reading(None, ways), Reading(Deaf(), ways)):
        for _ in range(3):
            buffer, failed = read(reading)
            assert failed is (None if works else type(failure))
            assert is_free(buffer)


def test_why_there_are_no_direct_reads_is_told_each_time_and_keeps_no_memory() -> None:
    for reading in (Reading(Deaf(), ()), Reading(None, (), DataNodeFailed("dn0:1", "no"))):
        for _ in range(3):
            buffer, failed = read(reading)
            assert failed is DataNodeFailed
            assert is_free(buffer)


def test_a_replica_that_failed_keeps_no_memory_of_a_read_that_the_next_one_served() -> None:
    reading = Reading(Deaf("dn1:1"), ())
    for _ in range(3):
        buffer, failed = read(reading)
        assert failed is None
        assert is_free(buffer)


class Asked(DataNodeReader):
    """Notes which DataNodes were asked. All answer but those named."""

    def __init__(self, *failing: str, failure: type[DataNodeFailed] = DataNodeFailed) -> None:
        self.asked: list[str] = []
        self.failing = failing
        self._failure = failure

    def read(self, replica: Replica, span: Span, reads: Sequence[Read], deadline: Deadline) -> None:
        self.asked.append(replica.datanode)
        if replica.datanode in self.failing:
            raise self._failure(replica.datanode, "does not serve")

    def close(self) -> None:
        pass


FIRST, SECOND = REPLICAS


def read_from(reading: Reading, replica: Replica | None) -> Served:
    wanted = [Read(0, memoryview(bytearray(LENGTH)))]
    return reading.read(LOCATION, wanted, replica, Deadline.after(LIMIT_S))


def test_that_a_named_replica_fails_is_told_at_once_at_the_first_read_too() -> None:
    direct = Asked(FIRST.datanode)
    reading = Reading(direct, [Way()])
    with pytest.raises(DataNodeFailed, match=FIRST.datanode):
        read_from(reading, FIRST)
    assert direct.asked == [FIRST.datanode]
    assert read_from(reading, SECOND) == Served(ReadPath.DIRECT, SECOND)


def test_first_reads_do_not_wait_for_each_other() -> None:
    is_asked, is_over = threading.Event(), threading.Event()

    class Slow(Asked):
        def read(
            self, replica: Replica, span: Span, reads: Sequence[Read], deadline: Deadline
        ) -> None:
            if replica == FIRST:
                is_asked.set()
                is_over.wait(LIMIT_S)

    reading = Reading(Slow(), ())
    with ThreadPoolExecutor(2) as threads:
        try:
            slow = threads.submit(read_from, reading, FIRST)
            assert is_asked.wait(LIMIT_S)
            quick = threads.submit(read_from, reading, SECOND)
            assert quick.result(LIMIT_S / 2).replica == SECOND
        finally:
            is_over.set()
        assert slow.result(LIMIT_S).replica == FIRST


def test_when_all_replicas_failed_that_could_be_named_another_way_serves() -> None:
    direct = Asked(FIRST.datanode, SECOND.datanode)
    reading = Reading(direct, [Way()])
    with pytest.raises(DataNodeFailed, match=FIRST.datanode):
        read_from(reading, FIRST)
    for replica in (SECOND, FIRST, None):
        assert read_from(reading, replica) == Served(ReadPath.NATIVE)
    assert direct.asked == [FIRST.datanode, SECOND.datanode]


def test_where_every_datanode_hangs_up_another_way_serves_the_first_read() -> None:
    direct = Asked(FIRST.datanode, SECOND.datanode, failure=HungUp)
    assert read_from(Reading(direct, [Way()]), FIRST) == Served(ReadPath.NATIVE)
    assert direct.asked == [FIRST.datanode, SECOND.datanode]


def test_one_datanode_that_hangs_up_does_not_end_direct_reads() -> None:
    reading = Reading(Asked(FIRST.datanode, failure=HungUp), [Way()])
    with pytest.raises(DataNodeFailed, match=FIRST.datanode):
        read_from(reading, FIRST)
    assert read_from(reading, SECOND).path == ReadPath.DIRECT


def test_once_direct_reads_have_worked_nobody_else_is_asked_when_one_hangs_up() -> None:
    direct = Asked(FIRST.datanode, failure=HungUp)
    reading = Reading(direct, [Way()])
    read_from(reading, SECOND)
    with pytest.raises(DataNodeFailed, match=FIRST.datanode):
        read_from(reading, FIRST)
    assert direct.asked == [SECOND.datanode, FIRST.datanode]


def test_a_way_that_says_a_file_is_shorter_does_not_end_the_search() -> None:
    reading = Reading(None, [Way(StaleLocation("ends early")), Way()])
    assert read_from(reading, None) == Served(ReadPath.NATIVE)


@pytest.mark.parametrize("other", [StoreUnavailable("x"), NotAllowed("x"), Unsupported("x")])
def test_a_file_that_is_shorter_is_located_again_whatever_another_way_says_of_it(
    other: YardError,
) -> None:
    stale = StaleLocation("ends early")
    for ways in ([Way(stale), Way(other)], [Way(other), Way(stale)]):
        with pytest.raises(StaleLocation):
            read_from(Reading(None, ways), None)


def test_what_a_way_said_that_works_here_goes_before_that_another_does_not() -> None:
    for ways in (
        [Way(StoreUnavailable("x")), Way(Unsupported("y"))],
        [Way(Unsupported("y")), Way(StoreUnavailable("x"))],
    ):
        with pytest.raises(StoreUnavailable, match="x"):
            read_from(Reading(None, ways), None)


def test_when_time_is_up_it_is_told_which_way_took_it() -> None:
    hanging = Way(StoreUnavailable("no answer from dn7 for 10 s"))
    ways = [hanging, Way(DeadlineExceeded("no time left"))]
    with pytest.raises(DeadlineExceeded, match=r"no time left.*no answer from dn7 for 10 s"):
        read_from(Reading(None, ways), None)


class Passing(Way):
    """Fails so often, then serves."""

    def __init__(self, failure: YardError, times: int) -> None:
        super().__init__(failure)
        self._left = times

    def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
        self._left -= 1
        if self._left >= 0:
            super().read(location, reads, deadline)


def damaged(*_: object) -> str:
    return "all of them answer"


AT_REPLICAS = [NoneServed("x"), StaleLocation("x")]


@pytest.mark.parametrize("failure", AT_REPLICAS)
def test_replicas_that_answer_and_still_do_not_serve_are_damaged(failure: YardError) -> None:
    ways = [Way(Unsupported("no libhdfs")), Way(failure)]
    with pytest.raises(ReplicasDamaged, match=r"all of them answer \(x, .* are left\)"):
        read_from(Reading(None, ways, find_damage=damaged), None)
    with pytest.raises(type(failure)):
        read_from(Reading(None, ways), None)


@pytest.mark.parametrize("failure", AT_REPLICAS)
def test_replicas_that_serve_once_they_all_answer_are_not_damaged(failure: YardError) -> None:
    reading = Reading(None, [Passing(failure, 1)], find_damage=damaged)
    assert read_from(reading, None) == Served(ReadPath.NATIVE)


@pytest.mark.parametrize("last", [DeadlineExceeded("no time left"), NoneServed("no answer")])
def test_replicas_are_not_damaged_where_time_was_up_before_they_had_another_chance(
    last: YardError,
) -> None:
    class Hanging(Way):
        """Fails; asked again it does not answer while there is time."""

        def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
            if self._failure is not last:
                self._failure, now = last, self._failure
                raise now or last
            time.sleep(max(0.0, deadline.at - time.monotonic()))
            raise last

    reading = Reading(None, [Hanging(NoneServed("x"))], find_damage=damaged)
    wanted = [Read(0, memoryview(bytearray(LENGTH)))]
    with pytest.raises(StoreUnavailable):
        reading.read(LOCATION, wanted, None, Deadline.after(0.2))


@pytest.mark.parametrize("other", [StoreUnavailable("x"), NotAllowed("x")])
def test_where_a_way_failed_before_it_came_to_the_replicas_they_are_not_blamed(
    other: YardError,
) -> None:
    for ways in ([Way(NoneServed("y")), Way(other)], [Way(other), Way(NoneServed("y"))]):
        with pytest.raises((StoreUnavailable, NotAllowed)):
            read_from(Reading(None, ways, find_damage=damaged), None)


def test_a_replica_that_lost_a_block_is_not_taken_for_a_damaged_one() -> None:
    class Gone(Asked):
        def read(
            self, replica: Replica, span: Span, reads: Sequence[Read], deadline: Deadline
        ) -> None:
            raise StaleLocation("no longer has it")

    with pytest.raises(StaleLocation, match="no longer"):
        read_from(Reading(Gone(), [Way()], find_damage=damaged), FIRST)


def test_a_read_that_is_given_up_while_another_way_is_tried_is_cancelled() -> None:
    cancel = Cancel()

    class GivenUp(Way):
        def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
            cancel.cancel()
            deadline.left("reading by another way")

    direct = Asked()
    reading = Reading(direct, [GivenUp()])
    read_from(reading, FIRST)
    direct.failing = (FIRST.datanode, SECOND.datanode)
    wanted = [Read(0, memoryview(bytearray(LENGTH)))]
    with pytest.raises(Cancelled):
        reading.read(LOCATION, wanted, None, Deadline.after(LIMIT_S, cancel))


def test_direct_reads_that_worked_meanwhile_are_not_given_up_for_one_that_failed() -> None:
    known = Directness()
    known.failed(FIRST.datanode)
    known.answered()  # in another thread
    known.refuted()
    assert known.is_proven
    assert known.may_be_tried()
