"""A checkpoint's manifest and state, as torch's distributed checkpoint describes one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from weightyard.errors import Damaged, NoSuchThing, Unsupported
from weightyard.format.manifest import FileEntry, Manifest, TensorEntry
from weightyard.loader.plan import TensorPlan, plan_region
from weightyard.loader.slicing import Steps
from weightyard.loader.state import torch_dtype
from weightyard.trainer.state import MAX_STATE_BYTES, STATE_FILE, State


def state_entry(manifest: Manifest) -> FileEntry | None:
    """The file of all that is not a tensor; None if there is none. Raises Damaged.

    Its length is only what the manifest claims: so it is bounded before anyone makes room for it.
    """
    for file in manifest.files:
        if file.path == STATE_FILE.text:
            if file.bytes > MAX_STATE_BYTES:
                raise Damaged(f"{file.path} of {file.bytes} bytes; at most {MAX_STATE_BYTES}")
            return file
    return None


def entries_of(manifest: Manifest) -> dict[str, TensorEntry]:
    """The tensors of a state dict, by FQN. Raises NoSuchThing where they are in files."""
    entries = {entry.name: entry for entry in manifest.tensors if entry.file is None}
    if manifest.tensors and not entries:
        raise NoSuchThing(
            "it is no checkpoint: its tensors are in files; `yard.load_into` loads them"
        )
    return entries


def metadata_of(entries: Mapping[str, TensorEntry], state: State) -> Metadata:
    """What torch wants to know of a checkpoint before it plans.

    Raises Damaged if tensors and state contradict each other, Unsupported for an element type
    torch does not have.
    """
    described: dict[str, STORAGE_TYPES] = {name: _tensor(one) for name, one in entries.items()}
    for name in state.objects:
        if name in described:
            raise Damaged(f"{STATE_FILE}: {name[:200]} is a tensor and something else, too")
        described[name] = BytesStorageMetadata()
    for name in state.paths:
        if name not in described:
            raise Damaged(f"{STATE_FILE}: it leads to {name[:200]}, which is not there")
    return Metadata(described, planner_data=dict(state.paths) or None)


def plan_items(entries: Mapping[str, TensorEntry], items: Iterable[ReadItem]) -> list[TensorPlan]:
    """What to fetch for the tensors that a load plan reads, in its order.

    Raises NoSuchThing for what the checkpoint does not have.
    """
    return [
        _item(entries, item, number)
        for number, item in enumerate(items)
        if item.type == LoadItemType.TENSOR
    ]


def _item(entries: Mapping[str, TensorEntry], item: ReadItem, number: int) -> TensorPlan:
    index = item.storage_index
    entry = entries.get(index.fqn)
    if entry is None:
        raise NoSuchThing(f"the checkpoint has no tensor {index.fqn[:200]!r}")
    chunk = index.offset or (0,) * len(entry.shape)
    region = tuple(
        Steps(begin + within, length)
        for begin, within, length in zip(chunk, item.storage_offsets, item.lengths, strict=True)
    )
    if len(region) != len(entry.shape) or any(
        steps.start < 0 or steps.count < 0 or steps.start + steps.count > size
        for steps, size in zip(region, entry.shape, strict=True)
    ):
        raise NoSuchThing(
            f"tensor {index.fqn[:200]} of shape {list(entry.shape)} has no part at "
            f"{[steps.start for steps in region]} of shape {list(item.lengths)}"
        )
    # Several items may be of one tensor, so its name alone does not tell them apart.
    return plan_region(entry, region, (f"{index.fqn}#{number}",))


def _tensor(entry: TensorEntry) -> TensorStorageMetadata:
    try:
        dtype = torch_dtype(entry.dtype)
    except Unsupported as why:
        raise Unsupported(f"tensor {entry.name[:200]}: {why}") from None
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        torch.Size(entry.shape),
        [ChunkStorageMetadata(_size(box.offset), _size(box.shape)) for box in entry.boxes],
    )


def _size(dims: Sequence[int]) -> torch.Size:
    return torch.Size(dims)
