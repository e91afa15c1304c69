"""Readers that go straight to the DataNodes and ask no NameNode: the service tells them where."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opened import same
from patience import PATIENT, be_patient
from service_world import LIMIT_S, World, counted_all, make_world

from weightyard.client.catalogue import HttpCatalogue
from weightyard.client.connection import Connection
from weightyard.client.locating import LIFE_S, MOST_VERSIONS, ServiceLocator
from weightyard.errors import DeadlineExceeded, FileMissing, NotAllowed
from weightyard.format.block import MIB
from weightyard.names import ModelName, Ref
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.wire import BlockAccess, BlockToken
from weightyard.storage.opening import open_store
from weightyard.storage.store import Location, StorePath
from weightyard.testing.cluster import MiniCluster
from weightyard.transfer import learned
from weightyard.transfer.folder import files_in

pytestmark = pytest.mark.cluster

BERT = "team/bert"
DEAD = "hdfs://127.0.0.1:1"


@pytest.fixture
def world(
    token_cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A service on an HDFS with block tokens."""
    monkeypatch.setattr(learned, "_of_store", {})  # all these yards get the same name
    be_patient(monkeypatch)
    settings = Settings(hadoop_conf_dir=token_cluster.conf_dir)
    with open_store(token_cluster.fresh_dir(), settings) as store:
        store.init()
        with make_world(tmp_path, store=store) as made:
            yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of several packs."""
    made = tmp_path / "model"
    (made / "deep").mkdir(parents=True)
    (made / "config.json").write_text('{"layers": 2}')
    for number in range(3):
        (made / "deep" / f"{number}.bin").write_bytes(os.urandom(2 * MIB + number))
    return made


@pytest.fixture
def published(world: World, folder: Path) -> str:
    """A version whose files came one by one, so that they are in packs of their own."""
    opened = world.call("POST", f"models/{BERT}/uploads", json={"replication": 1}).json()
    upload = f"uploads/{opened['id']}"
    for path, file in files_in(folder):
        sent = world.call("PUT", f"{upload}/files/{path}", content=file.read_bytes())
        assert sent.status_code == 200, sent.text
    digest = str(world.call("POST", f"{upload}/commit").json()["digest"])
    world.store.url = f"{DEAD}/yard"  # from now on nobody is told where the NameNode is
    return digest


@pytest.fixture
def lost(tmp_path: Path) -> dict[str, str]:
    """The environment of a host whose Hadoop configuration leads nowhere, and wants Kerberos."""
    conf = tmp_path / "conf"
    conf.mkdir()
    properties = {
        "fs.defaultFS": DEAD,
        "dfs.namenode.http-address": "127.0.0.1:1",
        "hadoop.security.authentication": "kerberos",
    }
    (conf / "core-site.xml").write_text(
        "<configuration>"
        + "".join(
            f"<property><name>{name}</name><value>{value}</value></property>"
            for name, value in properties.items()
        )
        + "</configuration>"
    )
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path / "home"),
        "HADOOP_CONF_DIR": str(conf),
        "KRB5CCNAME": str(tmp_path / "no-ticket"),
    }


def run(env: dict[str, str], script: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PATIENT + script],
        env=env, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wy_" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def pull(env: dict[str, str], into: Path) -> None:
    """In a process of its own, to `out` there."""
    run(
        env,
        f"""
import json, weightyard
with weightyard.open() as yard:
    yard.pull("{BERT}", "{into}/out")
print(json.dumps({{}}))
""",
    )


def namenode_calls(cluster: MiniCluster, command: str = "open") -> int:
    """How often its NameNode was asked where a file's blocks are, by its audit log."""
    (namenode,) = cluster.namenodes
    return namenode.log.read_text().count(f"cmd={command}\t")


def through_service(world: World) -> float:
    counted_all(world)
    return float(world.service.metrics.bytes.labels("out")._value.get())


