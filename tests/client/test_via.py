"""Bytes through the service, for hosts that do not reach its store; else straight."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from cutting import Cutting
from opened import Opens, same, spoil_answers
from service_world import World, counted_all

from weightyard import via
from weightyard.errors import (
    BadSetting,
    BlockCorrupt,
    Conflict,
    NoSuchThing,
    StoreUnavailable,
    Unsupported,
)
from weightyard.format.block import MIB
from weightyard.names import ModelName
from weightyard.opening import open_yard
from weightyard.records import About
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store, StorePath

NOBODY_THERE = "hdfs://127.0.0.1:1/yard"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "deep").mkdir(parents=True)
    (made / "config.json").write_text('{"layers": 2}')
    (made / "deep" / "ä b.bin").write_bytes(os.urandom(2 * MIB + 77) * 2)
    (made / "empty").write_bytes(b"")
    safetensors = pytest.importorskip("safetensors.numpy")
    small = {f"bias{i}": np.arange(100 + i, dtype=np.float32) for i in range(5)}
    big = {"weight": np.random.default_rng(0).normal(0, 0.02, (512, 700)).astype(np.float32)}
    safetensors.save_file(big | small | {"copy": small["bias1"]}, made / "model.safetensors")
    return made


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    monkeypatch.setattr(logging.getLogger("weightyard"), "propagate", True)
    caplog.set_level(logging.WARNING, "weightyard")
    return caplog.messages


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("bytes.through_service")]


def test_a_host_that_cannot_reach_the_store_pushes_and_pulls_all_the_same(
    world: World,
    opens: Opens,
    folder: Path,
    tmp_path: Path,
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, world.store.url = world.store.url, NOBODY_THERE
    moved: list[int] = []
    with opens() as yard:
        pushed = yard.push(folder, "team/bert", alias="prod", message="m", progress=moved.append)
        assert sum(moved) == pushed.logical_bytes
        moved.clear()
        yard.pull("team/bert@prod", tmp_path / "out", progress=moved.append)
        assert sum(moved) == pushed.logical_bytes
        assert yard.cost("team/bert").logical_bytes == pushed.logical_bytes
        assert yard.diff("team/bert", "team/bert@v1").files_same == 4
    assert same(folder, tmp_path / "out")
    assert (pushed.author, pushed.message, pushed.aliases) == ("writer", "m", ("prod",))
    assert pushed.structure["config"] == {"layers": 2}
    (line,) = said(caplog)
    assert NOBODY_THERE in line
    world.store.url = real
    with opens() as yard:
        straight = yard.push(folder, "team/bert")
    assert (straight.digest, straight.new_bytes) == (pushed.digest, 0)
    assert pushed.new_bytes > pushed.stored_bytes > 0 < pushed.packs_written
    assert len(said(caplog)) == 1, "it was reached"


def test_what_a_push_leaves_that_is_killed_while_it_tries_the_store_has_a_row(
    world: World, opens: Opens, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def delete(store: LocalStore, path: StorePath) -> bool:
        raise Killed

    with opens() as yard, monkeypatch.context() as killing:
        killing.setattr(LocalStore, "delete", delete)
        with pytest.raises(Killed):
            yard.push(folder, "team/bert")
    assert len(list(world.store.list(layout.STAGING))) == 1
    assert world.registry.check(world.store).is_clean, "gc finds it"


@pytest.mark.parametrize("via", ["store", "service"])
def test_diff_names_a_small_tensor_that_changed_and_not_its_neighbours(
    opens: Opens, tmp_path: Path, via: str
) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = {f"b{number}": np.full(100, number, np.float32) for number in range(10)}
    file = tmp_path / "model.safetensors"
    with opens(via=via) as yard:
        for value in (0, 99):
            tensors["b3"][0] = value
            safetensors.save_file(tensors, file)
            yard.push(file, "team/bert")
        found = yard.diff("team/bert@v1", "team/bert@v2")
    assert found.tensors_changed == ("model.safetensors:b3",)
    assert (found.tensors_same, found.files_changed) == (9, ("model.safetensors",))


def test_only_files_that_fit_come_through_the_service(
    opens: Opens, folder: Path, tmp_path: Path
) -> None:
    with opens(via="service") as yard:
        yard.push(folder, "team/bert", exclude=["deep/*"])
        yard.pull("team/bert", tmp_path / "out", include=["*.json"])
        assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.json"]
        with pytest.raises(NoSuchThing, match=r"model\.safetensors"):
            yard.pull("team/bert", tmp_path / "none", include=["*.pt"])
        (tmp_path / "out" / "config.json").write_text("mine")
        with pytest.raises(Conflict, match="there already"):
            yard.pull("team/bert", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


@pytest.mark.parametrize("via", ["store", "service"])
def test_files_that_are_there_as_they_should_be_are_not_pulled_again(
    opens: Opens, folder: Path, tmp_path: Path, via: str
) -> None:
    with opens(via=via) as yard:
        pushed = yard.push(folder, "team/bert")
        out = yard.pull("team/bert", tmp_path / "out")
        (out / "config.json").unlink()
        before = {file: file.stat().st_ino for file in out.rglob("*.*")}
        moved: list[int] = []
        yard.pull("team/bert", out, progress=moved.append)
        assert same(folder, out)
        assert sum(moved) == pushed.logical_bytes
        assert {file: file.stat().st_ino for file in before} == before
        with (out / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
        with pytest.raises(Conflict, match=r"model\.safetensors is there already"):
            yard.pull("team/bert", out)
        (out / "model.safetensors").unlink()
        (out / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(Conflict, match="there already"):
            yard.pull("team/bert", out)


@pytest.mark.parametrize("there", ["nothing", "another yard", "something else"])
def test_what_has_the_stores_name_here_but_is_another_is_left_alone(
    world: World,
    opens: Opens,
    folder: Path,
    tmp_path: Path,
    there: str,
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    if there == "another yard":
        with open_yard(str(elsewhere), settings=Settings(home=tmp_path / "home")) as other:
            other.push(folder, "team/theirs")
    elif there == "something else":
        elsewhere.mkdir()
        (elsewhere / "yard.json").write_text("[]")
    before = sorted(elsewhere.rglob("*"))
    world.store.url = elsewhere.as_uri()
    with opens() as yard:
        yard.push(folder, "team/bert")
        yard.pull("team/bert", tmp_path / "out")
    assert same(folder, tmp_path / "out")
    assert sorted(elsewhere.rglob("*")) == before
    assert len(said(caplog)) == 1


def test_looking_around_asks_the_store_nothing(
    world: World, opens: Opens, folder: Path, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with opens() as yard:
        yard.push(folder, "team/bert")
    world.store.url = NOBODY_THERE
    with opens() as yard:
        yard.set_alias("team/bert", "prod", 1)
        assert (
            yard.cost("team/bert@prod").logical_bytes == yard.versions("team/bert")[0].logical_bytes
        )
        yard.models()
    assert said(caplog) == []


def test_what_needs_the_store_says_that_it_cannot_be_reached(
    world: World, opens: Opens, folder: Path
) -> None:
    with opens() as yard:
        yard.push(folder, "team/bert")
    world.store.url = NOBODY_THERE
    with opens() as yard, pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1.*cannot be used"):
        _ = yard.store
    with opens(via="service") as yard, pytest.raises(Unsupported, match="WEIGHTYARD_VIA"):
        _ = yard.store


def test_a_store_that_had_a_bad_moment_is_used_again_after_a_while(
    world: World,
    opens: Opens,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(store: Store, about: About) -> None:
        raise StoreUnavailable("a bad moment")

    def through_service(way: str) -> float:
        counted_all(world)
        return float(world.service.metrics.bytes.labels(way)._value.get())

    monkeypatch.setattr(via, "_RECHECK_S", 3600.0)
    with opens() as yard:
        with monkeypatch.context() as bad:
            bad.setattr(via, "_require_reading", unreachable)
            yard.push(folder, "team/bert")
        came = through_service("in")
        assert came > 0
        yard.pull("team/bert", tmp_path / "soon")
        sent = through_service("out")
        assert sent > 0, "it is not tried each time"
        monkeypatch.setattr(via, "_RECHECK_S", 0.0)
        yard.pull("team/bert", tmp_path / "later")
        yard.push({"new": np.arange(1000)}, "team/bert")
        assert yard.store.url == world.store.url
    assert same(folder, tmp_path / "later")
    assert through_service("out") == sent
    assert through_service("in") == came


def test_the_setting_goes_before_what_would_work(
    world: World, opens: Opens, folder: Path, tmp_path: Path
) -> None:
    sent: list[float] = []

    def count(way: str) -> float:
        counted_all(world)
        return float(world.service.metrics.bytes.labels(way)._value.get())

    with opens(via="service") as yard:
        yard.push(folder, "team/bert")
        sent.append(count("in"))
        yard.pull("team/bert", tmp_path / "out")
        sent.append(count("out"))
    assert sent[0] > 4 * MIB, "what is new, encoded"
    assert sent[1] > sent[0], "files, as they are"
    with opens(via="store") as yard:
        yard.pull("team/bert", tmp_path / "straight")
    assert count("out") == sent[1]
    world.store.url = NOBODY_THERE
    with opens(via="store", deadline_s=1) as yard, pytest.raises(StoreUnavailable):
        yard.pull("team/bert", tmp_path / "never")
    with pytest.raises(BadSetting, match="WEIGHTYARD_URL"):
        open_yard(str(tmp_path / "embedded"), settings=Settings(via="service"))


def test_wrong_bytes_from_the_service_never_become_a_file(
    opens: Opens, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opens(via="service") as yard:
        yard.push(folder, "team/bert")
        spoil_answers(monkeypatch)
        for name in ("config.json", "model.safetensors", "deep/ä b.bin"):
            with pytest.raises(BlockCorrupt, match=Path(name).name):
                yard.pull("team/bert", tmp_path / "out", include=[name])
    assert [file for file in (tmp_path / "out").rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("after_bytes", [0, 300, 900, 1500, 2100])
def test_a_push_whose_answers_are_lost_is_one_version_all_the_same(
    world: World, opens: Opens, folder: Path, cutting: Cutting, after_bytes: int
) -> None:
    moved: list[int] = []
    cutting.cut_after_bytes = [after_bytes, after_bytes]
    with opens(cutting.url, via="service") as yard:
        pushed = yard.push(folder, "team/bert", progress=moved.append)
    assert cutting.connections > 1
    assert sum(moved) == pushed.logical_bytes
    assert min(moved) >= 0, "progress never goes back"
    (version,) = world.registry.versions(ModelName("team", "bert"))
    assert (version.digest, version.files) == (pushed.digest, 4)


def test_a_pull_that_breaks_off_goes_on_where_it_was(
    opens: Opens, folder: Path, tmp_path: Path, cutting: Cutting
) -> None:
    with opens(via="service") as yard:
        yard.push(folder, "team/bert")
    moved: list[int] = []
    cutting.cut_after_bytes = [2 * MIB, 1 * MIB]
    with opens(cutting.url, via="service") as yard:
        yard.pull("team/bert", tmp_path / "out", progress=moved.append)
        assert sum(moved) == yard.resolve("team/bert").logical_bytes, "nothing came twice"
    assert same(folder, tmp_path / "out")
