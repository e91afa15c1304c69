"""Loading from a real HDFS: straight, and by a yard whose registry is behind a service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loader_world import BERT, noise, our_threads, same, yard_in
from service_world import served
from torch import nn

from weightyard.format.block import MIB
from weightyard.registry import migrate
from weightyard.registry.database import Database
from weightyard.service.app import create_app
from weightyard.service.serving import open_service
from weightyard.settings import Settings
from weightyard.storage.opening import open_store
from weightyard.testing.cluster import MiniCluster
from weightyard.yard import Yard, open_yard

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
    url = cluster.fresh_dir()
    if request.param == "straight":
        with yard_in(folder, url, hadoop_conf_dir=cluster.conf_dir) as opened:
            opened.push(STATE, BERT)
            yield opened
        return
    settings = Settings(
        home=folder / "home", cache=folder / "cache", hadoop_conf_dir=cluster.conf_dir
    )
    database = Database(f"sqlite:///{folder}/registry.db")
    migrate.upgrade(database)
    with open_store(url, settings) as store:
        service = open_service(store, database, settings, "127.0.0.1")
        with (
            served(create_app(service)) as address,
            open_yard(address, settings=settings) as opened,
        ):
            opened.push(STATE, BERT)
            yield opened
    database.close()


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
    assert weights.report.stored_bytes <= 8 * (1.1 * 100 * 2048 + 2 * MIB)
    assert weights.report.stored_bytes < 12 * MIB


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
    assert not [
        one for one in threading.enumerate() if one not in before and one.name in our_threads()
    ]


def test_a_verified_load_reads_whole_blocks(yard: Yard, tmp_path: Path) -> None:
    part = yard.load(BERT, tensors="layers.0.*", slices={"*": slice(0, 3)}, verify="full")
    assert same(part, {"layers.0.weight": STATE["layers.0.weight"][:3]})
    assert part.report.stored_bytes > MIB