def test_a_host_without_namenode_and_kerberos_loads_and_pulls_bit_for_bit(
    world: World, url: str, folder: Path, lost: dict[str, str], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {f"layers.{n}": torch.randn(512, 700).bfloat16() for n in range(4)}
    safetensors.save_file(tensors, folder / "model.safetensors")
    with open_yard(url, token=world.secrets["writer"], settings=Settings(via="service")) as yard:
        yard.push(folder, BERT, alias="prod", replication=1)
    world.store.url = f"{DEAD}/yard"
    sent = through_service(world)
    env = lost | {"WEIGHTYARD_URL": url, "WEIGHTYARD_TOKEN": world.secrets["reader"]}
    found = run(
        env,
        f"""
import json, weightyard
from safetensors.torch import save_file
with weightyard.open() as yard:
    weights = yard.load("{BERT}@prod", cache=False)
    save_file(dict(weights), "{tmp_path}/loaded.safetensors")
    yard.pull("{BERT}@prod", "{tmp_path}/out")
    with yard.safe_open("{BERT}@prod") as lazy:
        rows = lazy.get_slice("layers.1")[100:200]
    print(json.dumps({{
        "paths": list(weights.report.read_paths), "failed": weights.report.failed,
        "rows": rows.float().sum().item(),
    }}))
""",
    )
    assert found["paths"] == ["direct"]
    assert found["failed"] == []
    assert found["rows"] == tensors["layers.1"][100:200].float().sum().item()
    assert same(folder, tmp_path / "out")
    loaded = safetensors.load_file(tmp_path / "loaded.safetensors")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert through_service(world) == sent, "not a byte of it came through the service"


def test_twenty_fresh_readers_ask_the_namenode_no_more_than_one_does(
    token_cluster: MiniCluster,
    world: World,
    url: str,
    folder: Path,
    published: str,
    lost: dict[str, str],
    tmp_path: Path,
) -> None:
    packs = len(list(world.store.list(layout.PACKS)))
    assert packs >= 3
    before = namenode_calls(token_cluster)
    env = lost | {"WEIGHTYARD_URL": url, "WEIGHTYARD_TOKEN": world.secrets["reader"]}
    run(
        env,
        f"""
import json, weightyard
from weightyard.transfer import learned
for number in range(20):
    learned._of_store.clear()  # as if in a process that just began
    with weightyard.open() as yard:
        yard.pull("{BERT}", f"{tmp_path}/out{{number}}")
print(json.dumps({{}}))
""",
    )
    asked = namenode_calls(token_cluster) - before
    assert all(same(folder, tmp_path / f"out{number}") for number in range(20))
    # Besides the packs: the manifest, and the file by which readers see that they reach DataNodes.
    assert 0 < asked <= packs + 2


def spoiled(location: Location) -> Location:
    """The same with a block token that no DataNode takes."""

    def wrong(access: BlockAccess) -> BlockAccess:
        token = access.token
        other = BlockToken(token.identifier, bytes(20), token.kind, token.service)
        return dataclasses.replace(access, token=other)

    spans = (dataclasses.replace(one, access=wrong(one.access)) for one in location.spans)
    return dataclasses.replace(location, spans=tuple(spans))


def test_a_token_that_ended_is_replaced_by_asking_the_service_again(
    world: World, url: str, folder: Path, published: str, lost: dict[str, str], tmp_path: Path
) -> None:
    known = learned.learned_of(world.store).locations
    with known._lock:
        known._known.clear()
    for pack in world.store.list(layout.PACKS):
        known._known[pack.path] = (time.monotonic(), spoiled(world.store.locate(pack.path)))
    pull(lost | {"WEIGHTYARD_URL": url, "WEIGHTYARD_TOKEN": world.secrets["reader"]}, tmp_path)
    assert same(folder, tmp_path / "out")
    assert through_service(world) == 0


def test_block_tokens_are_in_no_log_line_and_no_repr(
    world: World,
    url: str,
    published: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("weightyard"), "propagate", True)
    caplog.set_level(logging.DEBUG)
    answer = world.call("GET", f"models/{BERT}/versions/1/locations", token="reader")
    tokens = {span["block"]["token"] for file in answer.json()["files"] for span in file["spans"]}
    assert min(map(len, tokens)) > 50
    with HttpCatalogue(url, world.secrets["reader"]) as catalogue:
        locator = expecting(catalogue, world)
        found = locator.locate(a_pack(world), Deadline.after(LIMIT_S))
        (span,) = found.spans
        assert isinstance(span.access, BlockAccess)
        told = span.access.token
        assert told.to_url_string() in tokens
        life_s = (told.expires_s or 0) - time.time()
        assert 9.9 * 3600 < life_s < 10.1 * 3600, "Hadoop's default"
        shown = repr((found, span, span.access, told, locator))
    for secret in (*tokens, repr(told.password)):
        assert secret not in shown
        assert not any(secret in line for line in caplog.messages)


def expecting(catalogue: HttpCatalogue, world: World, **options: Any) -> ServiceLocator:
    locator = ServiceLocator(catalogue.connection, Settings(), **options)
    locator.expect(catalogue.resolve(Ref(ModelName("team", "bert"), 1)))
    return locator


def a_pack(world: World, number: int = 0) -> StorePath:
    return sorted(world.store.list(layout.PACKS), key=lambda file: file.path)[number].path


def test_one_request_serves_a_whole_version_until_a_pack_is_asked_for_again(
    world: World, url: str, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    asked: list[str] = []
    stream = Connection.stream

    def noted(self: Connection, path: str, *arguments: Any, **options: Any) -> Any:
        asked.append(path)
        return stream(self, path, *arguments, **options)

    monkeypatch.setattr(Connection, "stream", noted)
    with HttpCatalogue(url, world.secrets["reader"]) as catalogue:
        locator = expecting(catalogue, world, clock=lambda: now)
        packs = [file.path for file in world.store.list(layout.PACKS)]
        for pack in packs:
            now += 1
            assert locator.locate(pack, Deadline.after(LIMIT_S)).path == pack
        assert len(asked) == 1
        now += 1
        locator.locate(packs[0], Deadline.after(LIMIT_S))
        assert len(asked) == 2, "what it said before did not serve"
        locator.locate(packs[1], Deadline.after(LIMIT_S))
        assert len(asked) == 2, "what is new has not been tried"
        now += LIFE_S + 1
        locator.locate(packs[2], Deadline.after(LIMIT_S))
        assert len(asked) == 3, "and it is old by now"


def test_a_pack_that_no_version_has_is_missing_and_time_is_bounded(
    world: World, url: str, published: str
) -> None:
    stranger = StorePath(f"packs/00/{'0' * 32}")
    with HttpCatalogue(url, world.secrets["reader"]) as catalogue:
        locator = expecting(catalogue, world)
        with pytest.raises(FileMissing, match="0000"):
            locator.locate(stranger, Deadline.after(LIMIT_S))
        with locator._asking, pytest.raises(DeadlineExceeded, match="asking the service"):
            locator.locate(a_pack(world), Deadline.after(0.1))
        locator.locate(a_pack(world), Deadline.after(LIMIT_S))
        version = catalogue.resolve(Ref.parse(BERT))
        for number in range(2, 3 * MOST_VERSIONS):
            locator.expect(version.model_copy(update={"number": number}))
        assert len(locator._routes) == MOST_VERSIONS
    with HttpCatalogue(url, world.secrets["stranger"]) as catalogue:
        locator = ServiceLocator(catalogue.connection, Settings())
        locator.expect(version)
        with pytest.raises(NotAllowed, match="team"):
            locator.locate(a_pack(world), Deadline.after(LIMIT_S))


def test_a_pack_is_missing_however_often_it_is_asked_for_of_a_version_that_is_gone(
    world: World, url: str, published: str
) -> None:
    with HttpCatalogue(url, world.secrets["lead"]) as catalogue:
        locator = expecting(catalogue, world)
        catalogue.remove(Ref(ModelName("team", "bert"), 1))
        for _ in range(3):
            with pytest.raises(FileMissing, match="packs"):
                locator.locate(a_pack(world), Deadline.after(LIMIT_S))


def test_who_holds_a_version_that_was_removed_goes_on_where_it_lies(
    world: World, url: str, published: str
) -> None:
    now = 0.0
    with HttpCatalogue(url, world.secrets["lead"]) as catalogue:
        locator = expecting(catalogue, world, clock=lambda: now)
        first = locator.locate(a_pack(world), Deadline.after(LIMIT_S))
        catalogue.remove(Ref(ModelName("team", "bert"), 1))
        now += LIFE_S + 1
        assert locator.locate(a_pack(world), Deadline.after(LIMIT_S)) == first


def test_a_host_that_reaches_no_datanode_either_pulls_through_the_service(
    world: World, url: str, folder: Path, published: str, lost: dict[str, str], tmp_path: Path
) -> None:
    known = learned.learned_of(world.store).locations
    whole = world.store.locate(layout.YARD)
    away = tuple(
        dataclasses.replace(
            span,
            replicas=tuple(
                dataclasses.replace(one, datanode="127.0.0.1:1") for one in span.replicas
            ),
        )
        for span in whole.spans
    )
    known._known[layout.YARD] = (time.monotonic(), dataclasses.replace(whole, spans=away))
    pull(lost | {"WEIGHTYARD_URL": url, "WEIGHTYARD_TOKEN": world.secrets["reader"]}, tmp_path)
    assert same(folder, tmp_path / "out")
    assert through_service(world) > 6 * MIB


def test_a_client_that_may_write_the_store_pushes_straight_and_reads_by_the_services_word(
    token_cluster: MiniCluster, world: World, url: str, folder: Path, tmp_path: Path
) -> None:
    settings = Settings(hadoop_conf_dir=token_cluster.conf_dir)
    with open_yard(url, token=world.secrets["writer"], settings=settings) as yard:
        yard.push(folder, BERT, replication=1)
        before = namenode_calls(token_cluster)
        for number in range(3):
            yard.pull(BERT, tmp_path / str(number))
            assert same(folder, tmp_path / str(number))
    assert world.service.metrics.bytes.labels("in")._value.get() == 0
    assert namenode_calls(token_cluster) - before <= 2, "a pack, and the manifest"


def test_doctor_finds_nothing_wrong_with_a_host_that_only_reads(
    world: World, url: str, published: str, lost: dict[str, str]
) -> None:
    env = lost | {"WEIGHTYARD_URL": url, "WEIGHTYARD_TOKEN": world.secrets["reader"]}
    done = subprocess.run(
        [sys.executable, "-c", f"{PATIENT}\nfrom weightyard.cli import main\nmain()", "doctor"],
        env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no NameNode" in " ".join(done.stdout.split())
