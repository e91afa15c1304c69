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
from weightyard.testing.cluster.java import installed_java
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
    libhdfs_missing: str | None = None
    """Why there is no libhdfs; None if there is."""

    @classmethod
    def of(cls, cluster: MiniCluster, scratch: Path) -> Site:
        settings = Settings()
        java = installed_java(settings)
        environment = {"HADOOP_CONF_DIR": str(cluster.conf_dir)}
        missing = None
        try:
            environment |= build(settings).environment(cluster.conf_dir, java.jars)
        except CannotBuild as why:
            missing = f"libhdfs could not be built: {why}"
        return cls(
            url=cluster.url,
            namenode_http=cluster.http_addresses[0],
            conf_dir=str(cluster.conf_dir),
            datanode_pids=tuple(one.identity.pid for one in cluster.datanodes),
            datanodes=tuple(one.plan.address for one in cluster.datanodes),
            scratch=str(scratch),
            shell=tuple(java.command("org.apache.hadoop.fs.FsShell", cluster.conf_dir)),
            environment=environment,
            libhdfs_missing=missing,
        )

    def run_child(self, task: str, options: Mapping[str, Any]) -> Sample:
        """Run one task in a process of its own, so that rows do not disturb each other.

        Raises ChildFailed.
        """
        request = msgspec.json.encode({"site": self, "task": task, "options": options})
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bench.worker"],
                input=request,
                capture_output=True,
                env={**os.environ, **self.environment},
                timeout=_CHILD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"not done after {_CHILD_TIMEOUT_S} s") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise ChildFailed(said[-1][:300])
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Sample)
