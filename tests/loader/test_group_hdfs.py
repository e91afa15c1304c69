"""Ranks that load together from a real HDFS."""

from __future__ import annotations

from pathlib import Path

import pytest
from group_world import Outcome, World, outcome, run_ranks
from loader_world import BERT, noise, yard_in
from waiting import SOON_S

from weightyard.storage import layout
from weightyard.testing.cluster import MiniCluster
from weightyard.transfer import hedging
from weightyard.transfer.durable import require_replicas

pytestmark = pytest.mark.cluster

STATE = {f"layers.{number}.weight": noise(1024, 1024, seed=number) for number in range(12)}
RACKS = ("/rack-a", "/rack-a", "/rack-b", "/rack-b")


def load_in_rack(world: World, rank: int) -> Outcome:
    # A read that is slow on a busy machine would be asked of another rack as well.
    hedging.LEAST_DELAY_S = hedging._FLOOR_S = 600.0
    with world.yard(rank, location=RACKS[rank]) as yard:
        return outcome(yard, BERT, STATE)


@pytest.mark.parametrize("replication", [1, 3])
def test_ranks_read_one_copy_from_datanodes_near_them(
    cluster: MiniCluster, tmp_path: Path, replication: int
) -> None:
    url = cluster.fresh_dir()
    with yard_in(tmp_path, url, hadoop_conf_dir=cluster.conf_dir) as yard:
        yard.push(STATE, BERT, codec="raw", replication=replication)
        manifest = yard.manifest(BERT)
        placements = yard.catalogue.placements([block.id for block in manifest.blocks])
        packs = {layout.pack(places[0].pack) for places in placements.values()}
        for pack in packs:  # a push waits for two: the third may come between the ranks' looks
            require_replicas(yard.store, pack, replication, SOON_S)
        alone = yard.load(BERT, cache=False).report
        racks = {
            replica.rack
            for pack in packs
            for span in yard.store.locate(pack).spans
            for replica in span.replicas
        }
    world = World(tmp_path, url, {"hadoop_conf_dir": cluster.conf_dir})
    found = run_ranks(world, load_in_rack)
    assert all(one.is_same for one in found.values()), found
    reports = [found[rank].report for rank in range(4)]
    assert sum(one.stored_bytes for one in reports) == alone.stored_bytes
    assert sum(one.read_bytes for one in reports) == alone.bytes
    assert {path for one in reports for path in one.read_paths} == {"direct"}
    for rack, report in zip(RACKS, reports, strict=True):
        assert bool(report.read_bytes) == (rack in racks)
        assert set(report.distances) <= {"same-rack", "same-host"}
