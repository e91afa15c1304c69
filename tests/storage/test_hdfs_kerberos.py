"""A cluster that asks for Kerberos tickets and protects transfers with SASL."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save_file

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
namespace.make_folder(cluster.at(StorePath("packs")), 0o755)
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
from weightyard.doctor import examine
from weightyard.registry.check import check
from weightyard.registry.collect import GcOptions
url, folder = sys.argv[1], Path(sys.argv[2])
file = "model.safetensors"
with weightyard.open(url) as yard:
    yard.push(folder, "team/bert")
    pulled = yard.pull("team/bert", folder.parent / "pulled")
    is_same = (pulled / file).read_bytes() == (folder / file).read_bytes()
    loaded = yard.load("team/bert", verify="full")
    findings = [one.model_dump() for one in examine(url)]
    checked = check(yard.registry.database, yard.store, read_data=True)
    yard.delete("team/bert@v1")
    options = GcOptions(grace_s=0, unsafe_grace=True)
    collected = yard.registry.gc(yard.store, options).packs_deleted
ways = [*loaded.report.read_paths]
problems = [str(one) for one in checked.findings]
print(json.dumps([is_same, len(loaded), ways, findings, problems, collected]))
"""

AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from weightyard.settings import Settings
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.namenode import NameNode
namenode = NameNode(Cluster.of(sys.argv[1], Settings()))
together = Barrier(8)
def ask(_):
    together.wait()
    return namenode.clock_s(Deadline.after(20))
with ThreadPoolExecutor(8) as pool:
    print(len([*pool.map(ask, range(8))]))
"""

IN_TIME = """
import sys, time
from weightyard.errors import Retryable
from weightyard.settings import Settings
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.namenode import NameNode
from weightyard.storage.store import StorePath
namenode = NameNode(Cluster.of(sys.argv[1], Settings()))
began = time.monotonic()
try:
    namenode.locate(StorePath("packs/one"), Deadline.after(1))
except Retryable as why:
    print(time.monotonic() - began, why)
"""

CLI = "from weightyard.cli import main; import sys; sys.argv[:2] = ['weightyard']; main()"

needs_gssapi = pytest.mark.skipif(find_spec("gssapi") is None, reason="needs weightyard[kerberos]")


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
        timeout=150,
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
    done = run_script(kerberised, nobody(kdc.environment, tmp_path))
    assert done.returncode != 0
    assert "NotAllowed" in done.stderr
    assert "kinit" in done.stderr


@pytest.fixture(scope="module", params=[None, "privacy"], ids=["in-the-clear", "privacy"])
def strict(
    request: pytest.FixtureRequest, own_cluster: Callable[..., MiniCluster], kdc: Kdc
) -> Iterator[MiniCluster]:
    """An HDFS whose WebHDFS asks for tickets, too."""
    with own_cluster(
        racks=("a", "b"),
        block_tokens=True,
        properties={**kdc.properties(request.param), **kdc.web_properties},
        jvm_options=kdc.jvm_options,
    ) as cluster:
        yield cluster


@pytest.fixture
def alice(strict: MiniCluster, kdc: Kdc, tmp_path: Path) -> Mapping[str, str]:
    """The environment of someone with a keytab and a yard on that HDFS."""
    port = urlsplit(strict.http_addresses[0]).port
    return {
        **kdc.environment,
        "WEIGHTYARD_HOME": str(tmp_path / "home"),
        "WEIGHTYARD_STORE": strict.fresh_dir(),
        "WEIGHTYARD_WEBHDFS": f"http://localhost:{port}",  # by the name that has a key
    }


def nobody(environment: Mapping[str, str], tmp_path: Path) -> Mapping[str, str]:
    """The environment of someone without a ticket."""
    return {
        **environment,
        "KRB5_CLIENT_KTNAME": "FILE:/nonexistent",
        "KRB5CCNAME": f"FILE:{tmp_path}/none",
    }


def weightyard(
    cluster: MiniCluster, environment: Mapping[str, str], *arguments: str, code: int = 0
) -> Any:
    """What a command prints with --json; where it fails, what it says."""
    done = run_script(cluster, environment, CLI, *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def by_check(findings: Sequence[Mapping[str, str]]) -> Mapping[str, Mapping[str, str]]:
    return {one["check"]: one for one in findings}


@needs_gssapi
def test_with_a_ticket_a_model_goes_all_its_ways_where_webhdfs_asks_for_it_too(
    strict: MiniCluster, alice: Mapping[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    chance = np.random.default_rng(1)
    tensors = {f"{n}": chance.normal(0, 0.02, (64, 1024)).astype(np.float32) for n in range(8)}
    save_file(tensors, folder / "model.safetensors")
    done = run_script(strict, alice, STORY, str(folder))
    assert done.returncode == 0, done.stderr
    is_same, count, ways, told, problems, collected = json.loads(done.stdout)
    assert (is_same, count, problems, collected) == (True, 8, [], 1)

    found = by_check(told)
    assert not [one for one in told if one["state"] == "fail"]
    assert f"you are {USER}@" in found["kerberos"]["message"]
    assert f"you are {USER}@" in found["permissions"]["message"]
    is_protected = "dfs.data.transfer.protection" in strict.client_properties
    assert ways == ["hdfs-native" if is_protected else "direct"]
    assert found["read path"]["state"] == ("warn" if is_protected else "ok")
    assert "new files go by hdfs-native" in found["write path"]["message"]
    assert ("SASL" if is_protected else "Kerberos") in found["write path"]["message"]


@needs_gssapi
def test_without_a_ticket_every_command_says_how_to_get_one(
    strict: MiniCluster, alice: Mapping[str, str], tmp_path: Path
) -> None:
    found = by_check(weightyard(strict, nobody(alice, tmp_path), "doctor", code=1)["findings"])
    assert found["kerberos"]["state"] == "fail"
    assert "kinit" in found["kerberos"]["message"]
    assert "kinit" in weightyard(strict, nobody(alice, tmp_path), "ls", code=2)


@needs_gssapi
def test_a_server_without_a_key_is_named(strict: MiniCluster, alice: Mapping[str, str]) -> None:
    by_address = {**alice, "WEIGHTYARD_WEBHDFS": strict.http_addresses[0]}
    assert "127.0.0.1" in by_address["WEIGHTYARD_WEBHDFS"]
    found = by_check(weightyard(strict, by_address, "doctor", code=1)["findings"])
    assert found["hdfs"]["state"] == "ok"
    assert "HTTP/127.0.0.1 needs a key" in found["webhdfs"]["message"]


@needs_gssapi
def test_any_number_of_threads_log_in_at_once(
    strict: MiniCluster, alice: Mapping[str, str]
) -> None:
    done = run_script(strict, alice, AT_ONCE)
    assert done.stdout.strip() == "8", done.stderr


@needs_gssapi
def test_asking_where_a_file_lies_ends_in_time_though_the_kdc_says_nothing(
    strict: MiniCluster, alice: Mapping[str, str], kdc: Kdc, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        known = Path(kdc.environment["KRB5_CONFIG"]).read_text()
        told = tmp_path / "krb5.conf"
        told.write_text(
            re.sub(r"(\n *kdc = localhost):\d+", rf"\1:{silent.getsockname()[1]}", known)
        )
        asked = {**alice, "KRB5_CONFIG": str(told), "KRB5CCNAME": f"FILE:{tmp_path}/none"}
        done = run_script(strict, asked, IN_TIME)
    assert done.returncode == 0, done.stderr
    took_s, why = done.stdout.split(maxsplit=1)
    assert float(took_s) < 10
    assert "KDC" in why
