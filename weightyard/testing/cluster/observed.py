"""What the daemons say about themselves over HTTP."""

from __future__ import annotations

import getpass
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weightyard.errors import ClusterFailed

POLL_S = 0.1

# A proxy of the environment is not for loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class NameNodeState:
    """A NameNode as its JMX shows it."""

    live_datanodes: int
    in_safe_mode: bool
    is_active: bool


def namenode_state(http: str) -> NameNodeState | None:
    """What a NameNode says of itself; None while it does not answer."""
    namesystem = _bean(http, "Hadoop:service=NameNode,name=FSNamesystemState")
    if namesystem is None:
        return None
    status = _bean(http, "Hadoop:service=NameNode,name=NameNodeStatus")
    if status is None:
        return None
    return NameNodeState(
        live_datanodes=namesystem["NumLiveDataNodes"],
        in_safe_mode=namesystem["FSState"] != "Operational",
        is_active=status["State"] == "active",
    )


def live_datanodes(http: str) -> dict[str, int] | None:
    """The DataNodes a NameNode holds to be alive, by `host:transfer port`: how many blocks.

    None while it does not answer.
    """
    info = _bean(http, "Hadoop:service=NameNode,name=NameNodeInfo")
    if info is None:
        return None
    nodes: dict[str, dict[str, Any]] = json.loads(info.get("LiveNodes") or "{}")
    return {address: node["numBlocks"] for address, node in nodes.items()}


def served_blocks(http: str) -> int | None:
    """How many blocks a DataNode holds; None unless it is registered with every NameNode."""
    # While it starts, its bean is there with parts of it missing.
    info = _bean(http, "Hadoop:service=DataNode,name=DataNodeInfo") or {}
    actors: list[dict[str, str]] = json.loads(info.get("BPServiceActorInfo") or "[]")
    volumes: dict[str, dict[str, int]] = json.loads(info.get("VolumeInfo") or "{}")
    if not actors or any(one["ActorState"] != "RUNNING" for one in actors):
        return None
    return sum(volume["numBlocks"] for volume in volumes.values())


def webhdfs(http: str, path: str, operation: str) -> dict[str, Any]:
    """The JSON answer to a WebHDFS GET, asked as the user the cluster runs as."""
    query = urllib.parse.urlencode({"op": operation, "user.name": getpass.getuser()})
    url = f"http://{http}/webhdfs/v1{urllib.parse.quote(path)}?{query}"
    try:
        with _OPENER.open(url, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as why:
        with why:
            raise ClusterFailed(f"{operation} {path}: {why.read(2000).decode()}") from None
    except OSError as why:
        raise ClusterFailed(f"{operation} {path}: {http} does not answer: {why}") from None


def wait_until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Poll until a condition holds. Raises ClusterFailed, naming it, when time is up."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise ClusterFailed(f"{what}: not so after {timeout_s:.0f} s")
        time.sleep(POLL_S)


def _bean(http: str, name: str) -> dict[str, Any] | None:
    url = f"http://{http}/jmx?{urllib.parse.urlencode({'qry': name})}"
    try:
        with _OPENER.open(url, timeout=2) as answer:
            beans = json.load(answer)["beans"]
    except (OSError, ValueError):
        return None
    return beans[0] if beans else None
