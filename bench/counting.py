"""What the daemons of an HDFS counted: calls to the NameNode, bytes the DataNodes sent."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

PROMETHEUS = {"hadoop.prometheus.endpoint.enabled": "true"}
"""What a cluster is told so that it shows what it counted as soon as it did."""

_SETTLES_S = 0.3
"""A call is counted just after it was answered."""

_CACHED_S = 11.0
"""Where there is no Prometheus there is JMX, which answers from a cache of ten seconds."""

_NOT_CLIENTS = (
    "SendHeartbeat",
    "BlockReport",
    "BlockReceivedAndDeleted",
    "RegisterDatanode",
    "VersionRequest",
    "Overall",  # all methods again, over a longer time
)

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Counted(msgspec.Struct, frozen=True):
    """Since the daemons began."""

    calls: dict[str, int]
    """To the NameNode, by method; those of DataNodes are left out."""
    sent_bytes: int
    """To readers, by all DataNodes."""

    def since(self, before: Counted) -> Counted:
        calls = Counter(self.calls)
        calls.subtract(before.calls)
        return Counted(
            {method: count for method, count in calls.items() if count},
            self.sent_bytes - before.sent_bytes,
        )


def count(namenode_http: str) -> Counted:
    """What was counted up to now, when that shows."""
    time.sleep(_SETTLES_S)
    address = urllib.parse.urlsplit(namenode_http).netloc or namenode_http
    calls: dict[str, int] = {}
    for name, value in _metrics(address, "rpcdetailed", "RpcDetailedActivityForPort*").items():
        method = name.removesuffix("NumOps")
        if method == name or method.startswith(_NOT_CLIENTS) or method.endswith("Exception"):
            continue
        calls["by HTTP" if method.lower().strip("()") == "external" else method] = value
    (info,) = _beans(address, "NameNodeInfo")
    sent = 0
    for transfer, node in json.loads(info["LiveNodes"]).items():
        # Its HTTP port is known, but not on which of this machine's addresses it listens.
        http = f"{transfer.rpartition(':')[0]}:{node['infoAddr'].rpartition(':')[2]}"
        sent += _metrics(http, "datanode", "DataNodeActivity*")["BytesRead"]
    return Counted(calls, sent)


def _metrics(address: str, record: str, bean: str) -> dict[str, int]:
    """A daemon's counters by their names in JMX."""
    try:
        text = _got(f"http://{address}/prom").decode()
    except urllib.error.HTTPError:  # it has no Prometheus
        time.sleep(_CACHED_S)
        return {name: value for one in _beans(address, bean) for name, value in one.items()}
    shown = re.findall(rf"^{record}_(\w+)\{{.*\}} (\d+)$", text, re.MULTILINE)
    return {name.title().replace("_", ""): int(value) for name, value in shown}


def _beans(address: str, name: str) -> list[Mapping[str, Any]]:
    query = urllib.parse.urlencode({"qry": f"Hadoop:service=*,name={name}"})
    beans: list[Mapping[str, Any]] = json.loads(_got(f"http://{address}/jmx?{query}"))["beans"]
    return beans


def _got(url: str) -> bytes:
    with _OPENER.open(url, timeout=10) as answer:
        data: bytes = answer.read()
        return data
