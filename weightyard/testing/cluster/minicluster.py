"""MiniCluster: a real HDFS on loopback, for as long as a test needs it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from weightyard.closing import Closing
from weightyard.errors import ClusterFailed
from weightyard.settings import Settings
from weightyard.testing.cluster import replicas, startup
from weightyard.testing.cluster.configuration import (
    DEFAULT_RACKS,
    ClusterPlan,
    DataNodePlan,
    NameNodePlan,
    Properties,
    client_properties,
    short_circuit_properties,
)
from weightyard.testing.cluster.daemon import Daemon
from weightyard.testing.cluster.java import QUICK_START, installed_java
from weightyard.testing.cluster.native import library_folder
from weightyard.testing.cluster.observed import (
    POLL_S,
    live_datanodes,
    namenode_state,
    served_blocks,
    wait_until,
    webhdfs,
)
from weightyard.testing.cluster.ports import PortBlock
from weightyard.testing.cluster.processes import Leash
from weightyard.testing.cluster.replicas import ReplicaFile
from weightyard.testing.cluster.shared_classes import ArchiveInTheMaking, listing, sharing

_SETTLED_S = 5.0
_REPORTED_S = 30.0
"""How long a restarted DataNode may take to report its blocks, also on a busy machine."""

_ANSWER_S = 30.0


class MiniCluster(Closing):
    """Real Hadoop daemons, one JVM each, on loopback and without root.

    Use it as a context manager. The daemons and their data are gone when it is left, and also
    when this process dies in whatever way. Several clusters may run side by side.

        with MiniCluster() as cluster:
            client = hdfs_native.Client(cluster.url, dict(cluster.client_properties))
    """

    def __init__(
        self,
        *,
        datanodes: int | None = None,
        racks: Sequence[str] = DEFAULT_RACKS,
        ha: bool = False,
        block_tokens: bool = False,
        encrypt: bool = False,
        permissions: bool = True,
        short_circuit: bool = False,
        properties: Properties | None = None,
        jvm_options: Sequence[str] = QUICK_START,
        timeout_s: float = 120.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`properties` go into every daemon's and client's configuration, before the defaults.

        `short_circuit`: DataNodes hand out the files of replicas, on a UNIX socket. They refuse one
        below a folder that everybody may write to, so the cluster then lies in the cache.
        """
        self._properties = dict(properties or {})
        self._short_circuit = short_circuit
        self._plan = partial(
            ClusterPlan.on_loopback,
            datanodes=datanodes,
            racks=racks,
            ha=ha,
            block_tokens=block_tokens,
            encrypt=encrypt,
            permissions=permissions,
        )
        self._jvm_options = tuple(jvm_options)
        self._timeout_s = timeout_s
        self._say = say
        self._daemons: tuple[Daemon, ...] = ()
        self._open = ExitStack()
        self._fresh = count(1)

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            ports = opened.enter_context(closing(PortBlock.reserve()))
            settings = Settings()
            options, place = self._jvm_options, None
            if self._short_circuit:
                library = library_folder(settings.cache, self._say)
                options, place = (*options, f"-Djava.library.path={library}"), settings.cache
            java = installed_java(settings, options, self._say)
            self.folder = Path(tempfile.mkdtemp(prefix="weightyard-hdfs-", dir=place))
            leash = opened.enter_context(closing(Leash(self.folder)))
            sockets = short_circuit_properties(self.folder) if self._short_circuit else {}
            self.plan = self._plan(ports, properties={**sockets, **self._properties})
            self._java = sharing(java) or listing(java, self.folder)
            self._daemons = startup.bring_up(
                self.plan,
                self.folder,
                self._java,
                leash,
                timeout_s=self._timeout_s,
                say=self._say,
            )
            for daemon in self._daemons:
                opened.callback(daemon.kill)
            if archiving := ArchiveInTheMaking.begin(java, self.folder, leash):
                opened.callback(archiving.finish)
            self._open = opened.pop_all()
        return self

    def close(self) -> None:
        self._open.close()

    @property
    def url(self) -> str:
        """`hdfs://127.0.0.1:<port>`, or `hdfs://weightyard` for an HA pair."""
        return self.plan.url

    @property
    def conf_dir(self) -> Path:
        """core-site.xml and hdfs-site.xml for clients: what HADOOP_CONF_DIR names."""
        return self.folder / "conf"

    @property
    def client_properties(self) -> Properties:
        """The same for a client that takes its configuration as a dict."""
        return {**client_properties(self.plan), **self.plan.properties}

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """`http://host:port` of every NameNode."""
        return tuple(f"http://{one.http}" for one in self.plan.namenodes)

    @property
    def namenodes(self) -> tuple[Daemon, ...]:
        return tuple(one for one in self._daemons if isinstance(one.plan, NameNodePlan))

    @property
    def datanodes(self) -> tuple[Daemon, ...]:
        return tuple(one for one in self._daemons if isinstance(one.plan, DataNodePlan))

    @property
    def active(self) -> Daemon:
        """The NameNode that serves. Raises ClusterFailed if none does."""
        give_up = time.monotonic() + _ANSWER_S
        while True:
            running = [one for one in self.namenodes if one.is_running]
            states = [namenode_state(one.plan.http) for one in running]
            for daemon, state in zip(running, states, strict=True):
                if state and state.is_active:
                    return daemon
            # One that is silent may only be slow, as all are on a busy machine.
            if all(states) or time.monotonic() > give_up:
                raise ClusterFailed("no NameNode is active")
            time.sleep(POLL_S)

    def fresh_dir(self) -> str:
        """The URL of a folder nobody was given before. It does not exist yet."""
        return f"{self.url}/fresh/{next(self._fresh)}"

    def restart(self, daemon: Daemon) -> None:
        """Kill a daemon if it runs, start it again, wait until it serves again."""
        daemon.kill()
        daemon.start()
        if isinstance(daemon.plan, DataNodePlan):
            self.wait_until_live(daemon)
        else:
            self._wait_until_serving()

    def bring_back(self, datanode: Daemon) -> None:
        """Start a DataNode that was killed, or let one go on that was stopped, until it serves."""
        if not datanode.is_running:
            self.restart(datanode)
            return
        datanode.resume()
        self.wait_until_live(datanode)

    def wait_until_live(self, datanode: Daemon) -> None:
        """Until a DataNode that was started or resumed serves and its blocks are known again."""
        counted: int | None = None
        counted_at = 0.0

        def is_live() -> bool:
            nonlocal counted, counted_at
            held = served_blocks(datanode.plan.http)
            live = live_datanodes(self.active.plan.http) or {}
            known = live.get(datanode.plan.address)
            if held is None or known is None:
                return False
            if known != counted:
                counted, counted_at = known, time.monotonic()
            # A damaged replica is held and never counted: when nothing changes, that is all.
            settled_s = _SETTLED_S if known else _REPORTED_S
            return known >= held or time.monotonic() > counted_at + settled_s

        wait_until(is_live, f"{datanode.name} live", self._timeout_s)

    def fail_over(self) -> None:
        """Make the other NameNode of an HA pair active, also if the active one is gone.

        Gone is one that was killed, and one that was paused: restart it, do not resume it, as it
        would take itself for the active one until its next edit.
        """
        if not self.plan.is_ha:
            raise ClusterFailed(
                "a cluster with one NameNode cannot fail over: MiniCluster(ha=True)"
            )
        first, second = self.namenodes
        gone = self._gone()
        active = gone or self.active
        standby = second if active is first else first
        startup.fail_over(active, standby, self._java)
        self._wait_until_serving(but=gone)

    def replicas(self, path: str) -> list[list[Daemon]]:
        """Which DataNodes hold each block of a file, by the NameNode, nearest first."""
        by_address = {one.plan.address: one for one in self.datanodes}
        return [
            [by_address[f"{at['hostName']}:{at['xferPort']}"] for at in block["locations"]]
            for block in self._located(path)["locatedBlocks"]
        ]

    def replica_files(self, path: str) -> list[ReplicaFile]:
        """Where the replicas of a file's blocks lie on the DataNodes' disks."""
        return list(replicas.find_replica_files(self._located(path), self.datanodes))

    def wait_for_replication(self, path: str, copies: int, timeout_s: float = 60.0) -> None:
        """Until every block of a file is on exactly this many DataNodes."""
        wait_until(
            lambda: all(len(holders) == copies for holders in self.replicas(path)),
            f"{path} on {copies} DataNodes",
            timeout_s,
        )

    def _gone(self) -> Daemon | None:
        """The NameNode of an HA pair that was killed, or beside a standby does not answer."""
        states = {
            one: namenode_state(one.plan.http) if one.is_running else None for one in self.namenodes
        }
        silent = [one for one, state in states.items() if state is None]
        serves = any(state and state.is_active for state in states.values())
        killed = [one for one in silent if not one.is_running]
        if killed:
            return killed[0]
        return silent[0] if len(silent) == 1 and not serves else None

    def _wait_until_serving(self, *, but: Daemon | None = None) -> None:
        running = [one for one in self._daemons if one.is_running and one is not but]
        startup.wait_until_serving(running, timeout_s=self._timeout_s)

    def _located(self, path: str) -> dict[str, Any]:
        """`path` may be a URL of this cluster."""
        answer = webhdfs(self.active.plan.http, urlsplit(path).path, "GET_BLOCK_LOCATIONS")
        located: dict[str, Any] = answer["LocatedBlocks"]
        return located
