"""Telling replicas that are wrong from ones that are away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from weightyard.errors import (
    Cancelled,
    DataNodeFailed,
    FileMissing,
    StaleLocation,
    StoreUnavailable,
    YardError,
)
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.storage.hdfs.diagnosis import Diagnosis
from weightyard.storage.store import Location, Read, Replica, Span, StorePath

LIMIT_S = 60.0
PATH = StorePath("models/team/bert/v1.json")
BEFORE, AFTER = (
    Span(0, 100, (Replica("a:1", "a"), Replica("b:1", "b")), access="token"),
    Span(100, 50, (Replica("b:1", "b"), Replica("c:1", "c")), access="token"),
)
LOCATION = Location(PATH, 150, (BEFORE, AFTER))


class DataNodes(DataNodeReader):
    """All serve but those named."""

    def __init__(self, *failing: str, failure: YardError | None = None) -> None:
        self.asked: list[tuple[str, int]] = []
        self._failing = failing
        self._failure = failure

    def read(self, replica: Replica, span: Span, reads: Sequence[Read], deadline: Deadline) -> None:
        self.asked.append((replica.datanode, reads[0].offset))
        if replica.datanode in self._failing:
            raise self._failure or DataNodeFailed(replica.datanode, "nobody listens")

    def close(self) -> None:
        pass


def found(
    location: Location = LOCATION,
    direct: DataNodeReader | None = None,
    reads: Sequence[tuple[int, int]] = ((10, 20),),
    deadline: Deadline | None = None,
    locate: Callable[[StorePath, Deadline], Location] | None = None,
) -> str | None:
    wanted = [Read(offset, memoryview(bytearray(length))) for offset, length in reads]
    diagnosis = Diagnosis(locate or (lambda path, deadline: location), direct)
    return diagnosis.find_damage(LOCATION, wanted, deadline or Deadline.after(LIMIT_S))


def with_states(*states: str) -> Location:
    known = [replace(one, state=state) for one, state in zip(BEFORE.replicas, states, strict=True)]
    return replace(LOCATION, spans=(replace(BEFORE, replicas=tuple(known)), AFTER))


def test_replicas_that_all_answer_are_told_by_name_with_what_was_wanted_of_them() -> None:
    direct = DataNodes()
    assert found(direct=direct, reads=[(10, 20), (40, 5)]) == (
        f"{PATH}: bytes 10…45: the replicas on a:1, b:1 answer, but none passes HDFS's checksums"
    )
    assert direct.asked == [("a:1", 10), ("b:1", 10)]


def test_every_replica_of_everything_wanted_has_to_answer() -> None:
    both = [(90, 20)]
    direct = DataNodes()
    told = found(direct=direct, reads=both)
    assert told is not None
    assert "bytes 90…110: the replicas on a:1, b:1, c:1 answer" in told
    assert direct.asked == [("a:1", 90), ("b:1", 90), ("b:1", 100), ("c:1", 100)]
    assert found(direct=DataNodes("c:1"), reads=both) is None


@pytest.mark.parametrize("failing", ["a:1", "b:1"])
@pytest.mark.parametrize("failure", [None, StaleLocation("no longer has it")])
def test_where_one_replica_may_be_right_none_is_called_damaged(
    failing: str, failure: YardError | None
) -> None:
    assert found(direct=DataNodes(failing, failure=failure)) is None


def test_what_the_namenode_knows_as_corrupt_is_damaged_whoever_answers() -> None:
    told = found(with_states("corrupt", "corrupt"), DataNodes("a:1", "b:1"))
    assert told == f"{PATH}: bytes 10…30: the replicas on a:1, b:1 are all damaged, as HDFS knows"
    assert found(with_states("corrupt", "corrupt"), None) == told
    assert found(with_states("corrupt", "normal"), DataNodes("b:1")) is None


@pytest.mark.parametrize(
    "location",
    [
        replace(LOCATION, length=100, spans=(BEFORE,)),
        replace(LOCATION, spans=(replace(BEFORE, replicas=()), AFTER)),
        replace(LOCATION, spans=(replace(BEFORE, access=None), AFTER)),
    ],
    ids=["shorter", "on no DataNode", "not to be read directly"],
)
def test_what_direct_reads_cannot_tell_is_left_open(location: Location) -> None:
    assert found(location, DataNodes()) is None


def test_where_no_direct_reads_are_possible_it_is_left_open() -> None:
    assert found(direct=None) is None


@pytest.mark.parametrize("failure", [StoreUnavailable("x"), FileMissing("x")])
def test_where_nobody_says_where_the_file_is_it_is_left_open(failure: YardError) -> None:
    def locate(path: StorePath, deadline: Deadline) -> Location:
        raise failure

    assert found(direct=DataNodes(), locate=locate) is None


def test_who_has_no_time_or_gave_up_is_not_kept() -> None:
    assert found(direct=DataNodes(), deadline=Deadline.after(-1)) is None
    cancel = Cancel()
    cancel.cancel()
    with pytest.raises(Cancelled):
        found(direct=DataNodes(), deadline=Deadline.after(LIMIT_S, cancel))


def test_of_nothing_nothing_is_damaged() -> None:
    assert found(direct=DataNodes(), reads=[(10, 0)]) is None
