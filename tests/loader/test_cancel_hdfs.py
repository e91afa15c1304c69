"""Ctrl-C while tensors come from a real HDFS: it is heard at once, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from begun import begun, left
from connected import connections_to
from hdfs_world import straight
from loader_world import BERT, noise, same
from patience import PATIENT, be_patient
from waiting import SOON_S, eventually

from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.testing.cluster import MiniCluster
from weightyard.yard import Yard

pytestmark = pytest.mark.cluster

STATE = {f"layers.{number}": noise(1024, 1024, seed=number) for number in range(8)}
AT_ONCE_S = 15.0
"""Long for a busy machine, and half of what a read takes that nobody ends."""

LOADS = (
    PATIENT
    + """
import os, sys, threading, time
from pathlib import Path
from weightyard.opening import open_yard
from weightyard.settings import Settings
url, folder, conf = sys.argv[1:]
settings = Settings(home=Path(folder, "home"), cache=Path(folder, "cache"),
                    cache_loads=False, hadoop_conf_dir=Path(conf))
with open_yard(url, settings=settings) as yard:
    yard.load("team/bert", cache=False)
    while any(one.name.startswith("weightyard-fetch") for one in threading.enumerate()):
        time.sleep(0.01)
    print(len(os.listdir("/proc/self/task")), flush=True)
    sys.stdin.readline()
    yard.load("team/bert", cache=False)
    print("loaded", flush=True)
"""
)


@pytest.fixture
def yard(cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    be_patient(monkeypatch)
    with straight(cluster, tmp_path) as opened:
        opened.push(STATE, BERT, replication=3)
        yield opened


def test_ctrl_c_ends_a_program_that_loads_at_once(
    cluster: MiniCluster, yard: Yard, tmp_path: Path
) -> None:
    """All DataNodes stand still, so that it is in the middle of a load."""
    words = [yard.store.url, str(tmp_path), str(cluster.conf_dir)]
    with subprocess.Popen(
        [sys.executable, "-c", LOADS, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = int(process.stdout.readline())
        for daemon in cluster.datanodes:
            daemon.pause()
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            eventually(lambda: len(os.listdir(f"/proc/{process.pid}/task")) > before)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            said, why = process.communicate(timeout=SOON_S)
            took_s = time.monotonic() - began
        finally:
            process.kill()
            for daemon in cluster.datanodes:
                daemon.resume()
    for daemon in cluster.datanodes:
        cluster.wait_until_live(daemon)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in why
    assert said == ""
    assert took_s < AT_ONCE_S


def test_a_load_whose_hook_raises_leaves_no_thread_and_no_connection_but_the_pools(
    cluster: MiniCluster, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[DataNodeReader] = []
    read = DataNodeReader.read

    def noted(pool: DataNodeReader, *arguments: object) -> None:
        if pool not in pools:
            pools.append(pool)
        read(pool, *arguments)  # type: ignore[arg-type]

    def interrupt(done_bytes: int) -> None:
        raise KeyboardInterrupt

    assert yard._settling.wait(), "records of the push are no connections of the load"
    ports = {int(one.plan.address.rpartition(":")[2]) for one in cluster.datanodes}
    of_others = connections_to(ports)  # which stores of other tests keep for their next read
    monkeypatch.setattr(DataNodeReader, "read", noted)
    with begun() as threads, pytest.raises(KeyboardInterrupt):
        yard.load(BERT, cache=False, progress=interrupt)
    ours = [one for one in threads if one.name.startswith("weightyard-")]
    assert {"weightyard-load_0"} <= {one.name for one in ours}
    assert left(ours) == []
    (pool,) = pools
    assert connections_to(ports) - of_others <= len(pool._idle)
    assert same(yard.load(BERT, cache=False), STATE), "and the next one comes"
