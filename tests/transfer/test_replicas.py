"""Choosing replicas and judging DataNodes: tables, no I/O."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import SOON_S

from weightyard.storage.store import Replica
from weightyard.transfer.estimates import FIRST_PENALTY_S, LONGEST_PENALTY_S, Begun, Estimates
from weightyard.transfer.replicas import Distance, Outlook, Place, rank
from weightyard.transfer.whereabouts import Whereabouts

MIB = 1 << 20


def replica(host: str, rack: str = "/rack-a", state: str = "normal") -> Replica:
    return Replica(f"{host}:9866", host, rack, state)


@pytest.mark.parametrize(
    ("place", "there", "hops", "distance"),
    [
        (Place("/rack-a", "a1"), replica("a1"), 0, Distance.SAME_HOST),
        (Place("/rack-a", "a1"), replica("a2"), 2, Distance.SAME_RACK),
        (Place("/rack-b", "b1"), replica("a1"), 4, Distance.OTHER_RACK),
        (Place("/hall-1/rack-a"), replica("x", "/hall-1/rack-a"), 2, Distance.SAME_RACK),
        (Place("/hall-1/rack-a"), replica("x", "/hall-1/rack-b"), 4, Distance.OTHER_RACK),
        (Place("/hall-1/rack-a"), replica("x", "/hall-2/rack-a"), 6, Distance.OTHER_RACK),
        (Place("/rack-a"), replica("x", "/hall-2/rack-a"), 5, Distance.OTHER_RACK),
        (Place(), replica("a1"), None, Distance.UNKNOWN),
        (Place(None, "a1"), replica("a1"), 0, Distance.SAME_HOST),
    ],
)
def test_distance_is_hadoops_count_of_steps(
    place: Place, there: Replica, hops: int | None, distance: Distance
) -> None:
    assert hops is None or place.hops(there) == hops
    assert place.distance(there) is distance


A1, A2, B1 = replica("a1"), replica("a2"), replica("b1", "/rack-b")
HERE = Place("/rack-b")


@pytest.mark.parametrize(
    ("replicas", "place", "outlooks", "expected"),
    [
        pytest.param([A1, A2, B1], HERE, {}, [B1, A1, A2], id="nearest first"),
        pytest.param([A1, A2, B1], Place("/rack-a", "a2"), {}, [A2, A1, B1], id="own host first"),
        pytest.param(
            [A1, A2],
            HERE,
            {"a1:9866": Outlook(3.0), "a2:9866": Outlook(1.0)},
            [A2, A1],
            id="of equally near ones the one that is quicker by now",
        ),
        pytest.param(
            [A1, B1],
            HERE,
            {"a1:9866": Outlook(0.01), "b1:9866": Outlook(5.0)},
            [B1, A1],
            id="speed does not outweigh distance",
        ),
        pytest.param(
            [A1, A2],
            HERE,
            {"a1:9866": Outlook(1.0, last_used=7), "a2:9866": Outlook(1.04, last_used=3)},
            [A2, A1],
            id="about equal ones take turns",
        ),
        pytest.param(
            [B1, A1],
            HERE,
            {"b1:9866": Outlook(is_left_alone=True)},
            [A1, B1],
            id="one that failed just now is the last hope",
        ),
        pytest.param(
            [replica("b1", "/rack-b", "decommissioning"), replica("b2", "/rack-b", "stale"), A1],
            HERE,
            {},
            [A1, replica("b1", "/rack-b", "decommissioning"), replica("b2", "/rack-b", "stale")],
            id="those on their way out come last",
        ),
        pytest.param(
            [replica("b1", "/rack-b", "corrupt"), replica("a1", state="stale")],
            HERE,
            {"a1:9866": Outlook(is_left_alone=True)},
            [replica("a1", state="stale"), replica("b1", "/rack-b", "corrupt")],
            id="wrong bytes are worse than slow ones",
        ),
    ],
)
def test_replicas_are_asked_in_this_order(
    replicas: list[Replica], place: Place, outlooks: dict[str, Outlook], expected: list[Replica]
) -> None:
    assert rank(replicas, place, outlooks) == expected


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Cluster:
    """Estimates of DataNodes whose time is told by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.estimates = Estimates(self.clock)

    def begin(self, *replicas: Replica) -> Begun:
        return self.estimates.begin_first(
            replicas, lambda outlooks: rank(replicas, HERE, outlooks)
        )[1]

    def read(self, where: Replica, took_s: float, length: int = 16 * MIB) -> bool:
        begun = self.begin(where)
        self.clock.now += took_s
        return self.estimates.served(begun, length)

    def fail(self, where: Replica) -> None:
        self.estimates.failed(self.begin(where))

    def is_left_alone(self, where: Replica) -> bool:
        return self.estimates.outlooks([where.datanode])[where.datanode].is_left_alone


def test_many_readers_at_once_spread_over_equal_replicas() -> None:
    cluster = Cluster()
    begun = [cluster.begin(A1, A2) for _ in range(10)]
    assert sorted(one.datanode for one in begun) == ["a1:9866"] * 5 + ["a2:9866"] * 5


def test_a_faster_datanode_gets_more_of_the_reads_and_the_other_one_some() -> None:
    cluster = Cluster()
    for _ in range(10):
        cluster.read(A1, 0.1)
        cluster.read(A2, 0.4)
    names = [cluster.begin(A1, A2).datanode for _ in range(10)]
    assert 2 * names.count("a2:9866") < names.count("a1:9866") < 10


