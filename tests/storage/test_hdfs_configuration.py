from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from weightyard.errors import BadSetting, StoreUnavailable
from weightyard.settings import Settings
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.native import Namespace
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.store import StorePath


def cluster(folder: Path, url: str, **properties: str) -> Cluster:
    xml = "".join(
        f"<property><name>{name.replace('__', '-')}</name><value> {value}\n</value></property>"
        for name, value in properties.items()
    )
    (folder / "core-site.xml").write_text("<?xml version='1.0'?><configuration/>")
    (folder / "hdfs-site.xml").write_text(f"<configuration>{xml}</configuration>")
    return Cluster.of(url, Settings(hadoop_conf_dir=folder, webhdfs=()))


def test_without_configuration_the_url_says_all() -> None:
    found = Cluster.of("hdfs://nn.example:8020/team/yard/", Settings(hadoop_conf_dir=None))
    assert found.url == "hdfs://nn.example:8020"
    assert found.webhdfs == ("http://nn.example:9870",)
    assert found.at(StorePath("packs/ab")) == "/team/yard/packs/ab"
    assert not found.is_kerberos
    assert not found.is_transfer_protected
    assert not found.uses_datanode_hostname


def test_a_nameservice_has_all_its_namenodes(tmp_path: Path) -> None:
    found = cluster(
        tmp_path,
        "hdfs://prod/yard",
        **{
            "dfs.ha.namenodes.prod": "a, b",
            "dfs.namenode.rpc__address.prod.a": "one:8020",
            "dfs.namenode.http__address.prod.a": "one:50070",
            "dfs.namenode.rpc__address.prod.b": "two:8020",
        },
    )
    assert found.webhdfs == ("http://one:50070", "http://two:9870")


@pytest.mark.parametrize("names", ["a, b", "a\n,b ,", "a\n      b"])
def test_hdfs_native_finds_every_namenode_however_the_files_are_laid_out(
    tmp_path: Path, names: str
) -> None:
    """As Hadoop does: of a list that it reads otherwise it would ask some NameNodes only."""
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        listening = (a, b)
        properties = {
            f"dfs.namenode.rpc__address.prod.{name}": f"127.0.0.1:{one.getsockname()[1]}"
            for name, one in zip("ab", listening, strict=True)
        }
        properties["dfs.ha.namenodes.prod"] = names
        found = cluster(tmp_path, "hdfs://prod/yard", **properties)
        assert len(found.namenodes) == 2
        with ThreadPoolExecutor(len(listening)) as threads:
            asked = [threads.submit(_hang_up_on_one, one) for one in listening]
            with (
                closing(Namespace(found, limit_s=5)) as namespace,
                pytest.raises(StoreUnavailable),
            ):
                namespace.status("/")
            assert all(one.result() for one in asked)


def _hang_up_on_one(listening: socket.socket) -> bool:
    """Whether somebody came."""
    listening.settimeout(5)
    try:
        listening.accept()[0].close()
    except TimeoutError:
        return False
    finally:
        listening.close()
    return True


def test_https_is_used_where_the_policy_says_so(tmp_path: Path) -> None:
    found = cluster(
        tmp_path,
        "hdfs:///yard",
        **{
            "fs.defaultFS": "hdfs://nn:8020",
            "dfs.http.policy": "HTTPS_ONLY",
            "dfs.namenode.http__address": "nn:1",
            "dfs.namenode.https__address": "0.0.0.0:9999",
        },
    )
    assert found.authority == "nn:8020"
    assert found.webhdfs == ("https://nn:9999",)


def test_the_http_address_of_another_cluster_is_not_used(tmp_path: Path) -> None:
    properties = {"fs.defaultFS": "hdfs://mine:8020", "dfs.namenode.http__address": "mine:1"}
    assert cluster(tmp_path, "hdfs://mine:8020/y", **properties).webhdfs == ("http://mine:1",)
    assert cluster(tmp_path, "hdfs://other:8020/y", **properties).webhdfs == ("http://other:9870",)


def test_settings_go_before_the_files(tmp_path: Path) -> None:
    settings = Settings(hadoop_conf_dir=tmp_path, webhdfs=("http://gw:14000",), hdfs_user="ann")
    found = Cluster.of("hdfs://nn:8020/yard", settings)
    assert found.webhdfs == ("http://gw:14000",)
    assert found.user == "ann"


def test_protection_of_transfers_and_kerberos_are_seen(tmp_path: Path) -> None:
    found = cluster(
        tmp_path,
        "hdfs://nn/yard",
        **{
            "hadoop.security.authentication": "kerberos",
            "dfs.data.transfer.protection": "privacy",
            "dfs.client.use.datanode.hostname": "true",
        },
    )
    assert found.is_kerberos
    assert found.is_transfer_protected
    assert found.uses_datanode_hostname


def test_a_viewfs_folder_is_looked_up_in_its_mount_table(tmp_path: Path) -> None:
    table = {
        "fs.viewfs.mounttable.all.link./data": "hdfs://one:8020/warehouse",
        "fs.viewfs.mounttable.all.link./data/ml": "hdfs://two:8020/ml",
        "fs.viewfs.mounttable.all.linkFallback": "hdfs://three:8020/",
    }
    for url, authority, root in (
        ("viewfs://all/data/ml/yard", "two:8020", "/ml/yard"),
        ("viewfs://all/data/x", "one:8020", "/warehouse/x"),
        ("viewfs://all/elsewhere", "three:8020", "/elsewhere"),
    ):
        found = cluster(tmp_path, url, **table)
        assert (found.authority, found.root) == (authority, root)
    with pytest.raises(BadSetting, match="mounted inside"):
        cluster(tmp_path, "viewfs://all/data", **table)
    with pytest.raises(BadSetting, match="no mount"):
        cluster(tmp_path, "viewfs://none/data", **table)


