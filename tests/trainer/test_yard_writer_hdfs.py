"""Saving by several ranks on a real HDFS."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from trainer_world import RUN, World, run_ranks

from bench.counting import Counted, count
from weightyard.storage import layout
from weightyard.testing.cluster import MiniCluster
from weightyard.trainer.values import save_values
from weightyard.trainer.writer import YardWriter
from weightyard.transfer.writer import WriteReport

pytestmark = pytest.mark.cluster


def state(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randn(1024, 1024, generator=generator)
    mine[:step] *= 1.0001
    return {f"stage{rank}": mine, "both": torch.arange(500_000)}


def save_twice(world: World, rank: int) -> list[WriteReport]:
    reports = []
    with world.yard(rank) as yard, YardWriter(yard, RUN) as writer:
        for step in range(2):
            dcp.save(state(rank, step), checkpoint_id=step, storage_writer=writer)
            reports.append(writer.report)
    return reports


def counted_by(cluster: MiniCluster) -> Counted:
    """What the NameNode counted, when it counts no more: it may be late with it."""
    found = count(cluster.http_addresses[0])
    while (later := count(cluster.http_addresses[0])).calls != found.calls:
        found = later
    return found


def test_a_save_calls_the_namenode_five_times_for_each_file_and_eight_times_besides(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    if not isinstance(cluster, MiniCluster):
        pytest.skip("others call this NameNode, too")
    world = World(tmp_path, cluster.fresh_dir(), {"hadoop_conf_dir": cluster.conf_dir})
    counted = []
    with world.yard(0) as yard, YardWriter(yard, RUN) as writer:
        before = counted_by(cluster)
        for step in range(4):
            save_values(writer, step, state(0, step))
            assert yard._settling.wait()
            after = counted_by(cluster)
            counted.append(after.since(before).calls)
            before = after
    # Create, AddBlock, Complete, Rename2, and one look at what was written. Besides: whether the
    # registry is older than the store, twice; two folders of staging, there and away again; those
    # of pack and manifest, where they are new. HDFS may be slow, and is then asked again, so it is
    # one save that shows it; a DataNode that tells late of its replica has a file closed twice.
    of_four = [calls for calls in counted[1:] if calls["Create"] == 4]
    assert of_four, f"pack, manifest and two records: {counted}"
    once = [sum(calls.values()) - (calls["Complete"] - 4) for calls in of_four]
    assert min(once) <= 5 * 4 + 8, f"{of_four}"


def test_ranks_save_to_hdfs_and_only_what_changed_the_second_time(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    world = World(tmp_path, cluster.fresh_dir(), {"hadoop_conf_dir": cluster.conf_dir})
    found = run_ranks(world, save_twice, size=2)
    for first, second in found.values():
        assert second.stored_bytes < first.stored_bytes // 50
    with world.yard(99) as yard:
        for step in range(2):
            loaded = yard.load(f"{RUN}@step-{step}", verify="full")
            for rank in range(2):
                expected = state(rank, step)
                assert all(torch.equal(loaded[name], one) for name, one in expected.items())
        manifest = yard.manifest(f"{RUN}@step-0")
        places = yard.catalogue.placements([block.id for block in manifest.blocks])
        packs = {place.pack for of_block in places.values() for place in of_block}
        replicas = [yard.store.locate(layout.pack(pack)).spans[0].replicas for pack in packs]
        assert min(map(len, replicas)) >= 2  # durable before the checkpoint was