def test_an_untried_datanode_is_tried() -> None:
    cluster = Cluster()
    cluster.read(A1, 0.001)
    assert cluster.begin(A1, A2).datanode == "a2:9866"


def test_an_old_slowness_is_forgotten() -> None:
    cluster = Cluster()
    cluster.read(A1, 10.0)
    for _ in range(30):
        cluster.read(A1, 0.01)
    speed = 1e6 / cluster.estimates.outlooks(["a1:9866"])["a1:9866"].expected_s
    assert speed == pytest.approx(16 * MIB / 0.01, rel=0.05)


def test_a_datanode_that_failed_is_left_alone_and_then_tried_by_one_read() -> None:
    cluster = Cluster()
    cluster.fail(B1)
    assert cluster.is_left_alone(B1)
    assert cluster.begin(A1, B1).datanode == "a1:9866"
    cluster.clock.now += FIRST_PENALTY_S + 0.01
    trial = cluster.begin(A1, B1)
    assert trial.datanode == "b1:9866", "its time is over"
    assert [cluster.begin(A1, B1).datanode for _ in range(3)] == ["a1:9866"] * 3
    cluster.clock.now += 0.1
    assert cluster.estimates.served(trial, MIB) is True
    assert cluster.begin(A1, B1).datanode == "b1:9866"


def test_each_failure_doubles_the_time_it_is_left_alone_up_to_a_bound() -> None:
    cluster = Cluster()
    times = []
    for _ in range(9):
        cluster.fail(B1)
        began = cluster.clock.now
        while cluster.is_left_alone(B1):
            cluster.clock.now += 0.25
        times.append(cluster.clock.now - began)
    assert times[:5] == pytest.approx([1, 2, 4, 8, 16])
    assert max(times) == times[-1] == pytest.approx(LONGEST_PENALTY_S)


def test_reads_that_were_in_flight_together_fail_as_one() -> None:
    cluster = Cluster()
    together = [cluster.begin(B1) for _ in range(8)]
    cluster.clock.now += 1.5
    for begun in together:
        cluster.estimates.failed(begun)
    cluster.clock.now += FIRST_PENALTY_S + 0.01
    assert not cluster.is_left_alone(B1)


def test_a_success_begun_before_the_failure_pardons_nothing() -> None:
    cluster = Cluster()
    early, late = cluster.begin(B1), cluster.begin(B1)
    cluster.clock.now += 0.1
    cluster.estimates.failed(late)
    assert cluster.estimates.served(early, MIB) is False
    assert cluster.is_left_alone(B1)


def test_the_readers_place_is_found_by_a_datanode_on_its_host() -> None:
    own = Replica("127.0.0.1:9866", "node7", "/rack-c")
    whereabouts = Whereabouts()
    assert whereabouts.place([A1]) == Place()
    assert whereabouts.place([A1, own]) == Place("/rack-c", "node7")
    assert whereabouts.place([A1]) == Place("/rack-c", "node7"), "it does not move"
    assert whereabouts.place([A1], "/rack-b") == Place("/rack-b", "node7"), "told is told"


@pytest.mark.parametrize(
    ("own", "told", "is_here"),
    [
        ("node7", "node7", True),
        ("node7.example.org", "node7", True),
        ("node7", "node7.example.org", True),
        ("Node7", "NODE7.example.org", True),
        ("node7.example.org", "node7.example.org", True),
        ("node7.example.org", "node7.example.com", False),
        ("node7", "node70", False),
        ("node7", "node7-b.example.org", False),
        ("203", "203.0.113.7", False),
    ],
)
def test_the_readers_place_is_found_by_its_name_with_a_domain_or_without(
    monkeypatch: pytest.MonkeyPatch, own: str, told: str, is_here: bool
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: own)
    replica = Replica("203.0.113.7:9866", told, "/rack-c")
    assert Whereabouts().place([replica]) == (Place("/rack-c", told) if is_here else Place())


READS_FROM = """
import sys
from dataclasses import replace
from pathlib import Path
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Replica
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, Writer

class ThreeRacks(LocalStore):
    def locate(self, path, **how):
        found = super().locate(path, **how)
        there = tuple(Replica(f"203.0.113.{i}:9866", f"n{i}", f"/rack-{i}") for i in (1, 2, 3))
        return replace(found, spans=tuple(replace(s, replicas=there) for s in found.spans))

    def read(self, location, reads, *, replica=None, **how):
        return replace(super().read(location, reads, **how), replica=replica)

store = ThreeRacks(Path(sys.argv[1]))
store.init()
catalogue = MemoryCatalogue()
split = split_state([StateTensor("t", DType.U8, (MIB,))], MIB)
content = Content(split, [MemorySource(bytes(MIB))])
((block,),) = Writer(store, catalogue.upload()).write([content])
report = Reader(store, catalogue).read([Wanted(block, 0, memoryview(bytearray(MIB)))])
print(*report.by_datanode, *report.by_distance)
"""


def test_the_readers_place_is_what_the_environment_says(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", READS_FROM, tmp_path],
        env=os.environ | {"WEIGHTYARD_LOCATION": "/rack-3"},
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=True,
    ).stdout
    assert said.split() == ["203.0.113.3:9866", "same-rack"]
