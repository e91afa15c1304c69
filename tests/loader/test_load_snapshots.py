"""A version that was loaded from a store elsewhere is left on the node as a snapshot."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from byproduct_world import Elsewhere, elsewhere
from hdfs_world import by_service, straight
from late_device import LateDevice
from loader_world import (
    BERT,
    leases,
    left_threads,
    noise,
    our_threads,
    same,
    saved,
    sharded,
    yard_in,
)
from snapshot_world import content, leftovers
from torch import nn
from waiting import SOON_S

from weightyard.errors import StoreFull
from weightyard.format.block import MIB
from weightyard.loader import byproducts, load, stored
from weightyard.settings import Settings
from weightyard.testing.cluster import MiniCluster
from weightyard.yard import Yard

HERE = Path(__file__).parent
PROD = f"{BERT}@prod"

TENSORS = {
    "layers.0.weight": noise(1024, 1100, seed=1),
    "layers.1.weight": noise(700, 1024, seed=2),
    "layers.1.bias": noise(9, seed=3),
    "steps": torch.tensor(17),
}
BYTES = sum(one.nbytes for one in TENSORS.values())


def names(number: int) -> list[str]:
    return [name for name in TENSORS if name.startswith(f"layers.{number}")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a hub has it, in the yard below the same folder."""
    first = {name: TENSORS[name] for name in names(0)}
    folder = tmp_path / "model"
    folder.mkdir()
    sharded(folder, first, {name: one for name, one in TENSORS.items() if name not in first})
    (folder / "config.json").write_text(json.dumps({"layers": 2}))
    with yard_in(tmp_path) as yard:
        yard.push(folder, BERT, alias="prod")
    return folder


