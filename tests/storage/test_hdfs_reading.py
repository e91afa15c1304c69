"""Reading by whichever way works: nothing kept of those that do not has a caller's memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import pytest
from waiting import eventually

from weightyard.errors import DataNodeFailed, StoreUnavailable, Unsupported, YardError
from weightyard.settings import Settings
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.storage.hdfs.fallbacks import Fallback, LibhdfsReads
from weightyard.storage.hdfs.reading import Reading
from weightyard.storage.store import Location, Read, ReadPath, Replica, Span, StorePath

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
