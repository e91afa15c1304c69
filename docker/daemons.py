"""The daemons of the compose cluster, set up by the configuration the mini cluster uses.

daemons.py namenode | datanode1 | …   become this daemon
daemons.py check                      exit 0 if the cluster serves
daemons.py configure FOLDER           write a client's core-site.xml and hdfs-site.xml
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from weightyard.settings import Settings
from weightyard.testing.cluster.configuration import (
    DEFAULT_RACKS,
    ClusterPlan,
    DataNodePlan,
    NameNodePlan,
    client_properties,
    daemon_properties,
    write_daemon_configuration,
    write_site_files,
)
from weightyard.testing.cluster.daemon import ENVIRONMENT
from weightyard.testing.cluster.java import installed_java
from weightyard.testing.cluster.observed import namenode_state

DATA = Path("/data")

PLAN = ClusterPlan(
    namenodes=(NameNodePlan("namenode", "namenode", rpc_port=8020, http_port=9870),),
    datanodes=tuple(
        DataNodePlan(
            f"datanode{n}",
            f"datanode{n}",
            f"/rack-{rack}",
            transfer_port=9866,
            ipc_port=9867,
            http_port=9864,
        )
        for n, rack in enumerate(DEFAULT_RACKS, 1)
    ),
)


def become(name: str) -> None:
    """Turn this process into a daemon; a new NameNode is formatted first."""
    daemon = {one.name: one for one in PLAN.daemons}[name]
    configuration = DATA / "conf"
    write_daemon_configuration(configuration, daemon_properties(PLAN, daemon, DATA))
    java = installed_java(Settings(), say=print)
    if isinstance(daemon, NameNodePlan) and not (DATA / "name").exists():
        command = java.command(daemon.main_class, configuration, "-format", "-nonInteractive")
        subprocess.run(command, env=ENVIRONMENT, check=True)
    command = java.command(daemon.main_class, configuration)
    os.execve(command[0], command, ENVIRONMENT)


def is_serving() -> bool:
    state = namenode_state(PLAN.namenodes[0].http)
    return (
        state is not None and state.live_datanodes == len(PLAN.datanodes) and not state.in_safe_mode
    )


match sys.argv[1:]:
    case ["check"]:
        sys.exit(not is_serving())
    case ["configure", folder]:
        write_site_files(Path(folder), client_properties(PLAN))
    case [name] if name in {one.name for one in PLAN.daemons}:
        become(name)
    case _:
        sys.exit(__doc__)
