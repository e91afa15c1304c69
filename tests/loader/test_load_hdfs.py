"""Loading from a real HDFS: straight, and by a yard whose registry is behind a service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hdfs_world import by_service, straight
from loader_world import BERT, noise, our_threads, same
from torch import nn

from weightyard.errors import DeadlineExceeded
from weightyard.format.block import MIB
from weightyard.testing.cluster import MiniCluster, configuration
from weightyard.yard import Yard

pytestmark = pytest.mark.cluster

STATE = {
    **{f"layers.{number}.weight": noise(1024, 1024, seed=number) for number in range(8)},
    "small": noise(9, seed=100),
}


@pytest.fixture(scope="module", params=["straight", "by service"])
def yard(
    request: pytest.FixtureRequest, cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("hdfs")
    with ExitStack() as opened:
        if request.param == "straight":
            yard = opened.enter_context(straight(cluster, folder))
        else:
            yard, _ = opened.enter_context(by_service(cluster, folder))
        yard.push(STATE, BERT)
        yield yard


def test_tensors_come_straight_from_datanodes(yard: Yard) -> None:
    weights = yard.load(BERT)
    assert same(weights, STATE)
    report = weights.report
    assert set(report.read_paths) == {"direct"}
    assert sum(report.datanodes.values()) == report.stored_bytes > 0
    assert report.failed == ()


def test_slices_are_read_in_proportion(yard: Yard) -> None:
    weights = yard.load(BERT, tensors="layers.*", slices={"*": slice(0, 100)})
    assert same(weights, {name: STATE[name][:100] for name in weights})
    # Each slice lies in the first of its tensor's two chunks: half of what all of them store.
    whole = yard.load(BERT, tensors="layers.*", cache=False).report
    assert weights.report.read_bytes == whole.read_bytes / 2 == 8 * MIB
    assert weights.report.stored_bytes < 0.55 * whole.stored_bytes < 6 * MIB


def test_a_stream_and_a_lazy_reader_and_a_module_get_the_same(yard: Yard) -> None:
    before = set(threading.enumerate())
    found = list(yard.stream(BERT, ahead_bytes=4 * MIB))
    assert [name for name, _ in found] == list(STATE)
    assert same(dict(found), STATE)
    with yard.safe_open(BERT) as lazy:
        assert same({"small": lazy.get_tensor("small")}, {"small": STATE["small"]})
        assert torch.equal(lazy.get_slice("layers.3.weight")[5], STATE["layers.3.weight"][5])
    module = nn.ModuleDict({"layers": nn.ModuleList(
        nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(8)
    )})  # fmt: skip
    yard.load_into(module, BERT, tensors="layers.*")
    assert same(module.state_dict(), {name: one for name, one in STATE.items() if name != "small"})
    # Those of a store are as many as it had calls at once. A service in this process may be writing
    # its records meanwhile, which ends.
    until = time.monotonic() + 60
    while not {one.name for one in new_since(before)} <= {"weightyard-watched"}:
        assert time.monotonic() < until, new_since(before)
        time.sleep(0.01)


def new_since(before: set[threading.Thread]) -> list[threading.Thread]:
    ours = our_threads()
    return [one for one in threading.enumerate() if one not in before and one.name in ours]


def test_a_verified_load_reads_whole_blocks(yard: Yard, tmp_path: Path) -> None:
    part = yard.load(BERT, tensors="layers.0.*", slices={"*": slice(0, 3)}, verify="full")
    assert same(part, {"layers.0.weight": STATE["layers.0.weight"][:3]})
    assert part.report.stored_bytes > MIB


def test_a_namenode_that_hangs_ends_a_load_in_the_time_it_has(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    """Nothing of the version was loaded here before, so that the manifest is asked for first."""
    (namenode,) = cluster.namenodes
    with straight(cluster, tmp_path) as fresh:
        fresh.push(STATE, BERT)
        namenode.pause()
        try:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                fresh.load(BERT, timeout=3)
            took_s = time.monotonic() - began
        finally:
            namenode.resume()
    assert took_s < 10


def test_a_reader_that_nobody_told_its_place_knows_a_replica_of_its_own_host(
    own_cluster: Callable[..., MiniCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTYARD_LOCATION", raising=False)
    # Other test clusters give each DataNode an address that packets of this host do not come from.
    monkeypatch.setattr(configuration, "LOOPBACK", ("127.0.0.1", "127.0.0.1"))
    with own_cluster(racks=("a",)) as here, straight(here, tmp_path) as yard:
        assert yard._settings.location is None
        yard.push(STATE, BERT, replication=1)
        assert set(yard.load(BERT).report.distances) == {"same-host"}
