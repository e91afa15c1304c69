"""Following an alias on a real HDFS."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from hdfs_world import by_service
from loader_world import BERT, noise, our_threads, same, yard_in
from waiting import SOON_S, eventually

from weightyard.errors import YardError
from weightyard.storage import layout
from weightyard.storage.store import ReadPath
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.cluster.replicas import damage

pytestmark = pytest.mark.cluster

PROD = f"{BERT}@prod"
NEVER_S = 3600.0
"""A pace of asking at which nothing would be noticed in time."""


def test_a_version_whose_replicas_are_all_wrong_is_passed_over_and_the_next_one_taken(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    url = cluster.fresh_dir()
    first = {"trunk": noise(2048, 1024), "head": noise(512, 1024, seed=1)}
    second = first | {"head": noise(512, 1024, seed=2)}
    third = first | {"head": noise(512, 1024, seed=3)}
    with yard_in(tmp_path, url, hadoop_conf_dir=cluster.conf_dir, poll_s=0.2) as yard:
        yard.push(first, BERT, alias="prod", codec="raw")
        weights = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
        yard.load_into(holder(weights), PROD, cache=False)
        assert same(weights, first)
        with yard.follow(PROD, weights, applied=f"{BERT}@v1") as follower:
            yard.push(second, BERT, codec="raw")
            blocks = yard.manifest(f"{BERT}@v2").blocks
            (block,) = {one.id for one in blocks} - {
                one.id for one in yard.manifest(f"{BERT}@v1").blocks
            }
            (placement,) = yard.catalogue.placements([block])[block]
            pack = f"{urlsplit(url).path}/{layout.pack(placement.pack)}"
            cluster.wait_for_replication(pack, 3)
            for replica in cluster.replica_files(pack):
                damage(replica, placement.offset + 100, hide=True)
            yard.set_alias(BERT, "prod", 2)
            eventually(lambda: isinstance(follower.failure, YardError))
            assert follower.ready() is None
            assert same(weights, first)
            yard.push(third, BERT, alias="prod", codec="raw")
            eventually(lambda: follower.ready() is not None)
            assert follower.failure is None
            assert follower.report is not None
            assert follower.report.raw_bytes == third["head"].nbytes
            assert follower.report.by_path.keys() == {ReadPath.DIRECT}
            follower.apply()
            assert same(weights, third)
    assert not {"weightyard-watch", "weightyard-follow", "weightyard-lease"} & {*our_threads()}


def test_a_service_tells_of_the_move_and_the_change_comes_as_a_delta_from_datanodes(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    first = {"trunk": noise(2048, 1024), "head": noise(512, 1024, seed=1)}
    second = first | {"head": first["head"].clone()}
    second["head"][3, 5] += 1
    with by_service(cluster, tmp_path) as (yard, _):
        yard.push(first, BERT, alias="prod")
        weights = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
        with yard.follow(PROD, weights, poll_s=NEVER_S) as follower:
            assert follower.wait(SOON_S) is not None
            follower.apply()
            yard.push(second, BERT, alias="prod", parent=PROD, delta="also")
            found = follower.wait(SOON_S)
            assert found is not None
            assert found.number == 2
            assert follower.report is not None
            assert follower.report.by_path.keys() == {ReadPath.DIRECT}
            assert follower.report.stored_bytes < second["head"].nbytes / 20, "a delta"
            follower.apply()
            assert same(weights, second)
            assert follower.failure is None


def holder(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module that has these tensors."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module