@pytest.fixture
def world(model: Path, tmp_path: Path) -> Iterator[Elsewhere]:
    with elsewhere(tmp_path) as opened:
        yield opened
    assert left_threads() == []
    assert leftovers(tmp_path / "cache") == []


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The log lines of an event."""
    caplog.set_level(logging.INFO)
    return lambda event: [
        one.getMessage() for one in caplog.records if one.getMessage().startswith(f"{event} ")
    ]


def module(device: str) -> nn.Module:
    made = nn.Module()
    made.layers = nn.ModuleList()
    for name, tensor in TENSORS.items():
        owner: nn.Module = made
        if name.startswith("layers"):
            number = int(name.split(".")[1])
            while len(made.layers) <= number:
                made.layers.append(nn.Module())
            owner = made.layers[number]
        blank = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        owner.register_buffer(name.split(".")[-1], blank)
    return made


def loaded_into(yard: Yard, device: str) -> Mapping[str, torch.Tensor]:
    made = module(device)
    yard.load_into(made, BERT)
    found = made.state_dict()
    assert same(found, TENSORS)
    return found


WAYS: Mapping[str, Callable[[Yard], object]] = {
    "load": lambda yard: yard.load(BERT),
    "stream": lambda yard: dict(yard.stream(BERT)),
    "into memory": lambda yard: loaded_into(yard, "cpu"),
    "into meta": lambda yard: loaded_into(yard, "meta"),
}


def figure(line: str, name: str) -> int:
    found = re.search(rf"{name}=(\d+)", line)
    assert found is not None, line
    return int(found[1])


@pytest.mark.parametrize("way", WAYS)
def test_what_was_loaded_becomes_a_snapshot_without_being_read_again(
    world: Elsewhere, model: Path, way: str, said: Callable[[str], list[str]]
) -> None:
    kept = WAYS[way](world.yard)
    world.made()
    (line,) = said("snapshot.made")
    assert figure(line, "taken_bytes") == BYTES, "every tensor"
    others = sum(len(one) for one in content(model).values()) - BYTES
    assert figure(line, "read_bytes") == others, "headers and other files"
    reads = world.store.calls.count("read")
    again = world.yard.load(BERT)
    assert again.report.from_snapshot
    assert same(again, TENSORS)
    assert world.store.calls.count("read") == reads
    (one,) = world.yard.snapshots.listed()
    assert content(one.place.folder) == content(model)
    del kept


def test_tensors_of_a_state_dict_become_the_file_they_would_be(tmp_path: Path) -> None:
    tied = noise(300, 300)
    state = {"a": tied, "b": tied, **{f"small.{n}": noise(5, seed=n) for n in range(20)}}
    with yard_in(tmp_path) as yard:
        yard.push(state, BERT)
        plain = yard.snapshot(BERT)
        expected = content(plain)
        (one,) = yard.snapshots.listed()
        yard.snapshots.remove(one.place)
    with elsewhere(tmp_path) as world:
        weights = world.yard.load(BERT)
        world.made()
        (one,) = world.yard.snapshots.listed()
        assert content(one.place.folder) == expected
        again = world.yard.load(BERT)
        assert again.report.from_snapshot
        assert same(again, state)
        assert same(weights, state)


def test_tensors_that_were_changed_dropped_or_moved_meanwhile_do_no_harm(
    world: Elsewhere, model: Path, said: Callable[[str], list[str]]
) -> None:
    world.gate.clear()
    weights = world.yard.load(BERT)
    assert world.is_held.wait(60)
    weights["layers.0.weight"][5, 7] += 1
    weights["layers.1.bias"].share_memory_()  # type: ignore[no-untyped-call]
    del weights["layers.1.weight"]
    world.made()
    (line,) = said("snapshot.made")
    block_bytes = world.yard.block_bytes
    assert figure(line, "taken_bytes") < BYTES - TENSORS["layers.1.weight"].nbytes
    assert figure(line, "read_bytes") >= block_bytes + TENSORS["layers.1.weight"].nbytes
    (one,) = world.yard.snapshots.listed()
    assert content(one.place.folder) == content(model)


def test_a_small_model_whose_tensors_nobody_kept_still_leaves_a_snapshot(
    world: Elsewhere, model: Path
) -> None:
    for _ in world.yard.stream(BERT):
        pass
    world.made()
    (one,) = world.yard.snapshots.listed()
    assert content(one.place.folder) == content(model)


def test_what_lies_nowhere_in_the_hosts_memory_is_not_read_again_for_a_snapshot(
    world: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byproducts, "REST_BYTES", 0)
    for _ in world.yard.stream(BERT):  # each is dropped
        pass
    world.made()
    assert world.yard.snapshots.listed() == []
    kept = dict(world.yard.stream(BERT))
    world.made()
    assert len(world.yard.snapshots.listed()) == 1
    del kept


@pytest.mark.parametrize(
    "how",
    [
        {"tensors": "layers.*"},
        {"slices": {"layers.0.weight": slice(0, 5)}},
        {"dtype": "float32"},
        {"cache": False},
        {"verify": "full"},
    ],
    ids=str,
)
def test_a_load_of_less_or_of_something_else_leaves_none(
    world: Elsewhere, how: dict[str, object]
) -> None:
    world.yard.load(BERT, **how)  # type: ignore[arg-type]
    world.made()
    assert world.yard.snapshots.listed() == []


def test_what_is_not_a_load_of_all_leaves_none(world: Elsewhere) -> None:
    with world.yard.safe_open(BERT) as lazy:
        for name in lazy.keys():  # noqa: SIM118  it is no dict
            lazy.get_tensor(name)
    for _ in world.yard.stream(BERT):
        break
    world.made()
    assert world.yard.snapshots.listed() == []


def test_a_version_with_much_that_was_not_loaded_is_not_fetched_for_it(
    world: Elsewhere, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byproducts, "REST_BYTES", 0)
    saved(model / "other" / "model.safetensors", {"x": noise(1024, 1024, seed=9)})
    with yard_in(tmp_path) as yard:
        yard.push(model, BERT)
    assert same(world.yard.load(BERT), TENSORS)
    world.made()
    assert world.yard.snapshots.listed() == []
    monkeypatch.undo()
    assert same(world.yard.load(BERT), TENSORS)
    world.made()
    (one,) = world.yard.snapshots.listed()
    assert content(one.place.folder) == content(model)


def test_the_environment_can_say_that_loads_leave_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings().cache_loads
    monkeypatch.setenv("WEIGHTYARD_CACHE_LOADS", "first")
    assert Settings().cache_loads == "first"
    monkeypatch.setenv("WEIGHTYARD_CACHE_LOADS", "0")
    with elsewhere(tmp_path) as world:
        world.yard.load(BERT)
        world.made()
        assert world.yard.snapshots.listed() == []


def test_a_yard_on_this_host_leaves_none(model: Path, tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        yard.load(BERT)
        assert yard.byproducts.wait(0)
        assert yard.snapshots.listed() == []


def test_closing_finishes_what_is_nearly_done(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byproducts, "NEARLY_DONE_S", SOON_S)
    with elsewhere(tmp_path) as world:
        weights = world.yard.load(BERT)
    assert left_threads() == []
    with elsewhere(tmp_path) as world:
        assert world.yard.load(BERT).report.from_snapshot
    assert same(weights, TENSORS)


def test_closing_gives_up_what_is_not_nearly_done_and_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[str], list[str]]
) -> None:
    monkeypatch.setattr(byproducts, "NEARLY_DONE_BYTES", BYTES // 2)
    with elsewhere(tmp_path) as world:
        world.gate.clear()
        weights = world.yard.load(BERT)
        assert world.is_held.wait(60)
    assert left_threads() == []
    assert leftovers(tmp_path / "cache") == []
    assert world.yard.snapshots.listed() == []
    assert len(said("snapshot.given_up")) == 1
    assert same(weights, TENSORS)
    with yard_in(tmp_path) as yard:
        assert leases(yard.registry.database) == 0


@pytest.mark.parametrize("why", ["bound", "disk", "folder"])
def test_a_snapshot_that_cannot_be_made_fails_no_load(
    model: Path, tmp_path: Path, why: str, said: Callable[[str], list[str]]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if why == "folder":
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache" / "snapshots").write_text("mine")
    with elsewhere(tmp_path, cache_max=100_000 if why == "bound" else None) as world:
        world.gate.clear()
        weights = world.yard.load(BERT)
        if why == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
        try:
            world.made()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        (line,) = said("snapshot.not_made")
        assert same(weights, TENSORS)
        assert not world.yard.load(BERT).report.from_snapshot
        world.made()
        assert said("snapshot.not_made") == [line], "not tried again"
        if why == "bound":
            with pytest.raises(StoreFull):
                world.yard.snapshot(BERT)
        assert leases(world.database) == 0
    if why != "folder":
        assert leftovers(tmp_path / "cache") == []


def dropped(yard: Yard) -> None:
    """A stream of which nobody keeps a tensor, as vLLM's."""
    for name, tensor in yard.stream(PROD):
        assert same({name: tensor}, {name: TENSORS[name]})


