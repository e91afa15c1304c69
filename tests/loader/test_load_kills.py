"""A DataNode that ends in the middle of a load, killed or stopped: the tensors come anyway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hdfs_world import straight
from loader_world import BERT, left_threads, noise, same
from waiting import eventually

from weightyard.format.block import MIB
from weightyard.testing.cluster import Daemon, MiniCluster
from weightyard.yard import Yard

pytestmark = pytest.mark.cluster

RACK = "/rack-b"
STATE = {f"layers.{number}": noise(2048, 1024, seed=number) for number in range(16)}


@pytest.fixture(scope="module")
def yard(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Every pack on all three DataNodes; this process reads near the only one of its rack."""
    cluster.datanodes  # noqa: B018  skips where they cannot be killed
    with straight(cluster, tmp_path_factory.mktemp("kills"), location=RACK) as opened:
        opened.push(STATE, BERT, replication=3)
        yield opened


@pytest.fixture
def near(cluster: MiniCluster) -> Daemon:
    racks = [plan.rack for plan in cluster.plan.datanodes]
    return cluster.datanodes[racks.index(RACK)]


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_datanode_that_ends_in_the_middle_of_a_load_costs_no_tensor(
    yard: Yard, cluster: MiniCluster, near: Daemon, end: str
) -> None:
    address = near.plan.address
    # It may have failed before, and is then left alone for up to a minute.
    eventually(lambda: set(yard.load(BERT).report.datanodes) == {address}, within_s=120)
    struck: list[int] = []

    def strike(done_bytes: int) -> None:
        if not struck:
            near.kill() if end == "killed" else near.pause()
        struck.append(done_bytes)

    try:
        weights = yard.load(BERT, progress=strike, timeout=60)
        after = yard.load(BERT, timeout=60)
    finally:
        cluster.bring_back(near)
    assert len(struck) > 1, "it was in the middle"
    assert same(weights, STATE)
    assert same(after, STATE)
    assert address not in after.report.datanodes
    assert sum(after.report.datanodes.values()) == after.report.stored_bytes > 16 * MIB
    ended = weights.report
    assert ended.failed_over + ended.hedged + after.report.failed_over + after.report.hedged >= 1
    assert set(left_threads()) <= {"weightyard-watched"}, "of the store, which is open"
