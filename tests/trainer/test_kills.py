"""Jobs that are killed, and go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from killed import INTERVAL, LIMIT_S, UNTIL, Kill, digest, job, recorded
from trainer_world import World, run_ranks
from training import RUN, SAMPLES, Trained

from weightyard.format.block import MIB
from weightyard.testing.cluster import MiniCluster

RANKS = 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Trained]:
    """The job as it is if nobody is killed."""
    folder = tmp_path_factory.mktemp("whole")
    came = run_ranks(World(folder, str(folder / "store")), job, size=RANKS)
    assert [one.error for one in came.values()] == ["", ""]
    return {rank: one.value for rank, one in came.items()}


def assert_as_if_nothing_had_happened(
    world: World, whole: Mapping[int, Trained], weights: Mapping[int, str]
) -> None:
    """Losses and weights are the same bit for bit, and so are the samples of each step."""
    seen: list[int] = []
    for rank, one in whole.items():
        steps = recorded(world, rank)
        assert steps == {step: (one.losses[step], one.samples[step]) for step in one.losses}
        assert weights[rank] == digest(one.weights)
        seen += [number for _, samples in steps.values() for number in samples]
    assert len(seen) == 2 * RANKS * UNTIL
    assert set(seen) == set(range(SAMPLES))
    assert max(map(seen.count, seen)) == 2  # once in each epoch


KILLS = [
    (Kill("staging", 1), INTERVAL),
    (Kill("staging", 0), INTERVAL),
    (Kill("midway", 1), INTERVAL),
    (Kill("midway", 0), INTERVAL),
    (Kill("upload", 1), INTERVAL),
    (Kill("upload", 0), INTERVAL),
    (Kill("finished", 1), INTERVAL),
    (Kill("commit", 0), INTERVAL),
    (Kill("committed", 0), 2 * INTERVAL),
]


@pytest.mark.parametrize(
    ("kill", "resumed"), KILLS, ids=[f"rank {kill.rank}, {kill.point}" for kill, _ in KILLS]
)
def test_a_rank_that_is_killed_costs_nothing_but_the_steps_since_the_last_commit(
    tmp_path: Path, whole: Mapping[int, Trained], kill: Kill, resumed: int
) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    left = run_ranks(world, partial(job, kill=kill), size=RANKS, dead=[kill.rank])
    assert all(one.error for one in left.values())
    if kill.point == "midway":
        assert any(one.stat().st_size > MIB // 50 for one in tmp_path.glob("store/staging/*/*"))
    with world.yard(99) as yard:
        assert [one.step for one in yard.versions(RUN)] == list(range(resumed, 0, -INTERVAL))
    came = run_ranks(world, job, size=RANKS)
    assert {one.value.resumed for one in came.values()} == {resumed}
    weights = {rank: digest(one.value.weights) for rank, one in came.items()}
    assert_as_if_nothing_had_happened(world, whole, weights)


def torchrun(folder: Path, kills: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={RANKS}", f"--max-restarts={len(kills)}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *("--monitor-interval=0.1", str(here / "killed.py"), str(folder), json.dumps(kills)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join((str(here.parent.parent), str(here.parent))),
    }
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.timeout(300)
def test_torchrun_restarts_a_job_and_it_goes_on(
    tmp_path: Path, whole: Mapping[int, Trained]
) -> None:
    kills = [{"point": "upload", "rank": 1}, {"point": "commit", "rank": 0, "step": 9}]
    ended = torchrun(tmp_path, kills)
    assert ended.returncode == 0, ended.stderr[-4000:]
    done = {rank: json.loads((tmp_path / f"done-{rank}.json").read_text()) for rank in whole}
    assert {(one["restarts"], one["resumed"]) for one in done.values()} == {(2, 6)}
    world = World(tmp_path, str(tmp_path / "store"))
    weights = {rank: one["weights"] for rank, one in done.items()}
    assert_as_if_nothing_had_happened(world, whole, weights)


FLOWING = 60_000
"""Hidden numbers, so that a pack has some MiB, of which some are on their way."""


@pytest.fixture(scope="module")
def large_whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Trained]:
    """The job with a larger state, if nobody is killed."""
    folder = tmp_path_factory.mktemp("whole")
    world = World(folder, str(folder / "store"))
    came = run_ranks(world, partial(job, hidden=FLOWING), size=RANKS)
    return {rank: one.value for rank, one in came.items()}


@pytest.mark.cluster
@pytest.mark.timeout(420)  # a DataNode may take two minutes to be back
@pytest.mark.parametrize("point", [pytest.param("writing", marks=pytest.mark.long), "midway"])
def test_a_datanode_that_is_killed_during_a_save_costs_nothing(
    tmp_path: Path, large_whole: Mapping[int, Trained], cluster: MiniCluster, point: str
) -> None:
    world = World(tmp_path, cluster.fresh_dir(), {"hadoop_conf_dir": cluster.conf_dir})
    victim = cluster.datanodes[0]
    seen = str(victim.folder) if point == "midway" else None
    kill = Kill(point, 0, pid=victim.identity.pid, datanode=seen)
    try:
        came = run_ranks(world, partial(job, kill=kill, until=7, hidden=FLOWING), size=RANKS)
        assert [one.error for one in came.values()] == ["", ""]
        with world.yard(99) as yard:
            assert [one.step for one in yard.versions(RUN)] == [6, 3]
        assert not victim.is_running
        came = run_ranks(world, partial(job, hidden=FLOWING), size=RANKS)
    finally:
        cluster.restart(victim)
    assert {one.value.resumed for one in came.values()} == {6}
    weights = {rank: digest(one.value.weights) for rank, one in came.items()}
    assert_as_if_nothing_had_happened(world, large_whole, weights)


@pytest.mark.cluster
def test_a_rank_that_is_killed_while_hdfs_takes_its_pack_costs_nothing(
    tmp_path: Path, large_whole: Mapping[int, Trained], cluster: MiniCluster
) -> None:
    world = World(tmp_path, cluster.fresh_dir(), {"hadoop_conf_dir": cluster.conf_dir})
    kill = Kill("midway", 1, datanode=str(cluster.datanodes[0].folder))
    left = run_ranks(world, partial(job, kill=kill, hidden=FLOWING), size=RANKS, dead=[1])
    assert left[0].error
    came = run_ranks(world, partial(job, hidden=FLOWING), size=RANKS)
    assert {one.value.resumed for one in came.values()} == {INTERVAL}
    weights = {rank: digest(one.value.weights) for rank, one in came.items()}
    assert_as_if_nothing_had_happened(world, large_whole, weights)
