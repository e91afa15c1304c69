"""A DataNode is killed, or stopped, in the middle of a load: how often it fails, what it costs."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from bench.models import as_bytes
from bench.prepared import PLANES, pushed
from bench.samples import Kind, Row
from bench.site import ChildFailed, Site
from bench.worker import Action, Prepare
from bench.yards import MODEL, opened
from weightyard.testing.cluster import MiniCluster
from weightyard.transfer.replicas import Distance

UNDISTURBED, KILLED, STOPPED = "undisturbed", "one killed", "one stopped"
_SIGNALS = {KILLED: signal.SIGKILL, STOPPED: signal.SIGSTOP}
RACKS = ("a", "b", "c")
DATANODES = len(RACKS)
_MOST_LOADS = 20
_AGAIN_S = 1.0


class _Load:
    """Loads; from the second time on, a process is sent a signal when a third has come.

    The first one is repeated until all bytes come from the one that will fail, which may have been
    gone until a moment ago.
    """

    def __init__(
        self, url: str, folder: str, length: int, location: str, victim: int, sent: int
    ) -> None:
        self._yard = opened(url, folder, location)
        self._length, self._victim, self._sent = length, victim, sent
        self._loads = self._come = 0
        self.read_bytes = self.went_wrong = 0
        self.server_pids = ()
        """Of one that is killed no CPU time can be asked."""

    def __call__(self) -> Sequence[memoryview]:
        self._loads += 1
        for _ in range(_MOST_LOADS):
            self._come = 0
            weights = self._yard.load(MODEL, cache=False, progress=self._progress)
            if self._loads > 1 or Distance.OTHER_RACK not in weights.report.distances:
                break
            time.sleep(_AGAIN_S)
        self.read_bytes = weights.report.stored_bytes
        self.went_wrong = len(weights.report.failed) + weights.report.hedged
        return as_bytes(weights)

    def _progress(self, amount: int) -> None:
        self._come += amount
        if self._sent and self._loads > 1 and self._come >= self._length // 3:
            os.kill(self._victim, self._sent)
            self._sent = 0


def load(
    site: Site, *, url: str, folder: str, length: int, location: str, victim: int, sent: int
) -> Action:
    return _Load(url, folder, length, location, victim, sent)


TASKS: Mapping[str, Prepare] = {"faults.load": load}


def run(length: int, kills: int, done: Callable[[Row], object]) -> tuple[Row, ...]:
    """On a cluster of its own, whose DataNodes are started again after each."""
    scratch = Path(tempfile.mkdtemp(prefix="weightyard-bench-"))
    try:
        with MiniCluster(datanodes=DATANODES, racks=RACKS) as cluster:
            return _run(cluster, scratch, length, kills, done)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(
    cluster: MiniCluster, scratch: Path, length: int, kills: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    site = Site.of(cluster, scratch)
    with pushed(site, length, PLANES, copies=DATANODES) as model:
        rows = {
            way: Row(Kind.OURS, "weightyard", way, model.length, group="faults")
            for way in (UNDISTURBED, KILLED, STOPPED)
        }
        for number in range(kills):
            for way, row in rows.items():
                site = Site.of(cluster, scratch)  # a DataNode started again has another pid
                at = number % DATANODES
                victim = cluster.datanodes[at]
                options = {
                    **model.yards[PLANES],
                    "length": model.length,
                    # Beside it, so that every load reads from it and has to turn away.
                    "location": cluster.plan.datanodes[at].rack,
                    "victim": victim.identity.pid,
                    "sent": int(_SIGNALS.get(way, 0)),
                    "digest": model.digest,
                }
                try:
                    rows[way] = row.with_sample(site.run_child("faults.load", options))
                except ChildFailed as why:
                    rows[way] = msgspec.structs.replace(row, failed=str(why))
                finally:
                    if way == KILLED:
                        cluster.restart(victim)
                    elif way == STOPPED:
                        victim.resume()
                        cluster.wait_until_live(victim)
                done(rows[way])
        return tuple(rows.values())
