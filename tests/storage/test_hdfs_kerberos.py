"""A cluster that asks for Kerberos tickets and protects transfers with SASL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from ctypes.util import find_library
from pathlib import Path

import pytest

from weightyard.testing.cluster import MiniCluster
from weightyard.testing.cluster.kdc import USER, Kdc, running_kdc

pytestmark = [pytest.mark.cluster, pytest.mark.long]

# WebHDFS by ticket needs SPNEGO, for which there is no wheel; this cluster's takes one's word. Its
# RPC and its DataNodes do not.
SCRIPT = """
import dataclasses, json, sys
from weightyard.errors import DataNodeFailed
from weightyard.settings import Settings
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.storage.hdfs.fallbacks import NativeReads
from weightyard.storage.hdfs.namenode import NameNode
from weightyard.storage.hdfs.native import Namespace
from weightyard.storage.store import Read, StorePath
content = bytes(range(251)) * 10_000
path = StorePath("packs/one")
cluster = Cluster.of(sys.argv[1], Settings())
assert cluster.is_kerberos and cluster.is_transfer_protected
namespace = Namespace(cluster, limit_s=20)
writing = namespace.create(cluster.at(path), 0o755, 1, len(content))
writing.write(content)
writing.close()
simple = dataclasses.replace(cluster, is_kerberos=False, user="alice")
location = NameNode(simple).locate(path, Deadline.after(20))
out = bytearray(len(content))
NativeReads(cluster, namespace).read(location, [Read(0, memoryview(out))], Deadline.after(20))
(span,) = location.spans
try:
    one_byte = Read(0, memoryview(bytearray(1)))
    DataNodeReader("test").read(span.replicas[0], span, [one_byte], Deadline.after(20))
    refused = ""
except DataNodeFailed as why:
    refused = str(why)
print(json.dumps([out == content, namespace.status(cluster.at(path)).owner, refused]))
"""


@pytest.fixture(scope="module")
def kdc() -> Iterator[Kdc]:
    if find_library("gssapi_krb5") is None:
        pytest.skip("needs MIT's libgssapi_krb5")
    with running_kdc() as started:
        yield started


@pytest.fixture(scope="module", params=["authentication", "integrity", "privacy"])
def kerberised(
    request: pytest.FixtureRequest, own_cluster: Callable[..., MiniCluster], kdc: Kdc
) -> Iterator[MiniCluster]:
    """An HDFS that asks for tickets. One DataNode, which wants SASL of the strength named."""
    with own_cluster(
        racks=("a",),
        block_tokens=True,
        properties=kdc.properties(request.param),
        jvm_options=kdc.jvm_options,
    ) as cluster:
        yield cluster


def run_script(
    cluster: MiniCluster, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    known = {"PATH": os.environ["PATH"], "HADOOP_CONF_DIR": str(cluster.conf_dir)}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, cluster.fresh_dir()],
        env={**known, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_with_a_ticket_hdfs_native_writes_and_reads_and_a_direct_read_is_refused(
    kerberised: MiniCluster, kdc: Kdc
) -> None:
    done = run_script(kerberised, kdc.environment)
    assert done.returncode == 0, done.stderr
    is_same, owner, refused = json.loads(done.stdout)
    assert (is_same, owner) == (True, USER)
    assert "SASL or encryption" in refused


def test_without_a_ticket_the_error_says_how_to_get_one(
    kerberised: MiniCluster, kdc: Kdc, tmp_path: Path
) -> None:
    nothing = {"KRB5_CLIENT_KTNAME": "FILE:/nonexistent", "KRB5CCNAME": f"FILE:{tmp_path}/none"}
    done = run_script(kerberised, {**kdc.environment, **nothing})
    assert done.returncode != 0
    assert "NotAllowed" in done.stderr
    assert "kinit" in done.stderr
