"""Reading a checkpoint with torch's distributed checkpoint, in one process."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_world import World, run_ranks
from reading_world import (
    RUN,
    columns,
    dcp_load,
    is_same,
    noise,
    opened,
    refused,
    rows,
    save,
    stored_bytes,
    whole,
    world_in,
)
from sqlalchemy import text
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from weightyard.errors import BlockCorrupt, DoesNotFit, InvalidName, NoSuchThing, Unsupported
from weightyard.format.block import MIB
from weightyard.names import Ref
from weightyard.testing.faults import FaultyStore
from weightyard.trainer.reader import YardReader, checkpoint_ref
from weightyard.trainer.saving import quiet_alone
from weightyard.trainer.state import State
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard

TENSORS = {
    "model.embed": rows(noise(1000, 700, seed=1), 250, 251, 760),
    "model.proj": columns(noise(600, 1000, dtype=torch.bfloat16, seed=2), 100, 700),
    "model.bias": whole(noise(300, seed=3)),
    "model.scale": whole(torch.tensor(1.5, dtype=torch.float64)),
    "model.none": whole(torch.empty(0, 4)),
    "optim.step": whole(torch.tensor(7, dtype=torch.int64)),
}
OBJECTS = {"sched.rates": [0.1, 0.05], "epoch": 3, "note": None}
PATHS = {
    **{name: tuple(name.split(".")) for name in TENSORS},
    "sched.rates": ("sched", "rates"),
    "epoch": ("epoch",),
    "note": ("note",),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = world_in(tmp_path_factory.mktemp("checkpoints"))
    with opened(made) as yard:
        save(yard, 1200, TENSORS, State(OBJECTS, PATHS))
    return made


@pytest.fixture
def yard(world: World) -> Iterator[Yard]:
    with opened(world) as found:
        yield found


def empty() -> dict[str, Any]:
    """A state dict of the same form, with nothing in it."""
    state: dict[str, Any] = {"model": {}, "optim": {}, "sched": {"rates": []}}
    for name, cut in TENSORS.items():
        part, _, key = name.partition(".")
        state[part][key] = torch.full_like(cut.tensor, 99)
    return {**state, "epoch": 0, "note": "?"}


def test_boxes_become_tensors_and_objects_come_back_as_they_were(yard: Yard) -> None:
    state = empty()
    memory = state["model"]["embed"].data_ptr()
    reader = YardReader(yard, f"{RUN}@step-1200")
    dcp_load(state, reader)
    for name, cut in TENSORS.items():
        part, _, key = name.partition(".")
        assert is_same(state[part][key], cut.tensor), name
    assert (state["sched"], state["epoch"], state["note"]) == ({"rates": [0.1, 0.05]}, 3, None)
    assert state["model"]["embed"].data_ptr() == memory
    assert reader.version is not None
    assert reader.version.ref == f"{RUN}@v1"
    assert reader.report is not None
    needed = stored_bytes(yard, RUN) - _state_bytes(yard)
    assert reader.report.needed_bytes == needed
    assert needed <= reader.report.stored_bytes <= 1.01 * needed  # it reads over small gaps
    assert reader.report.load.bytes == sum(cut.tensor.nbytes for cut in TENSORS.values())


def _state_bytes(yard: Yard) -> int:
    """What of the stored bytes is read before the load begins."""
    manifest = yard.manifest(RUN)
    (file,) = manifest.files
    blocks = [manifest.blocks[extent.block].id for extent in file.extents]
    found = yard.catalogue.placements(blocks)
    return sum(places[0].encoding.stored_bytes for places in found.values())


def test_a_checkpoint_is_named_by_ref_step_or_number() -> None:
    run = Ref.parse(RUN)
    for named in ("step-1200", 1200, "1200", f"{RUN}@step-1200", Path("step-1200")):
        assert str(checkpoint_ref(named, run)) == f"{RUN}@step-1200"
    assert str(checkpoint_ref("best", run)) == f"{RUN}@best"
    with pytest.raises(InvalidName):
        checkpoint_ref("no such/thing/at all", run)


def test_a_reader_can_be_given_another_checkpoint(yard: Yard) -> None:
    state = empty()
    dcp_load(state, YardReader(yard, f"{RUN}@v77"), checkpoint_id="step-1200")
    assert is_same(state["model"]["bias"], TENSORS["model.bias"].tensor)


def test_a_whole_state_can_be_had_without_knowing_its_keys(yard: Yard) -> None:
    state: dict[str, Any] = {}
    reader = YardReader(yard, RUN)
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    assert is_same(state["model"]["proj"], TENSORS["model.proj"].tensor)
    assert state["sched"] == {"rates": [0.1, 0.05]}


def test_objects_of_two_loads_are_not_the_same_one(yard: Yard) -> None:
    reader = YardReader(yard, RUN)
    first, second = empty(), empty()
    dcp_load(first, reader)
    first["sched"]["rates"].append("spoilt")
    dcp_load(second, reader)
    assert second["sched"]["rates"] == [0.1, 0.05]


def read_now_and_later(world: World, rank: int) -> list[bool]:
    came, now = [], time.monotonic
    with world.yard(rank) as yard, pytest.MonkeyPatch.context() as patched:
        reader = YardReader(yard, RUN, timeout=300.0)
        for passed_s in (0.0, 1000.0):
            patched.setattr(time, "monotonic", lambda passed_s=passed_s: now() + passed_s)
            state = {"model": {"bias": torch.zeros(300)}}
            dcp.load(state, storage_reader=reader)
            came.append(is_same(state["model"]["bias"], TENSORS["model.bias"].tensor))
    return came


def test_ranks_have_the_time_they_were_given_for_each_load(world: World) -> None:
    assert run_ranks(world, read_now_and_later, size=2) == {0: [True, True], 1: [True, True]}


@pytest.mark.parametrize(
    ("wanted", "error", "said"),
    [
        ({"model": {"missing": torch.zeros(1)}}, RuntimeError, "model.missing"),
        ({"model": {"bias": torch.zeros(301)}}, ValueError, "model.bias"),
        ({"model": {"bias": torch.zeros(300).half()}}, DoesNotFit, "model.bias.*cast=True"),
        ({"model": {"bias": "text"}}, ValueError, "model.bias"),
    ],
    ids=["missing key", "other shape", "other dtype", "an object"],
)
def test_what_does_not_fit_is_named_by_its_key(
    yard: Yard, wanted: dict[str, Any], error: type[Exception], said: str
) -> None:
    with refused(error, said):
        dcp_load(wanted, YardReader(yard, RUN))


def test_another_dtype_is_cast_if_that_is_asked_for(yard: Yard) -> None:
    state = {"model": {"bias": torch.zeros(300, dtype=torch.bfloat16)}}
    dcp_load(state, YardReader(yard, RUN, cast=True))
    assert is_same(state["model"]["bias"], TENSORS["model.bias"].tensor.bfloat16())


def test_a_partial_load_fills_what_is_there_and_leaves_the_rest(yard: Yard) -> None:
    state = {"model": {"bias": torch.zeros(300), "new": torch.ones(3)}}
    reader = YardReader(yard, RUN)
    dcp_load(state, reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert is_same(state["model"]["bias"], TENSORS["model.bias"].tensor)
    assert torch.equal(state["model"]["new"], torch.ones(3))
    assert reader.report is not None
    assert reader.report.load.tensors == 1
    assert reader.report.stored_bytes < 2 * MIB


@pytest.mark.parametrize("ref", [f"{RUN}@step-9", "team/nothing"])
def test_a_checkpoint_that_is_not_there_is_the_error_it_is(yard: Yard, ref: str) -> None:
    with refused(NoSuchThing):
        dcp_load(empty(), YardReader(yard, ref))
    with pytest.raises(NoSuchThing):
        len(YardReader(yard, ref).read_metadata().state_dict_metadata)


def test_a_pushed_state_dict_is_read_too_and_files_are_not(yard: Yard, tmp_path: Path) -> None:
    yard.push({"w": noise(30, 40)}, "team/plain")
    state = {"w": torch.zeros(30, 40)}
    dcp_load(state, YardReader(yard, "team/plain"))
    assert is_same(state["w"], noise(30, 40))
    from safetensors.torch import save_file

    save_file({"w": noise(30, 40)}, tmp_path / "model.safetensors")
    yard.push(tmp_path / "model.safetensors", "team/file")
    with refused(NoSuchThing, "load_into"):
        dcp_load(state, YardReader(yard, "team/file"))


class Renaming(DefaultLoadPlanner):
    """A planner as torch's documentation shows one."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("nothing is unpickled")


