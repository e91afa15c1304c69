"""What torch is told of a checkpoint, and what a hostile one can do: nothing."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_world import (
    RUN,
    dcp_load,
    is_same,
    noise,
    opened,
    refused,
    rows,
    save,
    whole,
    world_in,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from weightyard.errors import Damaged, ManifestInvalid, NoSuchThing, Unsupported, YardError
from weightyard.format import manifest as manifests
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType
from weightyard.format.manifest import BlockEntry, Box, Extent, FileEntry, Manifest, TensorEntry
from weightyard.loader.filling import copy_picked
from weightyard.loader.plan import Pick, TensorPlan
from weightyard.trainer.metadata import entries_of, metadata_of, plan_items, state_entry
from weightyard.trainer.reader import YardReader
from weightyard.trainer.state import MAX_STATE_BYTES, State


def entry(name: str, shape: tuple[int, ...], *boxes: tuple[Any, ...], **more: Any) -> TensorEntry:
    """A tensor of bytes; each box is an offset and a shape, one after the other in block 0."""
    made, at = [], 0
    for offset, size in boxes:
        length = math.prod(size)
        made.append(Box(offset, size, (Extent(0, at, length),)))
        at += length
    given = {"file": None, "dtype": DType.U8, "tied": None, **more}
    return TensorEntry(name=name, shape=shape, boxes=tuple(made), **given)


HALVES = entry("w", (4, 3), ((0, 0), (1, 3)), ((1, 0), (3, 3)))


def test_boxes_are_chunks_and_objects_are_bytes() -> None:
    entries = {
        "w": HALVES,
        "one": entry("one", (), ((), ())),
        "none": entry("none", (0, 5)),
    }
    found = metadata_of(entries, State({"epoch": 3}, {"w": ("model", "w"), "epoch": ("epoch",)}))
    described = found.state_dict_metadata
    assert list(described) == ["w", "one", "none", "epoch"]
    weight, one, none = (described[name] for name in ("w", "one", "none"))
    assert isinstance(weight, TensorStorageMetadata)
    assert weight.properties.dtype == torch.uint8
    assert weight.size == torch.Size((4, 3))
    assert weight.chunks == [
        ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1, 3))),
        ChunkStorageMetadata(torch.Size((1, 0)), torch.Size((3, 3))),
    ]
    assert isinstance(one, TensorStorageMetadata)
    assert one.chunks == [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
    assert isinstance(none, TensorStorageMetadata)
    assert (none.size, none.chunks) == (torch.Size((0, 5)), [])
    assert isinstance(described["epoch"], BytesStorageMetadata)
    assert found.planner_data == {"w": ("model", "w"), "epoch": ("epoch",)}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State({"w": 1}), "w is a tensor and something else"),
        (State({}, {"gone": ("gone",)}), "leads to gone"),
    ],
)
def test_state_that_contradicts_the_tensors_is_damage(state: State, said: str) -> None:
    with pytest.raises(Damaged, match=said):
        metadata_of({"w": HALVES}, state)


def test_an_element_type_torch_does_not_have_is_named_with_its_tensor() -> None:
    with pytest.raises(Unsupported, match="tensor tiny"):
        metadata_of({"tiny": entry("tiny", (2,), dtype=DType.F4)}, State())


def test_a_state_file_is_bounded_before_it_is_read() -> None:
    blocks = (BlockEntry("0" * 64, MIB),)
    for claimed in (MAX_STATE_BYTES + 1, 2**52):
        file = FileEntry("state.json", claimed, "plain", ())
        with pytest.raises(Damaged, match=r"state\.json"):
            state_entry(Manifest(1, MIB, blocks, (file,), ()))
    assert state_entry(Manifest(1, MIB, blocks, (), ())) is None


def test_tensors_of_files_are_no_checkpoint() -> None:
    in_file = entry("w", (2,), ((0,), (2,)), file=0)
    with pytest.raises(NoSuchThing, match="load_into"):
        entries_of(Manifest(1, MIB, (), (), (in_file,)))


cuts = st.lists(st.integers(1, 11), max_size=3, unique=True).map(sorted)


@settings(max_examples=150, deadline=None)
@given(cuts, cuts, cuts, cuts)
def test_what_torch_plans_for_any_shards_brings_every_element_where_it_belongs(
    saved_rows: list[int], saved_columns: list[int], rows_now: list[int], columns_now: list[int]
) -> None:
    all_of_it = torch.arange(144, dtype=torch.uint8).view(12, 12)
    saved = _boxes(saved_rows, saved_columns)
    tensor = entry("w", (12, 12), *saved)
    stored = torch.cat([all_of_it[_slices(box)].reshape(-1) for box in saved]).numpy().data
    described = metadata_of({"w": tensor}, State()).state_dict_metadata["w"]
    assert isinstance(described, TensorStorageMetadata)
    wanted = _boxes(rows_now, columns_now)
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in wanted]
    shards = [torch.full(size, 255, dtype=torch.uint8) for _, size in wanted]
    items = create_read_items_for_chunk_list("w", described, chunks)
    for item, plan in zip(items, plan_items({"w": tensor}, items), strict=True):
        shard = shards[item.dest_index.index or 0]
        into = shard[
            tuple(
                slice(at, at + size)
                for at, size in zip(item.dest_offsets, item.lengths, strict=True)
            )
        ]
        into.copy_(_fetched(plan, stored))
    for shard, box in zip(shards, wanted, strict=True):
        assert torch.equal(shard, all_of_it[_slices(box)])


def _boxes(at_rows: list[int], at_columns: list[int]) -> list[tuple[Any, Any]]:
    row_ends, column_ends = ([0, *some, 12] for some in (at_rows, at_columns))
    return [
        ((row, column), (row_end - row, column_end - column))
        for row, row_end in pairwise(row_ends)
        for column, column_end in pairwise(column_ends)
    ]


def _slices(box: tuple[Any, Any]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(*box, strict=True))


def _fetched(plan: TensorPlan, stored: memoryview) -> torch.Tensor:
    into = torch.empty(plan.shape, dtype=torch.uint8)
    memory = into.view(-1).numpy().data
    for fetch in plan.fetches:
        run = b"".join(stored[one.offset :][: one.length] for one in fetch.extents)
        if isinstance(fetch.goes, Pick):
            copy_picked(fetch.goes, plan.dtype, memoryview(run), memory)
        else:
            memory[fetch.goes : fetch.goes + fetch.length] = run
    return into


@pytest.mark.parametrize(
    ("name", "offset", "lengths"),
    [("other", (0, 0), (1, 1)), ("w", (3, 0), (2, 3)), ("w", (-1, 0), (1, 3)), ("w", (0,), (1,))],
)
def test_an_item_of_what_is_not_there_is_refused(
    name: str, offset: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    zeros = torch.Size((0,) * len(offset))
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, zeros),
        dest_offsets=zeros,
        storage_index=MetadataIndex(name, zeros),
        storage_offsets=torch.Size(offset) if min(offset) >= 0 else offset,  # type: ignore[arg-type]
        lengths=torch.Size(lengths),
    )
    with pytest.raises(NoSuchThing, match=name):
        plan_items({"w": HALVES}, [item])


PICKLE = b"cbuiltins\nexec\n(S'raise SystemExit(1)'\ntR."
"""Ends whoever unpickles it."""


@pytest.mark.parametrize(
    "content",
    [
        PICKLE,
        b'{"format":1,"objects":{"epoch":{"pickle":"gASVAAAA"}},"paths":{}}',
        b'{"format":1,"objects":{"epoch":{"__class__":"os.system"}},"paths":{}}',
        b'{"format":1,"objects":{},"paths":{"epoch":["a",4000000000]}}',
        b'{"format":1,"objects":' + b"[" * 100_000,
        b'{"format":1,"objects":{"epoch":' + b"[" * 100_000 + b"]" * 100_000 + b'},"paths":{}}',
        b"",
        b"\xff\xfe",
    ],
    ids=["pickle", "tag", "class", "long list", "torn", "deep", "empty", "no text"],
)
def test_state_that_is_not_ours_runs_nothing_and_takes_no_memory(
    tmp_path: Path, content: bytes
) -> None:
    world = world_in(tmp_path)
    with opened(world) as yard:
        save(yard, 1, {"w": rows(noise(4, 4), 2)}, state_text=content)
        reader = YardReader(yard, RUN)
        tracemalloc.start()
        try:
            with refused(YardError):
                dcp_load({"w": torch.zeros(4, 4)}, reader)
            assert tracemalloc.get_traced_memory()[1] < 64 * MIB
        finally:
            tracemalloc.stop()


def hostile(change: Any) -> bytes:
    """A manifest that claims too much, as it would lie in a store."""
    block = BlockEntry(block_id(bytes(MIB)).hex, MIB)
    tensor = entry("w", (MIB,), ((0,), (MIB,)))
    honest = Manifest(1, MIB, (block,), (), (tensor,))
    made = msgspec.json.decode(msgspec.json.encode(honest))
    change(made["tensors"][0])
    return msgspec.json.encode(made)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.update(shape=[2**40, 2**40]),
        lambda tensor: tensor.update(shape=[2**52]),
        lambda tensor: tensor["boxes"][0].update(offset=[1]),
        lambda tensor: tensor["boxes"][0].update(shape=[2 * MIB]),
        lambda tensor: tensor["boxes"].append({**tensor["boxes"][0], "offset": [5]}),
        lambda tensor: tensor.update(boxes=[]),
        lambda tensor: tensor.update(shape=[1] * 1000),
    ],
    ids=["beyond 64 bits", "huge", "outside", "longer", "twice", "no box", "many dimensions"],
)
def test_a_manifest_that_claims_too_much_is_refused_before_memory_is_taken(change: Any) -> None:
    text = hostile(change)
    tracemalloc.start()
    try:
        with pytest.raises(ManifestInvalid):
            manifests.from_json(text, None)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def swollen(manifest: Manifest) -> Manifest:
    """The first tensor is its own block again and again: valid, and 16 GiB when spelled out."""
    first, *rest = manifest.tensors
    length = 16 << 30
    extents = first.boxes[0].extents * (length // MIB)
    huge = msgspec.structs.replace(first, shape=(length,), boxes=(Box((0,), (length,), extents),))
    return msgspec.structs.replace(manifest, tensors=(huge, *rest))


def test_a_tensor_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    tensors = {"huge": whole(torch.ones(MIB, dtype=torch.uint8)), "w": rows(noise(4, 4), 2)}
    with opened(world_in(tmp_path)) as yard:
        save(yard, 1, tensors, forge=swollen)
        reader = YardReader(yard, RUN)
        tracemalloc.start()
        try:
            state = {"w": torch.zeros(4, 4)}
            dcp_load(state, reader)
            with refused(ValueError, "huge"):
                dcp_load({"huge": torch.zeros(MIB, dtype=torch.uint8)}, reader)
            assert tracemalloc.get_traced_memory()[1] < 64 * MIB
        finally:
            tracemalloc.stop()
        assert is_same(state["w"], tensors["w"].tensor)
