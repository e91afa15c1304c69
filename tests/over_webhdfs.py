"""What tests ask of a NameNode by WebHDFS, past weightyard."""

from __future__ import annotations

import json
import urllib.request
from urllib.parse import urlencode, urlsplit

from weightyard.settings import Settings
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.testing.cluster import MiniCluster

LIMIT_S = 60.0


def ask(cluster: MiniCluster, method: str, url: str, **query: object) -> dict[str, object]:
    """What it answers about a file or folder, whose `hdfs://` URL or path this is."""
    user = Cluster.of(f"{cluster.url}/", Settings(hadoop_conf_dir=cluster.conf_dir)).user
    asked = urlencode({"user.name": user, **query})
    where = f"{cluster.http_addresses[0]}/webhdfs/v1{urlsplit(url).path}?{asked}"
    return dict(json.loads(_send(method, where) or b"{}"))


def create(cluster: MiniCluster, path: str, content: bytes) -> None:
    """Have a DataNode write a file."""
    told = ask(cluster, "PUT", path, op="CREATE", noredirect="true")
    _send("PUT", str(told["Location"]), content)


def _send(method: str, url: str, content: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, method=method, data=content)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return bytes(answer.read())
