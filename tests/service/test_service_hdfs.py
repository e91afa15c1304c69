"""The service on a real HDFS: bytes straight or through it, copies, policies, collecting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENT, be_patient
from service_world import LIMIT_S, World, counted_all, make_world, push_file, served
from waiting import eventually

from weightyard.errors import NoSuchThing, Unsupported
from weightyard.format.block import MIB
from weightyard.names import ModelName, Ref
from weightyard.opening import open_yard
from weightyard.registry.collect import GcOptions
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.opening import open_store
from weightyard.storage.store import Ownership
from weightyard.testing.cluster import MiniCluster
from weightyard.yard import Yard

pytestmark = pytest.mark.cluster

BERT = "team/bert"


@pytest.fixture
def world(cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A service on a fresh folder of HDFS, which the group team may read and not write."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(cluster.conf_dir))
    be_patient(monkeypatch)
    above = cluster.fresh_dir()
    with open_store(above) as everyones:
        everyones.init()
    with open_store(f"{above}/yard") as store:
        store.init(Ownership(group="team", folder_mode=0o750))
        with make_world(tmp_path, store=store) as made:
            yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "w.bin").write_bytes(os.urandom(2 * MIB + 5))
    (made / "config.json").write_text('{"layers": 2}')
    return made


def opened(world: World, url: str, **settings: object) -> Yard:
    return open_yard(url, token=world.secrets["lead"], settings=Settings(**settings))


def through_service(world: World) -> float:
    """Bytes of files that went through the service, either way."""
    counted_all(world)
    return sum(world.service.metrics.bytes.labels(way)._value.get() for way in ("in", "out"))


def copies(world: World) -> set[int]:
    """How many copies packs are to have."""
    return {pack.replication for pack in world.store.list(layout.PACKS)}


def test_bytes_go_straight_to_hdfs_or_through_the_service_and_are_the_same(
    world: World, url: str, folder: Path, tmp_path: Path
) -> None:
    with opened(world, url) as straight, opened(world, url, via="service") as around:
        first = straight.push(folder, BERT, alias="prod")
        straight.pull(f"{BERT}@prod", tmp_path / "straight")
        assert through_service(world) == 0
        second = around.push(folder, BERT)
        sent = through_service(world)
        assert sent < 16 * 1024, "HDFS has all of it"
        around.pull(f"{BERT}@prod", tmp_path / "around")
        assert through_service(world) == sent + first.logical_bytes
        assert (second.digest, second.new_bytes) == (first.digest, 0)
        (folder / "new.bin").write_bytes(os.urandom(300_000))
        assert around.push(folder / "new.bin", "team/new").packs_written == 1
        straight.pull("team/new", tmp_path / "new")
        straight.set_alias(BERT, "prod", second.number, expect=first.number)
        raw = os.urandom(70_000)
        third = push_file(world, BERT, "raw.bin", raw, token="writer")
        straight.pull(f"{BERT}@v{third}", tmp_path / "raw")
        assert [move.after for move in straight.alias_log(BERT, "prod")] == [2, 1]
    for name in ("w.bin", "config.json"):
        for out in ("straight", "around"):
            assert (tmp_path / out / name).read_bytes() == (folder / name).read_bytes()
    assert (tmp_path / "raw" / "raw.bin").read_bytes() == raw
    assert (tmp_path / "new" / "new.bin").read_bytes() == (folder / "new.bin").read_bytes()


def test_what_is_removed_through_the_service_is_collected_behind_it(
    world: World, url: str, folder: Path
) -> None:
    with opened(world, url) as yard:
        yard.push(folder, BERT)
        push_file(world, BERT, "raw.bin", os.urandom(70_000))
        held = yard.catalogue.take_lease(Ref.parse(f"{BERT}@v2"), "serving-7", 3600)
        for number in (1, 2):
            yard.delete(f"{BERT}@v{number}")
        options = GcOptions(grace_s=0, unsafe_grace=True)
        deleted = [world.registry.gc(world.store, options).packs_deleted for _ in range(2)]
        assert sum(deleted) == 1, "the other is being read"
        yard.catalogue.release_lease(held.id)
        deleted = [world.registry.gc(world.store, options).packs_deleted for _ in range(2)]
        assert sum(deleted) == 1
        assert list(world.store.list(layout.PACKS)) == []
        yard.delete_model(BERT)
        with pytest.raises(NoSuchThing):
            world.registry.model(ModelName.parse(BERT))


def test_copies_and_policy_are_asked_for_through_the_service(
    world: World, url: str, folder: Path
) -> None:
    usual = world.store.stat(layout.YARD).replication
    with opened(world, url) as yard:
        yard.push(folder, BERT)
        cost = yard.cost(BERT)
        assert cost.replicated_bytes == usual * cost.stored_bytes
        assert yard.keep(BERT, replication=1).replication == 1
        eventually(lambda: copies(world) == {1})  # the store is told after the answer
        cost = yard.cost(BERT)
        assert cost.replicated_bytes == cost.stored_bytes
        assert yard.keep(BERT, replication=3, policy="HOT").policy == "HOT"
        eventually(lambda: copies(world) == {3})
        with pytest.raises(Unsupported, match="NO_SUCH"):
            yard.keep(BERT, replication=2, policy="NO_SUCH")
        assert copies(world) == {3}, "all of it, or nothing"
        assert (yard.resolve(BERT).replication, yard.resolve(BERT).policy) == (3, "HOT")


def test_who_may_read_hdfs_but_not_write_pulls_straight_and_pushes_through_the_service(
    cluster: MiniCluster, world: World, folder: Path, tmp_path: Path
) -> None:
    def run(*words: object) -> str:
        done = subprocess.run(
            [sys.executable, "-c", f"{PATIENT}\nfrom weightyard.cli import main\nmain()"]
            + [str(word) for word in words],
            env={
                "PATH": os.environ["PATH"],
                "HADOOP_CONF_DIR": str(cluster.conf_dir),
                "WEIGHTYARD_HDFS_USER": "bob",
                "WEIGHTYARD_URL": url,
                "WEIGHTYARD_TOKEN": world.secrets["writer"],
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    with served(world.app) as url:
        assert "bytes go through the service" in run("push", folder, BERT)
        sent = through_service(world)
        assert sent > 2 * MIB
        assert run("pull", BERT, tmp_path / "out") == ""
        assert through_service(world) == sent
    assert (tmp_path / "out" / "w.bin").read_bytes() == (folder / "w.bin").read_bytes()
