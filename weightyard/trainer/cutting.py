"""Cutting: a rank's part of a checkpoint as content to write, and all parts as one manifest.

A checkpoint's tensors are those of a state dict (docs/format.md §6): of no file, named by FQN. Each
shard that torch planned to write is a box: its offset and shape count elements of the whole tensor,
its extents hold its elements in row-major order. Each box is cut for itself, every block size;
boxes under 64 KiB share bundles with others of the same rank, by name. A box without elements is
left out, so a tensor without elements has no box. All else is in `state.json`; see `state.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from weightyard.errors import Refused
from weightyard.format.assembly import Share, joined
from weightyard.format.dtypes import DType, nbytes
from weightyard.format.manifest import Manifest, TensorEntry
from weightyard.format.splitting import BoxShape, StateTensor, split_state
from weightyard.loader.state import bytes_of, dtype_of
from weightyard.transfer.source import Source
from weightyard.transfer.writer import Content

_MADE_TENSORS = 2
"""How many tensors that a planner makes on request are kept: hashing and encoding go in order."""


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a tensor that this rank is to write."""

    name: str
    dtype: DType
    tensor_shape: tuple[int, ...]
    shape: BoxShape
    take: Callable[[], torch.Tensor]
    """Gives the tensor with its elements, wherever it is; always with the same values."""
    is_made: bool
    """Whether they are made when they are taken, and gone afterwards."""
    storage: Hashable | None
    """Equal for boxes that are one and the same memory; None: it is no other box's."""


def boxes_of(items: Sequence[WriteItem], planner: SavePlanner) -> list[TensorBox]:
    """What tensor items of a plan are about. Raises Refused for a tensor that cannot be stored."""
    make = lru_cache(_MADE_TENSORS)(lambda number: _resolved(items[number], planner))
    boxes = []
    for number, item in enumerate(items):
        assert item.tensor_data is not None, f"{item.index.fqn} is planned as a tensor"
        chunk = item.tensor_data.chunk
        tensor = _resolved(item, planner)
        if tuple(tensor.shape) != tuple(chunk.sizes):
            raise Refused(
                f"{item.index.fqn}: planned as {tuple(chunk.sizes)}, but is {tuple(tensor.shape)}"
            )
        # What a planner makes for us (a cast, say) is made again whenever it is needed: kept all at
        # once it would be a second copy of the state. It has another address each time, while the
        # state's own memory stays where it is.
        is_made = _resolved(item, planner).data_ptr() != tensor.data_ptr()
        boxes.append(
            TensorBox(
                item.index.fqn,
                dtype_of(item.index.fqn, tensor),
                tuple(item.tensor_data.size),
                BoxShape(tuple(chunk.offsets), tuple(chunk.sizes)),
                partial(make, number) if is_made else partial(_itself, tensor),
                is_made,
                None if is_made or not tensor.numel() else (tensor.data_ptr(), tensor.stride()),
            )
        )
    return boxes


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    name = item.index.fqn
    if not isinstance(tensor, torch.Tensor):
        raise Refused(f"{name}: the planner gives a {type(tensor).__name__} instead of a tensor")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise Refused(f"{name}: a tensor without plain memory ({tensor.layout}, {tensor.device})")
    return tensor.detach().resolve_conj().resolve_neg()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def cut(boxes: Sequence[TensorBox], block_bytes: int) -> Content:
    """A rank's boxes as content to write. Raises InvalidName, Refused."""
    by_name: dict[str, list[TensorBox]] = defaultdict(list)
    for box in boxes:
        if 0 not in box.shape.shape or 0 in box.tensor_shape:
            by_name[box.name].append(box)
    tensors: list[StateTensor] = []
    sources: list[Source] = []
    for name, same in by_name.items():
        same.sort(key=lambda box: box.shape.offset)
        if len({(box.dtype, box.tensor_shape) for box in same}) != 1:
            raise Refused(f"{name}: its shards differ in dtype, or in the shape of the whole")
        memory = tuple(box.storage for box in same)
        tensors.append(
            StateTensor(
                name,
                same[0].dtype,
                same[0].tensor_shape,
                storage=None if None in memory else memory,
                boxes=tuple(box.shape for box in same),
            )
        )
        sources += [TensorSource(box) for box in same if 0 not in box.shape.shape]
    return Content(split_state(tensors, block_bytes), sources)


class TensorSource(Source):
    """A box's elements in row-major order, wherever they are and however they are laid out.

    Copies only what is asked for, and keeps no copy.
    """

    def __init__(self, box: TensorBox) -> None:
        self._take = box.take
        self._is_made = box.is_made
        self.length = nbytes(box.dtype, box.shape.shape)

    def read_into(self, offset: int, into: memoryview) -> None:
        tensor = self._take()
        width = tensor.element_size()
        at = 0
        for run in _runs(tensor, offset // width, (offset + len(into)) // width):
            data = bytes_of(run.to("cpu").contiguous())
            # Not by assigning memoryviews, which keeps Python's other threads from running.
            part = np.frombuffer(into[at : at + data.nbytes], np.uint8)
            np.copyto(part, np.frombuffer(data, np.uint8))
            at += data.nbytes

    def view(self, offset: int, length: int) -> memoryview | None:
        if self._is_made:  # whoever holds the view would hold all of it
            return None
        tensor = self._take()
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        return bytes_of(tensor)[offset : offset + length]


def _runs(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """The elements start … stop - 1 in row-major order, in runs that can be copied at once.

    A part of a large tensor that is not contiguous must not cost a copy of all of it.
    """
    if tensor.is_contiguous():
        yield tensor.reshape(-1)[start:stop]
        return
    row = tensor[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _runs(tensor[last], start - last * row, stop - last * row)
        return
    if start % row:
        yield from _runs(tensor[first - 1], start % row, row)
    if first < last:
        yield tensor[first:last].reshape(-1)
    if stop % row:
        yield from _runs(tensor[last], 0, stop % row)


def manifest_of_shares(shares: Sequence[Share], block_bytes: int) -> Manifest:
    """The manifest of a checkpoint from the shares of its ranks.

    A tie is kept if each rank that wrote a box of the tensor saw it, with the first tensor's box
    beside it; if the two tensors were written by different ranks, none of them saw it.
    Raises ManifestInvalid if the shares do not make a whole checkpoint, Refused.
    """
    ties: dict[str, set[str | None]] = defaultdict(set)
    boxes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for tensor in (tensor for share in shares for tensor in share.tensors):
        ties[tensor.name].add(tensor.tied)
        boxes[tensor.name] |= {box.offset for box in tensor.boxes}

    def settled(tensor: TensorEntry) -> TensorEntry:
        first = tensor.tied
        is_tied = first is not None and ties[tensor.name] == {first} and ties[first] == {None}
        if is_tied and boxes[tensor.name] == boxes[str(first)]:
            return tensor
        return msgspec.structs.replace(tensor, tied=None)

    return joined(
        [replace(share, tensors=tuple(map(settled, share.tensors))) for share in shares],
        block_bytes,
    )
