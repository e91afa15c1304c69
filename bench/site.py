"""Site: what a measuring child process must know of the cluster, and how one is run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.samples import Sample
from weightyard.settings import Settings
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.cluster.configuration import write_site_files
from weightyard.testing.cluster.java import installed_java
from weightyard.testing.cluster.native import library_folder
from weightyard.testing.libhdfs import CannotBuild, build

_CHILD_TIMEOUT_S = 600


class ChildFailed(Exception):
    """A measuring process failed; says why."""


class Site(msgspec.Struct, frozen=True):
    """A running cluster and a folder for files, as told to child processes."""

    url: str
    namenode_http: str
    conf_dir: str
    datanode_pids: tuple[int, ...]
    datanodes: tuple[str, ...]
    """`host:port` blocks are read from."""
    scratch: str
    shell: tuple[str, ...]
    """The command that is `hdfs dfs`."""
    environment: dict[str, str]
    here: dict[str, str] | None = None
    """What else a child finds set that takes the short circuit; None: DataNodes have none."""
    libhdfs_missing: str | None = None
    """Why there is no libhdfs; None if there is."""

    @classmethod
    def of(cls, cluster: MiniCluster, scratch: Path) -> Site:
        settings = Settings()
        java = installed_java(settings)
        # As from another host: only rows about this one take the short circuit.
        conf_dir = scratch / "conf"
        elsewhere = {**cluster.client_properties, "dfs.client.read.shortcircuit": "false"}
        write_site_files(conf_dir, elsewhere)
        environment, here = _environment(conf_dir), _environment(cluster.conf_dir)
        missing = None
        try:
            libhdfs = build(settings)
            environment |= libhdfs.environment(conf_dir, java.jars)
            here |= libhdfs.environment(cluster.conf_dir, java.jars)
        except CannotBuild as why:
            missing = f"libhdfs could not be built: {why}"
        is_handed_out = "dfs.domain.socket.path" in cluster.client_properties
        if is_handed_out:
            here["LIBHDFS_OPTS"] = f"-Djava.library.path={library_folder(settings.cache)}"
        return cls(
            url=cluster.url,
            namenode_http=cluster.http_addresses[0],
            conf_dir=str(conf_dir),
            datanode_pids=tuple(one.identity.pid for one in cluster.datanodes),
            datanodes=tuple(one.plan.address for one in cluster.datanodes),
            scratch=str(scratch),
            shell=tuple(java.command("org.apache.hadoop.fs.FsShell", conf_dir)),
            environment=environment,
            here=here if is_handed_out else None,
            libhdfs_missing=missing,
        )

    def run_child(self, task: str, options: Mapping[str, Any], *, here: bool = False) -> Sample:
        """Run one task in a process of its own, so that rows do not disturb each other.

        `here`: it takes the short circuit. Raises ChildFailed.
        """
        if here and self.here is None:
            raise ChildFailed("DataNodes hand out no files: libhadoop could not be had")
        more = self.here if here and self.here is not None else {}
        request = msgspec.json.encode({"site": self, "task": task, "options": options})
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bench.worker"],
                input=request,
                capture_output=True,
                env={**os.environ, **self.environment, **more},
                timeout=_CHILD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"not done after {_CHILD_TIMEOUT_S} s") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise ChildFailed(said[-1][:300])
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Sample)


def _environment(conf_dir: Path) -> dict[str, str]:
    return {"HADOOP_CONF_DIR": str(conf_dir)}
