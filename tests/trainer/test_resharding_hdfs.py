"""A checkpoint in a real HDFS, read by several ranks."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_world import World, run_ranks
from reading_world import RUN, is_same, noise, opened, rows, save
from test_yard_writer_hdfs import counted_by
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from waiting import SOON_S

from weightyard.format.block import MIB
from weightyard.names import PackId
from weightyard.storage import layout
from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.testing.cluster import MiniCluster, damage
from weightyard.trainer.reader import YardReader
from weightyard.trainer.state import State
from weightyard.transfer.durable import require_replicas
from weightyard.transfer.hedging import HedgeBudget
from weightyard.yard import Yard

pytestmark = pytest.mark.cluster

_METRICS_S = 11.0
"""A NameNode's metrics are up to ten seconds old."""

TENSORS = {
    f"layers.{number}": rows(noise(1000, 1024, seed=number), 250, 500, 750) for number in range(4)
}


@dataclass(frozen=True)
class Came:
    """What a rank's load came to."""

    wrong: tuple[str, ...]
    stored_bytes: int
    needed_bytes: int
    paths: frozenset[str]
    distances: frozenset[str]
    failed: tuple[str, ...] = ()


def asked_where(cluster: MiniCluster) -> int:
    """How often the NameNode was asked where something lies, since it began."""
    time.sleep(_METRICS_S)
    query = "qry=Hadoop:service=NameNode,name=NameNodeActivity"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{cluster.http_addresses[0]}/jmx?{query}", timeout=10) as answer:
        return int(json.load(answer)["beans"][0]["GetBlockLocations"])


@contextmanager
def patient() -> Iterator[None]:
    """A DataNode that is silent or slow for a while is read all the same, and no other one.

    So may any be on a busy machine: then a farther one is read, and wrong bytes of the near one
    are not even seen.
    """
    with pytest.MonkeyPatch.context() as patched:
        reader = partial(DataNodeReader, stall_s=SOON_S)
        patched.setattr("weightyard.storage.hdfs.store.DataNodeReader", reader)
        patched.setattr(HedgeBudget, "take", lambda budget: False)
        yield


def load(world: World, rank: int) -> Came:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        name: distribute_tensor(torch.zeros_like(cut.tensor), mesh, [Shard(0)])
        for name, cut in TENSORS.items()
    }
    location = ("/rack-a", "/rack-b")[rank % 2]
    with patient(), world.yard(rank, location=location, deadline_s=2 * SOON_S) as yard:
        reader = YardReader(yard, RUN)
        dcp.load({**state, "epoch": 0}, storage_reader=reader)
    report = reader.report
    assert report is not None
    wrong = [
        name for name, cut in TENSORS.items() if not is_same(state[name].full_tensor(), cut.tensor)
    ]
    return Came(
        tuple(wrong),
        report.stored_bytes,
        report.needed_bytes,
        frozenset(report.load.read_paths),
        frozenset(report.load.distances),
        report.load.failed,
    )


def world_on(cluster: MiniCluster, folder: Path, pack_bytes: int = 2 * MIB) -> World:
    world = World(folder, cluster.fresh_dir(), {"hadoop_conf_dir": cluster.conf_dir})
    with opened(world) as yard:
        save(yard, 1, TENSORS, State({"epoch": 3}), compress=False, pack_bytes=pack_bytes)
        for pack in packs_in(yard):
            path = layout.pack(pack)
            # A rack whose only replica is not counted yet has nothing near.
            require_replicas(yard.store, path, yard.store.stat(path).replication, SOON_S)
    return world


def packs_of(world: World) -> set[PackId]:
    with opened(world) as yard:
        return packs_in(yard)


def packs_in(yard: Yard) -> set[PackId]:
    blocks = [block.id for block in yard.manifest(RUN).blocks]
    return {places[0].pack for places in yard.catalogue.placements(blocks).values()}


def test_ranks_read_one_copy_from_datanodes_near_them(cluster: MiniCluster, tmp_path: Path) -> None:
    came = run_ranks(world_on(cluster, tmp_path), load, size=3)
    assert {one.wrong for one in came.values()} == {()}
    assert all(one.stored_bytes <= 1.05 * one.needed_bytes for one in came.values())
    assert {path for one in came.values() for path in one.paths} == {"direct"}
    assert {far for one in came.values() for far in one.distances} <= {"same-rack", "same-host"}


def test_a_rank_more_does_not_ask_the_namenode_for_each_file_again(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    if not isinstance(cluster, MiniCluster):
        pytest.skip("others ask this NameNode, too")
    world = world_on(cluster, tmp_path, pack_bytes=5 * MIB // 4)
    packs = len(packs_of(world))
    asked = []
    for ranks in (1, 2):
        before = counted_by(cluster)
        run_ranks(world, load, size=ranks)
        asked.append(sum(counted_by(cluster).since(before).calls.values()))
    assert packs == 16
    assert packs < asked[0] <= asked[1]
    assert asked[1] - asked[0] < packs // 2  # to open the yard it asks five times


@pytest.mark.long
def test_the_namenode_is_asked_once_for_each_pack_however_many_ranks_read_it(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    if not isinstance(cluster, MiniCluster):
        pytest.skip("others ask this NameNode, too")
    world = world_on(cluster, tmp_path)
    packs = len(packs_of(world))
    before = asked_where(cluster)
    run_ranks(world, load, size=4)
    asked = asked_where(cluster) - before
    assert packs > 6
    # To open the yard each rank asks once or twice. The first one asks for the manifest, and where
    # the state lies, which it reads before all: the rest of that pack may be another rank's share.
    assert packs <= asked <= packs + 2 + 2 * 4


def test_a_replica_with_wrong_bytes_is_passed_over_and_named(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    world = world_on(cluster, tmp_path)
    for pack in packs_of(world):
        path = f"{urlsplit(world.url).path}/{layout.pack(pack)}"
        cluster.wait_for_replication(path, 3, SOON_S)  # else a damaged one could be copied
        for replica in cluster.replica_files(path)[:2]:
            damage(replica, 500_000, 100, hide=True)
    came = run_ranks(world, load, size=2)
    assert {one.wrong for one in came.values()} == {()}
    assert any("checksum" in said for one in came.values() for said in one.failed)