def onto_device(yard: Yard) -> None:
    assert same(yard.load(PROD, device="there"), TENSORS)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated device to load onto; and nothing is left that is not in the host's memory."""
    at = {"there": torch.device("meta"), "cpu": torch.device("cpu")}
    monkeypatch.setattr(load, "device_of", at.__getitem__)
    monkeypatch.setattr(stored, "AcceleratorCopies", lambda _: LateDevice())
    monkeypatch.setattr(byproducts, "REST_BYTES", 0)


@pytest.mark.usefixtures("there", "model")
@pytest.mark.parametrize("way", [dropped, onto_device])
def test_a_node_that_wants_snapshots_first_reads_the_store_once_for_all_processes(
    tmp_path: Path, way: Callable[[Yard], None]
) -> None:
    with elsewhere(tmp_path, cache_loads="first") as world:
        way(world.yard)
        reads = world.store.calls.count("read")
        assert reads > 0
        (one,) = world.yard.snapshots.listed()
        assert content(one.place.folder) == content(tmp_path / "model")
        way(world.yard)
        assert world.store.calls.count("read") == reads


@pytest.mark.usefixtures("model")
def test_what_came_first_is_told_once_and_a_cast_is_fed_by_it_too(tmp_path: Path) -> None:
    told: list[int] = []
    with elsewhere(tmp_path, cache_loads="first") as world:
        weights = world.yard.load(BERT, dtype="float64", progress=told.append)
        report = weights.report
        assert same(weights, {name: as_float64(one) for name, one in TENSORS.items()})
        assert (report.from_snapshot, report.cached_bytes) == (True, 0), "it came just now"
        assert report.stage_bytes["snapshot"] == sum(told) >= BYTES


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    "how",
    [{"tensors": "layers.*"}, {"files": "model-00001*"}, {"max_host_bytes": 64 * MIB}],
    ids=str,
)
def test_no_whole_version_is_brought_first_for_a_part_or_past_a_bound(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    with elsewhere(tmp_path, cache_loads="first") as world:
        assert not world.yard.load(BERT, **how).report.from_snapshot


@pytest.mark.usefixtures("model")
def test_a_disk_without_room_for_it_first_keeps_nobody_from_the_store(
    tmp_path: Path, said: Callable[[str], list[str]]
) -> None:
    with elsewhere(tmp_path, cache_loads="first", cache_max=100_000) as world:
        weights = world.yard.load(BERT)
        assert same(weights, TENSORS)
        assert not weights.report.from_snapshot
        assert "WEIGHTYARD_CACHE_MAX" in said("snapshot.not_made")[0]


def run(folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, HERE / "byproduct_world.py", folder, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_load_at_once_make_it_once(model: Path, tmp_path: Path) -> None:
    at_once = [run(tmp_path) for _ in range(2)]
    errors = ""
    for process in at_once:
        said, wrong = process.communicate(timeout=100)
        assert process.returncode == 0, wrong
        assert said.split()[0] in ("store", "snapshot")
        errors += wrong
    assert errors.count("snapshot.made ") == 1
    assert "snapshot.not_made" not in errors
    with elsewhere(tmp_path) as world:
        assert world.yard.load(BERT).report.from_snapshot
        assert world.store.calls.count("read") == 0
        (one,) = world.yard.snapshots.listed()
        assert content(one.place.folder) == content(model)
    assert leftovers(tmp_path / "cache") == []


def test_a_load_waits_for_no_other_process_and_takes_over_when_that_is_killed(
    model: Path, tmp_path: Path, said: Callable[[str], list[str]]
) -> None:
    killed = run(tmp_path, "hold")
    assert killed.stdout is not None
    assert killed.stdout.readline().startswith("store")
    assert killed.stdout.readline() == "at it\n"
    assert len(leftovers(tmp_path / "cache")) == 1
    with elsewhere(tmp_path) as world:
        assert same(world.yard.load(BERT), TENSORS)
        world.made()
        assert len(said("snapshot.left_to_another")) == 1
        assert world.yard.snapshots.listed() == []
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    with elsewhere(tmp_path) as world:
        assert not world.yard.load(BERT).report.from_snapshot
        world.made()
        assert world.yard.load(BERT).report.from_snapshot
        (one,) = world.yard.snapshots.listed()
        assert content(one.place.folder) == content(model)
    assert leftovers(tmp_path / "cache") == []


SECOND = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import weightyard
from weightyard.settings import Settings
folder = Path({folder!r})
settings = Settings(home=folder / "home", cache=folder / "cache", hadoop_conf_dir={conf!r})
from weightyard.opening import open_yard
with open_yard({url!r}, settings=settings) as yard:
    report = yard.load({ref!r}).report
    print(report.from_snapshot, report.stored_bytes, report.requests)
"""


@pytest.mark.cluster
def test_the_second_process_maps_what_the_first_one_read_from_hdfs(
    cluster: MiniCluster, tmp_path: Path, model: Path, said: Callable[[str], list[str]]
) -> None:
    with straight(cluster, tmp_path, cache_loads=True) as yard:
        yard.push(model, BERT)
        url = yard.store.url
        weights = yard.load(BERT)
        assert weights.report.stored_bytes > 0
        assert yard.byproducts.wait(60)
        (line,) = said("snapshot.made")
        assert figure(line, "taken_bytes") == BYTES
        assert same(weights, TENSORS)
    assert "weightyard-snapshot" not in our_threads()
    script = SECOND.format(
        path=sys.path, folder=str(tmp_path), conf=str(cluster.conf_dir), url=url, ref=BERT
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "True 0 0\n", done.stderr


@pytest.mark.cluster
def test_a_load_by_a_services_word_leaves_one_too(
    cluster: MiniCluster, tmp_path: Path, model: Path
) -> None:
    with by_service(cluster, tmp_path, cache_loads=True) as (yard, database):
        yard.push(model, BERT)
        weights = yard.load(BERT)
        assert yard.byproducts.wait(60)
        assert not weights.report.from_snapshot
        assert yard.load(BERT).report.from_snapshot
        assert leases(database) == 0


OFFLINE = """
import sys
sys.path[:0] = {path!r}
import weightyard
with weightyard.open({url!r}) as yard:
    weights = yard.load({ref!r})
    print(weights.report.from_snapshot, sum(one.nbytes for one in weights.values()))
"""


@pytest.mark.cluster
@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("way", [dropped, onto_device])
def test_after_a_start_on_a_device_or_by_a_stream_the_next_one_needs_no_yard(
    cluster: MiniCluster, tmp_path: Path, model: Path, way: Callable[[Yard], None]
) -> None:
    with straight(cluster, tmp_path, cache_loads="first") as yard:
        yard.push(model, BERT, alias="prod")
        url = yard.store.url
        way(yard)
    environment = {
        **os.environ,
        "WEIGHTYARD_CACHE": str(tmp_path / "cache"),
        "WEIGHTYARD_HOME": str(tmp_path / "other home"),
        "WEIGHTYARD_OFFLINE": "1",
    }
    script = OFFLINE.format(path=sys.path, url=url, ref=PROD)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.stdout == f"True {BYTES}\n", done.stderr