@pytest.mark.parametrize(
    "url",
    [
        "hdfs:///yard",
        "hdfs://nn/../etc",
        "hdfs://nn/a/./b",
        "hdfs://nn/a%2e%2e/b",
        "hdfs://nn/a#LATEST",
        "hdfs://nn/a?op=DELETE",
        "hdfs://nn/a b",
        "hdfs://us er@nn/a",
        "hdfs://nn;evil/a",
        "hdfs://[nn/a",
        "hdfs://nn:99999/a",
        "http://nn/a",
        "hdfs://nn/-rf",
    ],
)
def test_a_url_that_is_no_folder_of_a_cluster_is_refused(url: str) -> None:
    with pytest.raises(BadSetting):
        Cluster.of(url, Settings(hadoop_conf_dir=None))


@pytest.mark.parametrize("content", [b"<configuration>", b"\xff\xfe\0", b"", b"{}"])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "core-site.xml").write_bytes(content)
    with pytest.raises(BadSetting, match=r"core-site\.xml"):
        Cluster.of("hdfs://nn/a", Settings(hadoop_conf_dir=tmp_path))


@pytest.mark.parametrize("spelled", ["kerberos", "KERBEROS", "Kerberos"])
def test_kerberos_is_kerberos_however_it_is_spelled(tmp_path: Path, spelled: str) -> None:
    url, key = "hdfs://nn:8020/yard", "hadoop.security.authentication"
    assert cluster(tmp_path, url, **{key: spelled}).is_kerberos
    assert not cluster(tmp_path, url, **{key: "SIMPLE"}).is_kerberos


def test_what_a_property_takes_from_others_is_put_in(tmp_path: Path) -> None:
    found = cluster(
        tmp_path,
        "hdfs:///yard",
        **{
            "fs.defaultFS": "hdfs://${nn.host}:${nn.port}",
            "nn.host": "${nn.name}.example",
            "nn.name": "nn1",
            "nn.port": "8020",
            "of.nobody": "${no.such}",
        },
    )
    assert found.authority == "nn1.example:8020"
    assert found.properties["fs.defaultFS"].strip() == "hdfs://nn1.example:8020"
    assert found.properties["of.nobody"].strip() == "${no.such}"


@pytest.mark.parametrize("value", ["${one}", "${two}", "${one}${one}", "x${two}${two}" * 9])
def test_properties_that_take_from_each_other_without_end_are_bounded(
    tmp_path: Path, value: str
) -> None:
    with pytest.raises(BadSetting, match=r"one|two"):
        cluster(tmp_path, "hdfs://nn:8020/yard", one=value, two="${one}")


def configuration(*inside: str) -> str:
    space = "xmlns:xi='http://www.w3.org/2001/XInclude'"
    return f"<configuration {space}>{''.join(inside)}</configuration>"


def prop(name: str, value: str) -> str:
    return f"<property><name>{name}</name><value>{value}</value></property>"


def test_files_that_a_configuration_includes_are_read(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "core-site.xml").write_text(
        configuration(
            prop("fs.defaultFS", "hdfs://old:8020"),
            "<xi:include href='shared/cluster.xml'/>",
            "<xi:include href='none.xml'><xi:fallback>",
            prop("hadoop.security.authentication", "kerberos"),
            "</xi:fallback></xi:include>",
        )
    )
    (tmp_path / "shared" / "cluster.xml").write_text(
        configuration("<xi:include href='name.xml'/>", prop("name", "nn"))
    )
    (tmp_path / "shared" / "name.xml").write_text(
        configuration(prop("fs.defaultFS", "hdfs://${name}:8020"))
    )
    found = Cluster.of("hdfs:///yard", Settings(hadoop_conf_dir=tmp_path, webhdfs=()))
    assert found.authority == "nn:8020"
    assert found.is_kerberos


@pytest.mark.parametrize(
    ("href", "said"),
    [
        ("none.xml", "none.xml"),
        ("core-site.xml", "deep"),
        ("http://127.0.0.1:1/conf.xml", "http://127.0.0.1:1/conf.xml"),
        ("", "href"),
    ],
)
def test_what_cannot_be_included_is_refused_by_name(tmp_path: Path, href: str, said: str) -> None:
    include = f"<xi:include href='{href}'/>"
    (tmp_path / "core-site.xml").write_text(configuration(include, include))
    with pytest.raises(BadSetting, match=said):
        Cluster.of("hdfs://nn:8020/yard", Settings(hadoop_conf_dir=tmp_path))


@pytest.mark.parametrize("url", ["hdfs://nn:8020", "hdfs://nn:8020/"])
def test_the_root_of_hdfs_is_not_made_a_yard(url: str) -> None:
    with (
        HdfsStore(url, Settings(hadoop_conf_dir=None)) as store,
        pytest.raises(BadSetting, match="hdfs://nn:8020/weightyard"),
    ):
        store.init()
