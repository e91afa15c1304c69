"""The command line on a real HDFS, as a new user would try it."""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hdfs_native
import pytest
from cli_runs import Cli
from hdfs_native import WriteOptions
from patience import be_patient
from service_world import served
from sqlalchemy import insert

import weightyard
from weightyard.errors import Conflict
from weightyard.names import FilePath, TokenName
from weightyard.records import Role
from weightyard.registry import migrate, schema
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.service.app import create_app
from weightyard.service.serving import open_service
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.hdfs.tree import HdfsTree
from weightyard.storage.opening import open_store
from weightyard.storage.store import Location, ReadPath, StorePath
from weightyard.testing.cluster import MiniCluster, damage
from weightyard.testing.cluster.startup import run_tool

pytestmark = pytest.mark.cluster

BERT = "team/bert"
LIMIT_S = 120.0
_ADMIN = "org.apache.hadoop.hdfs.tools.DFSAdmin"


@pytest.fixture
def hdfs(cli: Cli, cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Commands on a fresh yard in HDFS, set up by the environment alone."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(cluster.conf_dir))
    monkeypatch.setenv("WEIGHTYARD_STORE", f"{cluster.fresh_dir()}/yard")
    monkeypatch.setenv("WEIGHTYARD_DEADLINE_S", "30")
    return cli


@pytest.fixture
def whole_files(cluster: MiniCluster, base: Path) -> str:
    """A model as teams keep it: whole files in a folder of HDFS, with names as they come."""
    url = cluster.fresh_dir()
    _put(cluster, f"{url}/model.safetensors", (base / "model.safetensors").read_bytes())
    _put(cluster, f"{url}/config.json", (base / "config.json").read_bytes())
    _put(cluster, f"{url}/sub dir/_odd name=1%20+.bin", os.urandom(3 << 20))
    _put(cluster, f"{url}/_SUCCESS", b"")
    return url


def _client(cluster: MiniCluster) -> hdfs_native.Client:
    return hdfs_native.Client(cluster.url, dict(cluster.client_properties))


def _put(cluster: MiniCluster, url: str, content: bytes) -> None:
    options = WriteOptions(overwrite=True, create_parent=True, block_size=1 << 20)
    with _client(cluster).create(urlsplit(url).path, options) as file:
        file.write(content)


def _wait_for_copies(cluster: MiniCluster) -> None:
    """A push waits for two DataNodes; that a third has its copy, the NameNode may learn later."""
    root = urlsplit(os.environ["WEIGHTYARD_STORE"]).path
    for folder in ("packs", "manifests"):
        for file in _client(cluster).list_status(f"{root}/{folder}", recursive=True):
            if not file.isdir:
                cluster.wait_for_replication(file.path, 3, LIMIT_S)


def test_the_story_of_the_readme_works_on_hdfs(
    hdfs: Cli, cluster: MiniCluster, base: Path, tuned: Path, tmp_path: Path
) -> None:
    hdfs.ok("push", base, BERT, "--alias", "prod", "-m", "first try")
    pushed = hdfs.json("push", tuned, BERT, "--parent", f"{BERT}@prod")
    assert 0 < pushed["new_bytes"] < pushed["logical_bytes"]
    assert hdfs.json("diff", f"{BERT}@v1", f"{BERT}@v2")["tensors_changed"]
    hdfs.ok("alias", "set", BERT, "prod", "v2")
    hdfs.ok("pull", f"{BERT}@prod", tmp_path / "out")
    names = ["config.json", "model.safetensors"]
    assert filecmp.cmpfiles(tuned, tmp_path / "out", names, shallow=False)[0] == names
    hdfs.ok("alias", "rollback", BERT, "prod")
    hdfs.ok("rm", f"{BERT}@v2", "--yes")
    hdfs.ok("gc", "--grace", "0s", "--unsafe-grace")
    _wait_for_copies(cluster)
    checked = hdfs.json("check", "--read-data")
    assert checked["clean"]
    assert checked["read_bytes"] > checked["stored_bytes"]  # more than one replica


def test_the_same_by_a_service_on_hdfs_and_postgresql(
    hdfs: Cli,
    base: Path,
    tuned: Path,
    tmp_path: Path,
    postgres: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, database = os.environ["WEIGHTYARD_STORE"], postgres()
    monkeypatch.setenv("WEIGHTYARD_DB", database)
    secret = hdfs.ok("token", "create", "story", "--role", "admin", "-q").strip()
    monkeypatch.delenv("WEIGHTYARD_DB")
    monkeypatch.delenv("WEIGHTYARD_STORE")
    with serving(hdfs, tmp_path / "log", "--store", store, "--db", database) as url:
        monkeypatch.setenv("WEIGHTYARD_URL", url)
        monkeypatch.setenv("WEIGHTYARD_TOKEN", secret)
        hdfs.ok("push", base, BERT, "--alias", "prod", "-m", "first try")
        pushed = hdfs.json("push", tuned, BERT, "--parent", f"{BERT}@prod")
        assert 0 < pushed["new_bytes"] < pushed["logical_bytes"]
        assert BERT in hdfs.ok("ls")
        changed = hdfs.json("diff", f"{BERT}@v1", f"{BERT}@v2")
        assert changed["tensors_changed"] == ["model.safetensors:head"]
        hdfs.ok("alias", "set", BERT, "prod", "v2", "--reason", "better")
        assert pulled_as(hdfs, tmp_path / "new", tuned)
        hdfs.ok("alias", "rollback", BERT, "prod")
        assert pulled_as(hdfs, tmp_path / "old", base)
        shown = hdfs.json("show", f"{BERT}@prod", "--tensors")
        assert (shown["number"], shown["message"], shown["author"]) == (1, "first try", "story")
        assert {one["name"] for one in shown["content"]["tensors"]} == {"trunk", "head"}


def pulled_as(hdfs: Cli, into: Path, model: Path) -> bool:
    """Whether @prod is these files, to the byte."""
    hdfs.ok("pull", f"{BERT}@prod", into)
    names = sorted(file.name for file in into.iterdir())
    assert names == sorted(file.name for file in model.iterdir())
    return filecmp.cmpfiles(model, into, names, shallow=False)[0] == names


@contextmanager
def serving(cli: Cli, log: Path, *options: str) -> Iterator[str]:
    """The service as a process of its own."""
    with log.open("wb") as out:
        process = subprocess.Popen(cli.command("serve", "--port", "0", *options), stderr=out)
    try:
        end = time.monotonic() + LIMIT_S
        while not (found := re.search(r" on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.mark.parametrize("way", ["straight", "by service"])
def test_load_reports_each_time_it_loaded_and_that_bytes_came_from_datanodes(
    hdfs: Cli, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    pytest.importorskip("torch")
    be_patient(monkeypatch)
    with by_service(tmp_path) if way == "by service" else nullcontext():
        hdfs.ok("push", base, BERT, "--alias", "prod")
        prod = f"{BERT}@prod"
        reports = hdfs.json("load", prod, "--report", "--repeat", "3", "--no-cache")["reports"]
        assert len(reports) == 3
        for report in reports:
            assert report["bytes"] == (256 * 256 + 256 * 128) * 4
            assert report["read_paths"] == {"direct": report["stored_bytes"]}
            assert sum(report["datanodes"].values()) == report["stored_bytes"] > 0
            assert not report["from_snapshot"]
        told = hdfs.ok("load", prod, "--report", "--repeat", "2", "--no-cache")
        assert told.count("direct") == 2


@contextmanager
def by_service(folder: Path) -> Iterator[None]:
    """Commands name a service in front of the store, instead of the store."""
    settings = Settings(home=folder / "service")
    database = Database(f"sqlite:///{folder}/registry.db")
    migrate.upgrade(database)
    secret = Registry(database).create_token(TokenName("test"), Role.WRITE, ["*"]).secret
    with (
        open_store(os.environ["WEIGHTYARD_STORE"], settings) as store,
        served(create_app(open_service(store, database, settings, "127.0.0.1"))) as url,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.delenv("WEIGHTYARD_STORE")
        patched.setenv("WEIGHTYARD_URL", url)
        patched.setenv("WEIGHTYARD_TOKEN", secret)
        yield
    database.close()


def test_a_folder_in_hdfs_is_pushed_without_touching_a_local_disk(
    hdfs: Cli, base: Path, whole_files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = hdfs.json("push", base, "team/local")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not-there"))
    pushed = hdfs.json("push", whole_files, BERT)
    assert (pushed["files"], pushed["tensors"]) == (4, 2)
    assert pushed["structure"]["config"] == {"layers": 2}
    assert pushed["new_bytes"] == 3 << 20  # the model itself is there from the local push
    monkeypatch.delenv("TMPDIR")
    hdfs.ok("pull", BERT, tmp_path / "out")
    assert (tmp_path / "out" / "sub dir" / "_odd name=1%20+.bin").stat().st_size == 3 << 20
    same = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert same == (base / "model.safetensors").read_bytes()
    assert local["digest"] != pushed["digest"]


def test_one_file_of_hdfs_can_be_pushed_and_a_missing_folder_is_named(
    hdfs: Cli, whole_files: str
) -> None:
    assert hdfs.json("push", f"{whole_files}/config.json", BERT)["files"] == 1
    pushed = hdfs.json("push", whole_files, BERT, "--include", "*.safetensors")
    assert (pushed["files"], pushed["tensors"]) == (1, 2)
    said = hdfs.refused(2, "push", f"{whole_files}/nope", BERT)
    assert f"{whole_files}/nope is not there" in said


def test_a_file_of_hdfs_that_changes_while_it_is_read_is_a_conflict(
    hdfs: Cli, cluster: MiniCluster, whole_files: str
) -> None:
    tree = HdfsTree(whole_files, Settings())
    try:
        (file,) = [file for file in tree.files() if file.path == FilePath("config.json")]
        _put(cluster, f"{whole_files}/config.json", b'{"layers": 3}')
        with pytest.raises(Conflict, match="changed while it was read"):
            tree.read_into(file, 0, memoryview(bytearray(13)))
        (file,) = [file for file in tree.files() if file.path == FilePath("config.json")]
        got = bytearray(13)
        tree.read_into(file, 0, memoryview(got))
        assert got == b'{"layers": 3}'
    finally:
        tree.close()


@pytest.mark.parametrize("change", ["replaced", "appended", "truncated by a rewrite", "deleted"])
def test_a_file_of_hdfs_that_changes_between_two_reads_is_a_conflict(
    hdfs: Cli, cluster: MiniCluster, whole_files: str, change: str
) -> None:
    url = f"{whole_files}/sub dir/_odd name=1%20+.bin"
    tree = HdfsTree(whole_files, Settings())
    try:
        (file,) = [file for file in tree.files() if file.length == 3 << 20]
        tree.read_into(file, 0, memoryview(bytearray(1 << 20)))
        match change:
            case "replaced":
                _put(cluster, f"{url}.new", os.urandom(3 << 20))
                _client(cluster).rename(urlsplit(f"{url}.new").path, urlsplit(url).path, True)
            case "appended":
                with _client(cluster).append(urlsplit(url).path) as more:
                    more.write(b"more")
            case "truncated by a rewrite":
                _put(cluster, url, b"short")
            case "deleted":
                _client(cluster).delete(urlsplit(url).path, False)
        with pytest.raises(Conflict, match=r"_odd name=1%20\+.bin (changed|is gone)"):
            tree.read_into(file, 1 << 20, memoryview(bytearray(1 << 20)))
    finally:
        tree.close()


def test_a_file_of_hdfs_that_is_gone_before_it_is_read_is_a_conflict(
    hdfs: Cli, cluster: MiniCluster, whole_files: str
) -> None:
    tree = HdfsTree(whole_files, Settings())
    try:
        (file,) = [file for file in tree.files() if file.path == FilePath("config.json")]
        _client(cluster).delete(urlsplit(f"{whole_files}/config.json").path, False)
        with pytest.raises(Conflict, match=r"config.json is gone"):
            tree.read_into(file, 0, memoryview(bytearray(13)))
    finally:
        tree.close()


@pytest.mark.parametrize("written", [0, 9, 5 << 19], ids=["nothing", "a little", "whole blocks"])
def test_a_file_of_hdfs_that_is_still_being_written_is_not_pushed_as_far_as_it_got(
    hdfs: Cli, cluster: MiniCluster, whole_files: str, tmp_path: Path, written: int
) -> None:
    url, content = f"{whole_files}/late.bin", os.urandom(3 << 20)
    options = WriteOptions(block_size=1 << 20)
    writer = _client(cluster).create(urlsplit(url).path, options)
    writer.write(content[:written])
    began = time.monotonic()
    said = hdfs.refused(4, "push", whole_files, BERT)
    assert time.monotonic() - began < 20, "no reason to wait for a writer until the deadline"
    assert f"{whole_files}: late.bin is still being written" in said
    assert f"hdfs debug recoverLease -retries 10 -path {url};" in said
    assert "--exclude" in said
    assert "still being written" in hdfs.refused(4, "push", url, BERT)
    assert "still being written" in hdfs.refused(4, "push", whole_files, BERT, "--dry-run")
    assert hdfs.json("push", whole_files, BERT, "--exclude", "late.bin")["files"] == 4
    writer.write(content[written:])
    writer.close()
    hdfs.ok("push", whole_files, BERT)
    hdfs.ok("pull", BERT, tmp_path / "out")
    assert (tmp_path / "out" / "late.bin").read_bytes() == content


def test_the_namenode_is_asked_once_where_each_file_lies_that_is_pushed(
    hdfs: Cli, whole_files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    locate = HdfsStore.locate

    def counted(store: HdfsStore, path: StorePath, **more: Any) -> Location:
        if store.url == whole_files:
            asked.append(path.text)
        return locate(store, path, **more)

    monkeypatch.setattr(HdfsStore, "locate", counted)
    hdfs.ok("push", whole_files, BERT, "--exclude", "config.json")
    assert sorted(asked) == ["_SUCCESS", "model.safetensors", "sub dir/_odd name=1%20+.bin"]


def test_a_file_of_hdfs_that_is_being_appended_to_is_not_pushed(
    hdfs: Cli, cluster: MiniCluster, whole_files: str
) -> None:
    with _client(cluster).append(urlsplit(f"{whole_files}/config.json").path) as more:
        more.write(b" ")
        assert "config.json is still being written" in hdfs.refused(4, "push", whole_files, BERT)
    assert hdfs.json("push", whole_files, BERT)["files"] == 4


def test_a_file_of_hdfs_whose_writer_died_is_pushed_once_its_lease_is_ended(
    hdfs: Cli, cluster: MiniCluster, whole_files: str
) -> None:
    path = urlsplit(f"{whole_files}/late.bin").path
    program = (
        "import os, signal; from hdfs_native import Client, WriteOptions;"
        f"file = Client({cluster.url!r}, {dict(cluster.client_properties)!r})"
        f".create({path!r}, WriteOptions());"
        "file.write(b'late'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    died = subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S)
    assert died.returncode == -signal.SIGKILL
    assert "late.bin is still being written" in hdfs.refused(4, "push", whole_files, BERT)
    end = time.monotonic() + LIMIT_S
    while not _client(cluster).recover_lease(path):  # as `hdfs debug recoverLease` does
        assert time.monotonic() < end
        time.sleep(0.2)
    assert hdfs.json("push", whole_files, BERT)["files"] == 5


def test_wrong_bytes_of_replicas_are_not_pushed(
    hdfs: Cli, cluster: MiniCluster, whole_files: str, tmp_path: Path
) -> None:
    url = f"{whole_files}/sub dir/_odd name=1%20+.bin"
    right = _client(cluster).read(urlsplit(url).path).read()
    cluster.wait_for_replication(url, 3, LIMIT_S)
    for file in cluster.replica_files(url):
        if file.datanode is not cluster.datanodes[0]:
            damage(file, offset=12_345)
    hdfs.ok("push", whole_files, BERT)
    hdfs.ok("pull", BERT, tmp_path / "out")
    assert (tmp_path / "out" / "sub dir" / "_odd name=1%20+.bin").read_bytes() == right


@pytest.mark.parametrize("way", [ReadPath.NATIVE, ReadPath.WEBHDFS])
def test_a_folder_of_hdfs_is_read_by_any_way_that_looks_at_checksums(
    hdfs: Cli, whole_files: str, way: ReadPath
) -> None:
    tree = HdfsTree(whole_files, Settings(), read_paths=(way,))
    try:
        for file in tree.files():
            got = bytearray(file.length)
            tree.read_into(file, 0, memoryview(got))
            if file.path == FilePath("config.json"):
                assert got == b'{"layers": 2}'
    finally:
        tree.close()


def test_copies_of_a_version_are_raised_and_lowered(
    hdfs: Cli, cluster: MiniCluster, base: Path
) -> None:
    pushed = hdfs.json("push", base, BERT, "--replication", "2")
    root = urlsplit(os.environ["WEIGHTYARD_STORE"]).path

    def copies() -> set[int | None]:
        listed = _client(cluster).list_status(f"{root}/packs", recursive=True)
        return {file.replication for file in listed if not file.isdir}

    assert copies() == {2}
    assert hdfs.json("set", pushed["ref"], "--replication", "3")["replication"] == 3
    assert copies() == {3}
    hdfs.ok("set", BERT, "--replication", "1", "--policy", "COLD")
    assert copies() == {1}
    assert "NO_SUCH" in hdfs.refused(2, "set", BERT, "--policy", "NO_SUCH")
    assert hdfs.json("show", BERT)["policy"] == "COLD"


def test_doctor_says_which_way_bytes_come_and_who_can_read_them(hdfs: Cli, base: Path) -> None:
    before = {one["check"]: one for one in hdfs.json("doctor")["findings"]}
    assert "weightyard init" in before["store"]["advice"]
    hdfs.ok("init", "--mode", "0750")
    findings = hdfs.json("doctor")["findings"]
    found = {one["check"]: one for one in findings}
    assert found["read path"]["message"].startswith("reads are direct")
    assert found["write path"]["state"] == "ok"
    assert found["isolation"]["state"] == "ok"
    assert "0750" in found["permissions"]["message"]
    assert {"hdfs", "webhdfs", "kerberos", "encryption", "binding", "clock"} <= found.keys()
    assert not [one for one in findings if one["state"] == "fail"]
    hdfs.ok("init", "--mode", "0755")
    found = {one["check"]: one for one in hdfs.json("doctor")["findings"]}
    assert found["isolation"]["state"] == "warn"


def examined(hdfs: Cli, code: int) -> dict[str, dict[str, str]]:
    """What doctor finds, by what it looked at; and its exit code."""
    ran = hdfs("doctor", "--json")
    assert ran.code == code, ran.out + ran.err
    return {one["check"]: one for one in json.loads(ran.out)["findings"]}


def test_doctor_takes_a_reader_who_may_not_write_for_well(
    hdfs: Cli, base: Path, tmp_path: Path
) -> None:
    hdfs.ok("init", "--mode", "0755")
    other = {**os.environ, "HADOOP_USER_NAME": "alice", "WEIGHTYARD_HOME": str(tmp_path / "alice")}
    ran = hdfs.process("doctor", "--json", env=other)
    found = {one["check"]: one for one in json.loads(ran.stdout)["findings"]}
    assert found["read path"]["message"].startswith("reads are direct")
    assert found["write path"]["state"] == "warn"
    assert "Permission denied: user=alice" in found["write path"]["message"]
    assert 'inode="/' in found["write path"]["message"], "as HDFS said it"
    assert ran.returncode == 0


def test_doctor_says_why_nothing_can_be_written_and_reads_all_the_same(
    hdfs: Cli, cluster: MiniCluster
) -> None:
    hdfs.ok("init")
    admin = partial(run_tool, cluster.active, cluster._java, _ADMIN)
    admin("-safemode", "enter")
    try:
        found = examined(hdfs, 1)
    finally:
        admin("-safemode", "leave")
    assert found["read path"]["message"].startswith("reads are direct")
    assert found["write path"]["state"] == "fail"
    assert "making" in found["write path"]["message"], "not that it could not be tidied up after"
    assert "safe mode" in found["write path"]["advice"]


def test_doctor_names_what_it_could_not_find_and_whom_it_could_not_reach(
    hdfs: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.environ["WEIGHTYARD_STORE"].rpartition("/fresh")[0]
    assert own in examined(hdfs, 0)["hadoop configuration"]["message"]
    monkeypatch.setenv("WEIGHTYARD_STORE", "hdfs://127.0.0.1:1/yard")
    elsewhere = examined(hdfs, 1)
    assert own in elsewhere["hadoop configuration"]["message"], "which the files are about"
    assert "hdfs://127.0.0.1:1" in elsewhere["hdfs"]["message"]
    assert "kerberos" not in elsewhere, "nobody answered who would ask for it"
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in examined(hdfs, 1)["hadoop configuration"]["message"]
    monkeypatch.setenv("WEIGHTYARD_STORE", "hdfs://prod/yard")
    assert "dfs.ha.namenodes.prod" in examined(hdfs, 1)["store"]["message"]


def test_where_no_webhdfs_listens_it_is_said_who_was_asked(
    hdfs: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    hdfs.ok("init")
    rpc = urlsplit(os.environ["WEIGHTYARD_STORE"]).netloc
    monkeypatch.setenv("WEIGHTYARD_WEBHDFS", f"http://{rpc}")
    found = examined(hdfs, 1)
    assert f"{rpc} answered as no NameNode does" in found["webhdfs"]["message"]


def test_doctor_warns_before_the_journal_is_more_than_a_folder_of_hdfs_may_hold(
    hdfs: Cli, base: Path
) -> None:
    hdfs.ok("push", base, BERT)
    assert "journal" not in {one["check"] for one in hdfs.json("doctor")["findings"]}
    with weightyard.open() as yard:
        row = {"id": 500_001, "at_ms": 0}
        yard.registry.database.write(lambda tx: tx.execute(insert(schema.journal), [row]))
    (found,) = [one for one in hdfs.json("doctor")["findings"] if one["check"] == "journal"]
    assert found["state"] == "warn"
    assert "dfs.namenode.fs-limits.max-directory-items" in found["advice"]


def test_a_user_without_permission_is_told_so(
    hdfs: Cli, base: Path, tmp_path: Path, cluster: MiniCluster
) -> None:
    hdfs.ok("init", "--mode", "0700")
    hdfs.ok("push", base, BERT)
    other = {**os.environ, "HADOOP_USER_NAME": "alice", "WEIGHTYARD_HOME": str(tmp_path / "alice")}
    ran = hdfs.process("ls", env=other)
    assert ran.returncode == 2
    assert "Permission denied" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
