"""Anchors: what changed is stored as a delta of what the last anchor had, and comes back."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trainer_world import RUN, World, attempt, on_store, run_ranks

from weightyard.errors import BadSetting, NoSuchThing, StoreUnavailable
from weightyard.format.block import Codec
from weightyard.testing.faults import FaultyStore
from weightyard.trainer.anchors import Anchors
from weightyard.trainer.writer import YardWriter
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.writer import WriteOptions
from weightyard.yard import Yard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZE = (512, 512)
BYTES = 512 * 512 * 4


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with World(tmp_path, str(tmp_path / "store")).yard(0) as opened:
        yield opened


def weights(
    count: int = 3, *, changed: Mapping[int, int] | None = None, by: float = 1.0001
) -> dict[str, torch.Tensor]:
    """Tensors of one block each; of some, so many rows are not what they were."""
    made = {}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        made[f"w{number}"] = torch.randn(SIZE, generator=generator)
    for number, rows in (changed or {}).items():
        made[f"w{number}"][:rows] *= by
    return made


def save(writer: YardWriter, step: int, state: Mapping[str, torch.Tensor]) -> None:
    dcp.save(dict(state), checkpoint_id=step, storage_writer=writer, no_dist=True)


def require_same(yard: Yard, step: int, state: Mapping[str, torch.Tensor]) -> None:
    loaded = yard.load(f"{RUN}@step-{step}", verify="full")
    assert all(torch.equal(loaded[name], one) for name, one in state.items())


def bases(yard: Yard, step: int) -> dict[str, str | None]:
    """Name of a tensor → the tensor of step 0 whose block its only placement is a delta of."""
    first = {block: name for name, block in blocks(yard, 0).items()}
    found: dict[str, str | None] = {}
    for name, block in blocks(yard, step).items():
        (placement,) = yard.catalogue.placements([block])[block]
        base = placement.encoding.base
        if base is not None:
            (whole,) = yard.catalogue.placements([base])[base]
            assert whole.encoding.base is None  # depth 1
        found[name] = None if base is None else first[base]
    return found


def blocks(yard: Yard, step: int) -> dict[str, Any]:
    manifest = yard.manifest(f"{RUN}@step-{step}")
    return {
        tensor.name: manifest.blocks[tensor.boxes[0].extents[0].block].id
        for tensor in manifest.tensors
    }


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_save_costs_what_changed_and_comes_back_bit_for_bit(
    yard: Yard, tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "anchors" if place == "disk" else None
    states = [weights(changed={2: 5 * step}) for step in range(4)]
    with YardWriter(yard, RUN, anchors_folder=folder) as writer:
        for step, state in enumerate(states):
            save(writer, step, state)
            report = writer.report
            if step:
                assert (report.blocks_new, report.new_bytes) == (1, BYTES)
                assert report.stored_bytes < BYTES // 10
        save(writer, 9, states[-1])
        assert (writer.report.packs_written, writer.report.stored_bytes) == (0, 0)
        assert folder is None or list(folder.iterdir()) == []  # a kill leaves nothing either
    for step, state in enumerate(states):
        require_same(yard, step, state)
    assert bases(yard, 3) == {"w0": None, "w1": None, "w2": "w2"}


def save_shards(world: World, rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2,))
    stored = []
    with world.yard(rank) as yard, YardWriter(yard, RUN) as writer:
        for step in range(3):
            state = {
                name: distribute_tensor(one, mesh, [Shard(1)], src_data_rank=None)
                for name, one in weights(changed={0: step, 1: step}).items()
            }
            dcp.save(state, checkpoint_id=step, storage_writer=writer)
            stored.append(writer.report.stored_bytes)
    return stored


def test_each_rank_stores_deltas_of_its_own_shards(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    for first, *others in run_ranks(world, save_shards, size=2).values():
        assert first > BYTES  # half of three
        assert max(others) < first // 10
    with world.yard(99) as yard:
        for step in range(3):
            require_same(yard, step, weights(changed={0: step, 1: step}))


def test_a_new_anchor_is_made_after_so_many_saves(yard: Yard) -> None:
    with YardWriter(yard, RUN, anchor_every=3) as writer:
        for step in range(5):
            save(writer, step, weights(changed={0: 1 + step}))
    found = [bases(yard, step)["w0"] for step in range(3)]
    assert found == [None, "w0", "w0"]
    block, later = blocks(yard, 3)["w0"], blocks(yard, 4)["w0"]
    (anchor,) = yard.catalogue.placements([block])[block]
    assert anchor.encoding.base is None
    (delta,) = yard.catalogue.placements([later])[later]
    assert delta.encoding.base == block
    require_same(yard, 4, weights(changed={0: 5}))


def test_a_save_whose_deltas_would_save_too_little_is_the_next_anchor(yard: Yard) -> None:
    much = {0: 450, 1: 450}
    with YardWriter(yard, RUN) as writer:
        save(writer, 0, weights(2))
        save(writer, 1, weights(2, changed=much, by=1.3))
        assert writer.report.stored_bytes >= writer.report.whole_bytes
        save(writer, 2, weights(2, changed=much, by=1.3001))
        assert writer.report.stored_bytes < writer.report.whole_bytes
    assert bases(yard, 1) == {"w0": None, "w1": None}
    for name, block in blocks(yard, 2).items():
        (delta,) = yard.catalogue.placements([block])[block]
        assert delta.encoding.base == blocks(yard, 1)[name]


def test_what_did_not_change_is_not_asked_whether_deltas_pay(yard: Yard) -> None:
    """Those of what did change may pay little, though most of a model is as it was."""
    with YardWriter(yard, RUN) as writer:
        save(writer, 0, weights(8))
        save(writer, 1, weights(8, changed={3: 450}, by=1.3))
    assert set(bases(yard, 1).values()) - {None} == set()


def test_small_tensors_which_never_have_a_base_make_no_new_anchor(yard: Yard) -> None:
    with YardWriter(yard, RUN) as writer:
        for step in range(3):
            small = {f"adapter{number}": torch.randn(60, 256) for number in range(40)}
            save(writer, step, weights(1, changed={0: step}) | small)
    assert [bases(yard, step)["w0"] for step in range(3)] == [None, "w0", "w0"]


def test_what_is_beyond_the_budget_is_stored_standalone(yard: Yard) -> None:
    with YardWriter(yard, RUN, anchors_bytes=2 * BYTES + 5) as writer:
        for step in range(2):
            save(writer, step, weights(3, changed=dict.fromkeys(range(3), step)))
        assert writer._anchors.kept_bytes == 2 * BYTES
    assert bases(yard, 1) == {"w0": "w0", "w1": "w1", "w2": None}
    require_same(yard, 1, weights(3, changed=dict.fromkeys(range(3), 1)))


def test_what_changes_is_kept_before_what_does_not(yard: Yard) -> None:
    with YardWriter(yard, RUN, anchors_bytes=BYTES, anchor_every=2) as writer:
        for step in range(4):  # anchors are 0 and 2
            save(writer, step, weights(2, changed={1: step}))
    later = blocks(yard, 3)["w1"]
    (delta,) = yard.catalogue.placements([later])[later]
    assert delta.encoding.base == blocks(yard, 2)["w1"]


def test_an_anchor_is_what_was_saved_though_training_goes_on(yard: Yard) -> None:
    """Its bytes are those that were hashed, not what the tensors hold when the save has ended."""
    state = weights(1)

    def train(index: int, name: str) -> None:
        if name == "publish":
            state["w0"][:] = 0.0

    watched = FaultyStore(yard.store, on_call=train)
    with on_store(yard, watched) as other, YardWriter(other, RUN) as writer:
        save(writer, 0, state)
        assert not state["w0"].any()
        kept = writer._anchors._at_hand.read(blocks(yard, 0)["w0"])
        assert kept == weights(1)["w0"].numpy().tobytes()


def test_blocks_are_stored_as_they_are_if_asked_for(yard: Yard) -> None:
    with YardWriter(yard, RUN, compress=False) as writer:
        save(writer, 0, weights(2))
        assert writer.report.stored_bytes > 2 * BYTES
    require_same(yard, 0, weights(2))


def test_without_deltas_nothing_is_kept(yard: Yard) -> None:
    with YardWriter(yard, RUN, delta="off") as writer:
        for step in range(2):
            save(writer, step, weights(1, changed={0: step}))
        assert writer._anchors.kept_bytes == 0
    assert bases(yard, 1) == {"w0": None}


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_bytes_that_went_wrong_on_this_host_are_read_from_the_store_instead(
    yard: Yard, tmp_path: Path, place: str
) -> None:
    with YardWriter(yard, RUN, anchors_folder=tmp_path if place == "disk" else None) as writer:
        save(writer, 0, weights(1))
        at_hand: Any = writer._anchors._at_hand
        if place == "disk":
            at_hand._file.truncate(100)
        else:
            at_hand._kept[blocks(yard, 0)["w0"]][7] ^= 1
        save(writer, 1, weights(1, changed={0: 3}))
    assert bases(yard, 1) == {"w0": "w0"}
    require_same(yard, 1, weights(1, changed={0: 3}))


@pytest.mark.parametrize(
    ("place", "fails"), [("memory", errno.ENOMEM), ("disk", errno.ENOSPC), ("disk", errno.EIO)]
)
def test_where_an_anchor_cannot_be_kept_saves_go_on_standalone(
    yard: Yard,
    tmp_path: Path,
    place: str,
    fails: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(fails, os.strerror(fails))

    with YardWriter(yard, RUN, anchors_folder=tmp_path if place == "disk" else None) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(mmap, "mmap", refuse)
            patched.setattr(tempfile, "TemporaryFile", refuse)
            save(writer, 0, weights(1))
        assert "anchor.not_kept" in caplog.text
        save(writer, 1, weights(1, changed={0: 3}))
        assert writer._anchors.kept_bytes == 0
    assert bases(yard, 1) == {"w0": None}
    require_same(yard, 1, weights(1, changed={0: 3}))


def test_a_save_that_failed_leaves_the_anchor_as_it_was(yard: Yard) -> None:
    def fail(index: int, name: str) -> None:
        if is_failing and name == "publish":
            raise StoreUnavailable("the disk is gone")

    is_failing = False
    faulty = FaultyStore(yard.store, on_call=fail)
    with on_store(yard, faulty) as other, YardWriter(other, RUN) as writer:
        save(writer, 0, weights(1))
        is_failing = True
        assert attempt(lambda: save(writer, 1, weights(1, changed={0: 400}))).failures
        is_failing = False
        save(writer, 2, weights(1, changed={0: 4}))
    assert bases(yard, 2) == {"w0": "w0"}
    require_same(yard, 2, weights(1, changed={0: 4}))


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_writer_that_was_closed_begins_with_a_new_anchor(
    yard: Yard, tmp_path: Path, place: str
) -> None:
    states = [weights(1, changed={0: step}) for step in range(3)]
    with YardWriter(yard, RUN, anchors_folder=tmp_path if place == "disk" else None) as writer:
        save(writer, 0, states[0])
        writer.close()
        assert writer._anchors.kept_bytes == 0
        save(writer, 1, states[1])
        save(writer, 2, states[2])
    assert bases(yard, 1) == {"w0": None}
    anchor, later = blocks(yard, 1)["w0"], blocks(yard, 2)["w0"]
    (delta,) = yard.catalogue.placements([later])[later]
    assert delta.encoding.base == anchor
    for step, state in enumerate(states):
        require_same(yard, step, state)


def test_a_part_of_a_block_can_be_read(yard: Yard) -> None:
    with YardWriter(yard, RUN) as writer:
        save(writer, 0, weights(1))
        into = bytearray(12)
        writer._anchors.read([Wanted(blocks(yard, 0)["w0"], 8, memoryview(into))])
    assert bytes(into) == weights(1)["w0"].numpy().tobytes()[8:20]


def test_settings_that_make_no_sense_are_refused(yard: Yard, tmp_path: Path) -> None:
    reader = Reader(yard.store, yard.catalogue)
    with pytest.raises(BadSetting):
        Anchors(reader, WriteOptions(), every=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(NoSuchThing):
        Anchors(reader, WriteOptions(), folder=tmp_path / "file" / "folder")


def test_what_a_codec_hardly_makes_smaller_is_stored_as_it_is(yard: Yard) -> None:
    """Dense fp32 would shrink by a sixth; a job that resumes has it sooner so."""
    dense = torch.randn(SIZE)
    with YardWriter(yard, RUN) as writer:
        save(writer, 0, {"fp32": dense, "bf16": dense.bfloat16()})
    stored = {name: yard.catalogue.placements([block]) for name, block in blocks(yard, 0).items()}
    codecs = {
        name: one.encoding.codec for name, found in stored.items() for [one] in found.values()
    }
    assert codecs == {"fp32": Codec.RAW, "bf16": Codec.PLANES_BF16}
