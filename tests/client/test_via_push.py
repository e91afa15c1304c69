"""Pushing through the service: only what the store lacks is sent, in all its forms."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from cutting import Cutting
from opened import Opens, same, spoil_answers
from pushing import made_pack
from service_world import World, counted_all, push

from weightyard.client.catalogue import HttpCatalogue
from weightyard.client.store import ServiceStore
from weightyard.client.upload import HttpUpload
from weightyard.errors import (
    BlockCorrupt,
    FileMissing,
    NoSuchThing,
    QuotaExceeded,
    RegistryUnavailable,
    Unsupported,
    YardError,
)
from weightyard.format.block import MIB
from weightyard.names import ModelName, Ref
from weightyard.records import Publication
from weightyard.storage import layout

KIB = 1024


def floats(seed: int, count: int = 300_000) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"layers": 2}')
    (made / "noise.bin").write_bytes(random.Random(1).randbytes(2 * MIB + 77))
    write(made, floats(1), floats(2))
    return made


def write(folder: Path, *layers: np.ndarray) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = {f"layer{number}": layer for number, layer in enumerate(layers)}
    safetensors.save_file(tensors, folder / "model.safetensors")


class Counted:
    """How many bytes came in since it was last asked."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._counter = world.service.metrics.bytes.labels("in")
        self._before = self._counter._value.get()

    def __call__(self) -> float:
        counted_all(self._world)
        before, self._before = self._before, self._counter._value.get()
        return float(self._before - before)


@pytest.fixture
def came_in(world: World) -> Counted:
    return Counted(world)


def test_a_push_sends_what_is_new_encoded_and_the_same_again_nearly_nothing(
    opens: Opens, folder: Path, came_in: Counted, tmp_path: Path
) -> None:
    with opens(via="service") as yard:
        first = yard.push(folder, "team/bert")
        assert came_in() < first.stored_bytes + 64 * KIB < first.logical_bytes
        again = yard.push(folder, "team/bert")
        assert came_in() < 16 * KIB
        assert (again.digest, again.new_bytes, again.packs_written) == (first.digest, 0, 0)
        write(folder, floats(1), floats(3))
        changed = yard.push(folder, "team/bert")
        assert changed.new_bytes < 2 * floats(3).nbytes
        assert came_in() < changed.stored_bytes + 64 * KIB
        yard.pull("team/bert", tmp_path / "out")
    assert same(folder, tmp_path / "out")


