"""WebHDFS by HTTPS: locations, attributes and bytes, from daemons that are trusted or not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightyard.errors import NotAllowed
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.store import FileOptions, Read, ReadPath
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.cluster.configuration import LOOPBACK, write_site_files
from weightyard.testing.cluster.java import QUICK_START
from weightyard.testing.store_contract import put

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl"),
]

CONTENT = os.urandom(3 << 20)
PASSWORD = "only for tests"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for loopback, and what Hadoop's daemons read of it."""
    folder = tmp_path_factory.mktemp("keys")
    names = ",".join(f"IP:{address}" for address in LOOPBACK[:2])
    made = ["-out", "certificate.pem", "-keyout", "key.pem", "-addext", f"subjectAltName={names}"]
    packed = ["-in", "certificate.pem", "-inkey", "key.pem", "-out", "keys.p12"]
    for command in (
        ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=weightyard", *made],
        ["pkcs12", "-export", *packed, "-passout", f"pass:{PASSWORD}"],
    ):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
    store = {"location": str(folder / "keys.p12"), "type": "pkcs12", "password": PASSWORD}
    properties = {f"ssl.server.keystore.{name}": value for name, value in store.items()}
    write_site_files(folder, {**properties, "ssl.server.keystore.keypassword": PASSWORD})
    (folder / "core-site.xml").rename(folder / "ssl-server.xml")
    (folder / "hdfs-site.xml").unlink()
    return folder


@pytest.fixture(scope="module")
def https_cluster(own_cluster: Callable[..., MiniCluster], keys: Path) -> Iterator[MiniCluster]:
    """Daemons that speak HTTPS, too; the cluster itself looks after them by HTTP."""
    host, datanode, *_ = LOOPBACK
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    properties = {
        "dfs.http.policy": "HTTP_AND_HTTPS",
        "dfs.namenode.https-address": f"{host}:{port}",
        "dfs.datanode.https.address": f"{datanode}:0",
    }
    # Daemons look for ssl-server.xml on their class path.
    options = (*QUICK_START, f"-Xbootclasspath/a:{keys}")
    with own_cluster(racks=("a",), properties=properties, jvm_options=options) as cluster:
        yield cluster


@pytest.fixture
def settings(https_cluster: MiniCluster, tmp_path: Path) -> Settings:
    properties = {**https_cluster.client_properties, "dfs.http.policy": "HTTPS_ONLY"}
    write_site_files(tmp_path / "conf", properties)
    return Settings(hadoop_conf_dir=tmp_path / "conf", hadoop_home=None, libhdfs_dir=None)


def test_where_the_policy_says_so_all_that_webhdfs_does_is_done_by_https(
    https_cluster: MiniCluster, settings: Settings, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(keys / "certificate.pem"))
    url = https_cluster.fresh_dir()
    with HdfsStore(url, settings, read_paths=[ReadPath.WEBHDFS]) as store:
        store.init()
        path = put(store, CONTENT, FileOptions(replication=1, policy="HOT"))
        location = store.locate(path)
        assert [one.host for one in location.spans[0].replicas] == [LOOPBACK[1]]
        out = bytearray(len(CONTENT))
        served = store.read(location, [Read(0, memoryview(out))])
        assert (served.path, bytes(out)) == (ReadPath.WEBHDFS, CONTENT)


def test_a_namenode_whose_certificate_is_not_trusted_is_asked_nothing(
    https_cluster: MiniCluster, settings: Settings
) -> None:
    with HdfsStore(https_cluster.fresh_dir(), settings) as store:
        store.init()  # by RPC
        path = put(store, CONTENT)
        with pytest.raises(NotAllowed, match=r"certificate .* SSL_CERT_FILE"):
            store.locate(path)
