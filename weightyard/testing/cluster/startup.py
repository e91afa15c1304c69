"""Bringing a planned cluster up: format, start, wait until it serves."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weightyard.errors import ClusterFailed
from weightyard.testing.cluster.configuration import (
    ClusterPlan,
    DaemonPlan,
    DataNodePlan,
    NameNodePlan,
    client_properties,
    daemon_properties,
    write_daemon_configuration,
    write_site_files,
)
from weightyard.testing.cluster.daemon import ENVIRONMENT, Daemon, tail
from weightyard.testing.cluster.java import Java
from weightyard.testing.cluster.observed import POLL_S, namenode_state
from weightyard.testing.cluster.processes import Leash

TOOL_TIMEOUT_S = 120

_HA_ADMIN = "org.apache.hadoop.hdfs.tools.DFSHAAdmin"


def bring_up(
    plan: ClusterPlan,
    folder: Path,
    java: Java,
    leash: Leash,
    *,
    timeout_s: float,
    say: Callable[[str], None],
) -> tuple[Daemon, ...]:
    """Start every daemon of a new cluster in an empty folder; return when all serve.

    Raises ClusterFailed, with the log that says why.
    """
    write_site_files(folder / "conf", {**client_properties(plan), **plan.properties})
    daemons = tuple(_prepare(plan, one, folder / one.name, java, leash) for one in plan.daemons)
    say(f"starting {len(daemons)} daemons")
    try:
        _start_all(plan, daemons, java, timeout_s)
    except BaseException:
        for daemon in daemons:
            daemon.kill()
        raise
    return daemons


def _start_all(plan: ClusterPlan, daemons: Sequence[Daemon], java: Java, timeout_s: float) -> None:
    first, *others = (one for one in daemons if isinstance(one.plan, NameNodePlan))
    # A DataNode keeps asking until its NameNode answers, so all may start at once; the first
    # NameNode alone has something to wait for.
    for daemon in daemons:
        if daemon not in (first, *others):
            daemon.start()
    run_tool(first, java, NameNodePlan.main_class, "-format", "-nonInteractive")
    for other in others:
        # What `-bootstrapStandby` does over the network, without a JVM.
        shutil.copytree(first.folder / "name", other.folder / "name")
    for namenode in (first, *others):
        namenode.start()
    if plan.is_ha:
        _wait_for_answers(daemons, timeout_s)
        run_tool(first, java, _HA_ADMIN, "-transitionToActive", first.name)
    wait_until_serving(daemons, timeout_s=timeout_s)


def wait_until_serving(daemons: Sequence[Daemon], *, timeout_s: float) -> None:
    """Until one NameNode is active, none is in safe mode, and all DataNodes are live.

    Every daemon given has to run: leave out one that was killed on purpose.
    """
    namenodes = [one.plan.http for one in daemons if isinstance(one.plan, NameNodePlan)]
    live = sum(isinstance(one.plan, DataNodePlan) for one in daemons)

    def is_serving() -> bool:
        states = [namenode_state(http) for http in namenodes]
        return any(state and state.is_active for state in states) and all(
            state and state.live_datanodes >= live and not state.in_safe_mode for state in states
        )

    _wait(is_serving, daemons, f"{live} DataNodes live and safe mode off", timeout_s)


def fail_over(active: Daemon, standby: Daemon, java: Java) -> None:
    """Make the standby active, whether or not the active one still lives."""
    run_tool(standby, java, _HA_ADMIN, "-failover", "--forcefence", active.name, standby.name)


def run_tool(daemon: Daemon, java: Java, main_class: str, *arguments: str) -> None:
    """Run one of Hadoop's commands with a daemon's configuration."""
    log = daemon.folder / "tool.log"
    command = java.command(main_class, daemon.folder / "conf", *arguments)
    with log.open("ab") as output:
        process = daemon.leash.start(command, log=output, env=ENVIRONMENT, cwd=daemon.folder)
    what = f"{' '.join(arguments)} on {daemon.name}"
    try:
        code = process.wait(TOOL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ClusterFailed(f"{what} took over {TOOL_TIMEOUT_S} s:\n{tail(log)}") from None
    finally:
        process.kill()
        process.wait()
    if code:
        raise ClusterFailed(f"{what} failed:\n{tail(log)}")


def _prepare(plan: ClusterPlan, one: DaemonPlan, folder: Path, java: Java, leash: Leash) -> Daemon:
    configuration = folder / "conf"
    write_daemon_configuration(configuration, daemon_properties(plan, one, folder))
    return Daemon(one, folder, java.command(one.main_class, configuration), leash)


def _wait_for_answers(daemons: Sequence[Daemon], timeout_s: float) -> None:
    https = [one.plan.http for one in daemons if isinstance(one.plan, NameNodePlan)]
    _wait(lambda: all(map(namenode_state, https)), daemons, "the NameNodes answer", timeout_s)


def _wait(
    condition: Callable[[], bool], daemons: Sequence[Daemon], what: str, timeout_s: float
) -> None:
    """Poll, but do not wait for the dead: a daemon that ended is the reason, so show its log."""
    give_up = time.monotonic() + timeout_s
    while True:
        for daemon in daemons:
            if not daemon.is_running:
                raise ClusterFailed(f"{daemon.name} ended:\n{daemon.log_tail()}")
        if condition():
            return
        if time.monotonic() > give_up:
            raise ClusterFailed(f"{what}: not so after {timeout_s:.0f} s\n{daemons[0].log_tail()}")
        time.sleep(POLL_S)
