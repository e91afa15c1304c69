"""Clusters on which a DataNode's bytes are not for everyone: direct reads give way, and say so."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from over_webhdfs import ask, create

from weightyard.doctor import examine
from weightyard.errors import Unsupported
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.retry import RetryingStore
from weightyard.storage.store import FileOptions, Read, ReadPath, StorePath
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.cluster.configuration import client_properties, write_site_files
from weightyard.testing.cluster.java import installed_java
from weightyard.testing.cluster.startup import run_tool
from weightyard.testing.store_contract import put

pytestmark = pytest.mark.cluster

CONTENT = os.urandom(3 << 20)
ENCRYPTED = "dfs.encrypt.data.transfer"


@pytest.fixture(params=["knows", "does not know"])
def settings(
    request: pytest.FixtureRequest, encrypted_cluster: MiniCluster, tmp_path: Path
) -> Settings:
    """Of a client whose configuration says that transfers are encrypted, and of one without."""
    properties = dict(encrypted_cluster.client_properties)
    assert properties[ENCRYPTED] == "true"
    if request.param == "does not know":
        del properties[ENCRYPTED]
    write_site_files(tmp_path / "conf", properties)
    return Settings(
        hadoop_conf_dir=tmp_path / "conf", hadoop_home=None, libhdfs_dir=None, home=tmp_path
    )


@pytest.fixture
def store(encrypted_cluster: MiniCluster, settings: Settings) -> Iterator[HdfsStore]:
    with HdfsStore(encrypted_cluster.fresh_dir(), settings) as store:
        store.init()
        yield store


def test_where_transfers_are_encrypted_another_way_serves_and_says_its_name(
    store: HdfsStore,
) -> None:
    location = store.locate(put(RetryingStore(store), CONTENT, FileOptions(replication=1)))
    for replica in (None, location.spans[0].replicas[0]):
        out = bytearray(len(CONTENT))
        served = store.read(location, [Read(0, memoryview(out))], replica=replica)
        assert served.path == ReadPath.NATIVE
        assert out == CONTENT


def test_a_probe_says_that_encryption_stands_in_the_way(store: HdfsStore) -> None:
    found = store.probe().ways
    works = {way for way, why_not in found.items() if why_not is None}
    assert works == {ReadPath.NATIVE, ReadPath.WEBHDFS}
    assert "SASL or encryption" in (found[ReadPath.DIRECT] or "")


def test_doctor_names_encryption_whether_or_not_the_client_knows(
    store: HdfsStore, settings: Settings
) -> None:
    findings = {finding.check: finding for finding in examine(store.url, settings=settings)}
    assert findings["encryption"].state == "warn"
    assert "SASL or encryption" in findings["encryption"].message
    assert findings["read path"].state == "warn", findings["read path"].message
    assert "reads go by hdfs-native, not directly" in findings["read path"].message
    assert findings["write path"].state == "warn"
    assert "encrypt" in findings["write path"].message


@pytest.fixture(scope="module")
def zone_cluster(
    own_cluster: Callable[..., MiniCluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MiniCluster]:
    """An HDFS with a key, for encryption zones. Its keys are in a file instead of a KMS."""
    folder = tmp_path_factory.mktemp("keys")
    properties = {"hadoop.security.key.provider.path": f"jceks://file{folder}/keys.jceks"}
    write_site_files(folder / "conf", properties)
    create_key = installed_java(Settings()).command(
        "org.apache.hadoop.crypto.key.KeyShell", folder / "conf", "create", "key", "-size", "128"
    )
    subprocess.run(create_key, check=True, capture_output=True, timeout=120)
    with own_cluster(racks=("a",), properties=properties) as cluster:
        yield cluster


def test_in_an_encryption_zone_no_ciphertext_is_handed_out_and_doctor_says_why(
    zone_cluster: MiniCluster, tmp_path: Path
) -> None:
    # hdfs-native knows keys of a KMS only, and no client needs them to read by WebHDFS.
    write_site_files(tmp_path / "conf", client_properties(zone_cluster.plan))
    settings = Settings(
        hadoop_conf_dir=tmp_path / "conf", hadoop_home=None, libhdfs_dir=None, home=tmp_path
    )
    url = zone_cluster.fresh_dir()
    root = urlsplit(url).path
    make_zone(zone_cluster, root)
    with HdfsStore(url, settings) as store:
        store.init()
        create(zone_cluster, f"{root}/packs/file", CONTENT)
        (file,) = zone_cluster.replica_files(f"{root}/packs/file")
        assert file.path.read_bytes() != CONTENT
        location = store.locate(StorePath("packs/file"))
        assert [span.access for span in location.spans] == [None]
        out = bytearray(len(CONTENT))
        assert store.read(location, [Read(0, memoryview(out))]).path == ReadPath.WEBHDFS
        assert out == CONTENT
        with pytest.raises(Unsupported, match="encryption"):
            put(store, CONTENT)
        assert list(store.list(StorePath("staging"))) == []
    findings = {finding.check: finding for finding in examine(url, settings=settings)}
    assert "encryption zone" in findings["encryption"].message
    assert store.why_not_written_directly() is not None


def make_zone(cluster: MiniCluster, path: str) -> None:
    ask(cluster, "PUT", path, op="MKDIRS")
    (namenode,) = cluster.namenodes
    run_tool(
        namenode,
        installed_java(Settings()),
        "org.apache.hadoop.hdfs.tools.CryptoAdmin",
        *("-createZone", "-keyName", "key", "-path", path),
    )
