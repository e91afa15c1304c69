"""A cluster that asks for Kerberos tickets and protects transfers with SASL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from weightyard.testing.cluster import MiniCluster
from weightyard.testing.cluster.kdc import USER, Kdc, running_kdc

pytestmark = [pytest.mark.cluster, pytest.mark.long]

# There is no wheel of what WebHDFS by ticket takes: that of these clusters believes what one says.
# Their RPC and their DataNodes do not.
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

STORY = """
import json, sys
from pathlib import Path
import weightyard
from weightyard.storage.opening import open_store
url, folder = sys.argv[1], Path(sys.argv[2])
with weightyard.open(url) as yard:
    pushed = yard.push(folder, "team/bert", alias="prod", replication=1, policy="HOT")
    pulled = yard.pull("team/bert@prod", folder.parent / "pulled")
    is_same = (pulled / "weights.bin").read_bytes() == (folder / "weights.bin").read_bytes()
with open_store(url, patient=False) as store:
    ways = {str(way): why for way, why in store.probe().items()}
print(json.dumps([pushed.ref, is_same, ways]))
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
    cluster: MiniCluster, environment: Mapping[str, str], script: str = SCRIPT, *arguments: str
) -> subprocess.CompletedProcess[str]:
    known = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    known["HADOOP_CONF_DIR"] = str(cluster.conf_dir)
    return subprocess.run(
        [sys.executable, "-c", script, cluster.fresh_dir(), *arguments],
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


@pytest.mark.skipif(find_spec("requests_kerberos") is None, reason="needs weightyard[kerberos]")
def test_with_a_ticket_a_model_is_pushed_and_pulled_where_webhdfs_asks_for_it_too(
    own_cluster: Callable[..., MiniCluster], kdc: Kdc, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(range(251)) * 10_000)
    with own_cluster(
        racks=("a",),
        block_tokens=True,
        properties={**kdc.properties(), **kdc.web_properties},
        jvm_options=kdc.jvm_options,
    ) as cluster:
        port = urlsplit(cluster.http_addresses[0]).port
        environment = {
            **kdc.environment,
            "WEIGHTYARD_HOME": str(tmp_path / "home"),
            "WEIGHTYARD_WEBHDFS": f"http://localhost:{port}",  # by the name that has a key
        }
        done = run_script(cluster, environment, STORY, str(folder))
        assert done.returncode == 0, done.stderr
        ref, is_same, ways = json.loads(done.stdout)
        assert (ref, is_same) == ("team/bert@v1", True)
        assert ways["hdfs-native"] is None
        assert ways["webhdfs"] is None
        assert "SASL" in ways["direct"]