class Receiving(Renaming):
    def load_object(self, read_item: ReadItem, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = ("mine", value)


def test_a_planner_with_its_own_way_gets_objects_or_says_how_it_could(yard: Yard) -> None:
    with refused(Unsupported, "epoch.*load_object"):
        dcp_load({"epoch": 0}, YardReader(yard, RUN), planner=Renaming())
    state = {"epoch": 0}
    dcp_load(state, YardReader(yard, RUN), planner=Receiving())
    assert state == {"epoch": ("mine", 3)}


def test_tensors_that_are_views_are_filled_where_they_are(yard: Yard) -> None:
    memory = torch.zeros(1000, 1000)
    state = {"model": {"embed": memory[:, :700], "bias": memory[:300, 999]}}
    dcp_load(state, YardReader(yard, RUN))
    assert is_same(memory[:, :700], TENSORS["model.embed"].tensor)
    assert is_same(memory[:300, 999], TENSORS["model.bias"].tensor)
    assert not memory[:, 700:999].any()


def test_tensors_whose_memory_holds_other_values_are_filled(yard: Yard) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    quiet_alone()
    with YardWriter(yard, "team/odd") as writer:
        saved = {"conj": values.conj(), "neg": values.conj().imag}
        dcp.save(saved, checkpoint_id=9, storage_writer=writer, no_dist=True)
    conj, neg = torch.zeros_like(values).conj(), torch.zeros_like(values).conj().imag
    assert conj.is_conj()
    assert neg.is_neg()
    dcp_load({"conj": conj, "neg": neg}, YardReader(yard, "team/odd@step-9"))
    assert torch.equal(conj, values.conj())
    assert torch.equal(neg, values.conj().imag)


def test_a_parameter_that_wants_gradients_is_filled(yard: Yard) -> None:
    parameter = torch.nn.Parameter(torch.zeros(300))
    dcp_load({"model": {"bias": parameter}}, YardReader(yard, RUN))
    assert is_same(parameter.data, TENSORS["model.bias"].tensor)
    assert parameter.grad_fn is None


def test_one_manifest_is_read_and_each_pack_located_once(world: World) -> None:
    calls: list[str] = []
    with opened(world) as plain:
        faulty = FaultyStore(plain.store, on_call=lambda index, name: calls.append(name))
        packs = {
            places[0].pack
            for places in plain.catalogue.placements(
                [block.id for block in plain.manifest(RUN).blocks]
            ).values()
        }
        settings = plain._settings.model_copy(update={"cache": world.folder / "fresh"})
        yard = Yard(faulty, plain.catalogue, block_bytes=plain.block_bytes, settings=settings)
        dcp_load(empty(), YardReader(yard, RUN))
    assert calls.count("locate") <= len(packs) + 1  # and the manifest
    assert {"list", "stat"}.isdisjoint(calls)


def test_a_wrong_byte_is_an_error_and_never_a_tensor(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    with opened(world) as yard:
        save(yard, 1, {"w": rows(noise(700, 1000), 300)}, compress=False)
        for pack in (tmp_path / "store" / "packs").glob("*/*"):
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.chmod(0o644)
            pack.write_bytes(data)
        with refused(BlockCorrupt):
            dcp_load({"w": torch.zeros(700, 1000)}, YardReader(yard, RUN))


def test_a_lease_is_held_while_the_bytes_are_read_and_not_longer(world: World) -> None:
    held: list[int] = []
    with opened(world) as yard:

        def look(done_bytes: int) -> None:
            held.append(leases(yard))

        assert leases(yard) == 0
        dcp_load(empty(), YardReader(yard, RUN, progress=look))
        assert set(held) == {1}
        with refused(DoesNotFit):
            dcp_load({"model": {"bias": torch.zeros(300).half()}}, YardReader(yard, RUN))
        assert leases(yard) == 0


def leases(yard: Yard) -> int:
    with yard.registry.database.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM read_leases")).scalar_one())


def test_deltas_come_back_and_their_bases_are_counted(tmp_path: Path) -> None:
    first = {"w": rows(noise(4000, 1000, seed=1), 1500, 1501), "b": whole(noise(3000, seed=2))}
    changed = {
        "w": rows(first["w"].tensor.clone(), 1500, 1501),
        "b": whole(first["b"].tensor.clone()),
    }
    changed["w"].tensor[::7, ::11] += 1e-3
    changed["b"].tensor[5] = 4.0
    world = world_in(tmp_path)
    with opened(world) as yard:
        save(yard, 1, first)
        save(yard, 2, changed, base=yard.manifest(f"{RUN}@step-1"))
        blocks = [block.id for block in yard.manifest(RUN).blocks]
        placed = yard.catalogue.placements(blocks)
        assert any(places[0].encoding.base is not None for places in placed.values())
        state = {name: torch.zeros_like(cut.tensor) for name, cut in changed.items()}
        reader = YardReader(yard, f"{RUN}@step-2")
        dcp_load(state, reader)
        for name, cut in changed.items():
            assert is_same(state[name], cut.tensor), name
        assert reader.report is not None
        assert reader.report.stored_bytes == reader.report.needed_bytes
        assert reader.report.needed_bytes == stored_bytes(yard, RUN)
        assert reader.report.load.stored_bytes == reader.report.stored_bytes