def test_a_push_that_failed_at_its_end_does_not_send_its_packs_again(
    world: World,
    opens: Opens,
    folder: Path,
    came_in: Counted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit = HttpUpload.commit

    def broken(self: HttpUpload, *arguments: object) -> None:
        raise RegistryUnavailable("gone")

    monkeypatch.setattr(HttpUpload, "commit", broken)
    with opens(via="service") as yard, pytest.raises(RegistryUnavailable):
        yard.push(folder, "team/bert")
    assert came_in() > 3 * MIB
    assert world.registry.models() == []
    monkeypatch.setattr(HttpUpload, "commit", commit)
    with opens(via="service") as yard:
        assert yard.push(folder, "team/bert").packs_written == 0
    assert came_in() < 16 * KIB


def test_a_pack_the_service_did_not_take_stays_staged_to_be_sent_again(
    world: World, url: str
) -> None:
    made, content = made_pack((b"weights", None))
    with HttpCatalogue(url, world.secrets["boss"]) as catalogue:
        upload = catalogue.open_upload(ModelName("team", "bert"), Publication())
        store = ServiceStore(upload, url)
        with store.stage(layout.staging(upload.id, made.pack.hex)) as stage:
            stage.write(content)
            staged = stage.close()
        with pytest.raises(YardError) as refused:  # nobody has begun it
            store.publish(staged, layout.pack(made.pack))
        assert not isinstance(refused.value, FileMissing)
        upload.begin_pack(made.pack)
        store.publish(staged, layout.pack(made.pack))
        with pytest.raises(FileMissing):
            store.publish(staged, layout.pack(made.pack))
    assert world.store.stat(layout.pack(made.pack)).length == len(content)


def test_a_pack_for_which_the_quota_has_no_room_is_not_sent(
    world: World, opens: Opens, folder: Path, came_in: Counted
) -> None:
    world.registry.set_quota("team", stored_bytes=MIB, versions=None)
    with opens(via="service") as yard:
        with pytest.raises(QuotaExceeded, match="then push again"):
            yard.push(folder, "team/bert")
        assert came_in() < 64 * KIB
        (folder / "small.bin").write_bytes(random.Random(7).randbytes(MIB))
        assert yard.push(folder / "small.bin", "team/bert").number == 1, "what fits just so is"


def test_what_another_project_has_is_sent_all_the_same(
    world: World, opens: Opens, folder: Path, came_in: Counted
) -> None:
    content = random.Random(5).randbytes(MIB)
    push(world.registry, world.store, "other/secret", content)
    (folder / "copied.bin").write_bytes(content)
    with opens(via="service") as yard:
        pushed = yard.push(folder / "copied.bin", "team/bert")
    assert pushed.new_bytes == MIB
    assert came_in() > MIB, "whether it is there is not told by what need not be sent"


@pytest.mark.parametrize("codec", ["auto", "raw"])
def test_blocks_are_stored_as_the_writer_asks(
    world: World, opens: Opens, folder: Path, codec: str
) -> None:
    with opens(via="service") as yard:
        pushed = yard.push(folder, "team/bert", codec=codec)  # type: ignore[arg-type]
    is_raw = pushed.stored_bytes >= pushed.new_bytes
    assert is_raw == (codec == "raw")
    assert world.registry.check(world.store, read_data=True).is_clean


@pytest.mark.parametrize("delta", ["also", "only"])
def test_deltas_go_through_the_service_as_into_the_store(
    world: World, opens: Opens, folder: Path, tmp_path: Path, delta: str
) -> None:
    layer = floats(1)
    write(folder, layer)
    with opens(via="service") as yard:
        yard.push(folder, "team/bert")
        layer[::1000] += 1e-4
        write(folder, layer)
        tuned = yard.push(folder, "team/bert", parent="team/bert", delta=delta)  # type: ignore[arg-type]
        yard.pull("team/bert", tmp_path / "out")
        blocks = [block.id for block in yard.manifest("team/bert").blocks]
    assert same(folder, tmp_path / "out")
    placements = [p for found in world.registry.placements(blocks).values() for p in found]
    assert sum(p.encoding.base is not None for p in placements) == 1
    is_small = tuned.stored_bytes < tuned.new_bytes / 4
    assert is_small == (delta == "only")
    assert world.registry.check(world.store, read_data=True).is_clean


def test_a_delta_on_what_may_not_be_read_is_refused(
    world: World, opens: Opens, folder: Path
) -> None:
    push(world.registry, world.store, "other/gpt", b"secret" * 30_000)
    with opens(via="service") as yard, pytest.raises(Exception, match="writer") as refused:
        yard.push(folder, "team/bert", parent="other/gpt", delta="only")
    assert getattr(refused.value, "code", None) == "not-allowed"


def test_state_dicts_are_pushed_and_come_back_as_a_file(
    world: World, opens: Opens, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    state = {
        "weight": torch.from_numpy(floats(1).reshape(500, 600)),
        "bias": torch.arange(10, dtype=torch.bfloat16),
    }
    state["tied"] = state["weight"]
    moved: list[int] = []
    with opens(via="service") as yard:
        pushed = yard.push(state, "team/bert", progress=moved.append)
        assert sum(moved) == pushed.logical_bytes
        moved.clear()
        yard.pull("team/bert", tmp_path / "out", progress=moved.append)
        assert sum(moved) == pushed.logical_bytes
        snapshot = yard.snapshot("team/bert")
        assert same(snapshot, tmp_path / "out")
        with pytest.raises(NoSuchThing, match=r"model\.safetensors"):
            yard.pull("team/bert", tmp_path / "none", include=["*.bin"])
    with opens(via="store") as yard:
        yard.pull("team/bert", tmp_path / "straight")
    assert same(tmp_path / "straight", tmp_path / "out")
    back = pytest.importorskip("safetensors.torch").load_file(tmp_path / "out/model.safetensors")
    assert len(back) == 2, "tied tensors are there once"
    assert all(torch.equal(back[name], state[name]) for name in back)


def test_a_state_dict_that_no_file_can_hold_is_not_pulled_as_an_empty_folder(
    opens: Opens, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    with opens(via="service") as yard:
        yard.push({"wave": torch.ones(3, dtype=torch.complex128)}, "team/bert")
        with pytest.raises(Unsupported, match="load the version"):
            yard.pull("team/bert", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_bytes_of_a_block_never_become_a_file(
    opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    with opens(via="service") as yard:
        yard.push({"weight": torch.from_numpy(floats(1))}, "team/bert")
        spoil_answers(monkeypatch)
        with pytest.raises(BlockCorrupt, match="other bytes"):
            yard.pull("team/bert", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("after_bytes", [0, 300, 1500])
def test_a_state_dict_whose_connection_breaks_comes_whole(
    world: World, opens: Opens, tmp_path: Path, cutting: Cutting, after_bytes: int
) -> None:
    content = random.Random(3).randbytes(MIB)
    push(world.registry, world.store, "team/bert", content)
    cutting.cut_after_bytes = [after_bytes, 4000, 300_000]
    with opens(cutting.url, via="service") as yard:
        yard.pull("team/bert", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes().endswith(content)
    assert world.registry.resolve(Ref(ModelName("team", "bert"))).number == 1
