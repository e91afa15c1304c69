"""Checkpoints of several boxes, made without a training job, for the tests of reading them."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_world import World
from torch.distributed.checkpoint.api import CheckpointException

from weightyard.format.assembly import joined, share_of
from weightyard.format.manifest import Manifest
from weightyard.format.pack import PACK_LIMIT_BYTES
from weightyard.format.splitting import BoxShape, StateTensor, split_plain, split_state
from weightyard.loader.state import bytes_of, dtype_of
from weightyard.names import ModelName
from weightyard.records import Checkpoint, Publication, Version
from weightyard.trainer.reader import YardReader
from weightyard.trainer.state import STATE_FILE, State, encode
from weightyard.transfer.bases import bases_of
from weightyard.transfer.publish import publish
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer
from weightyard.yard import Yard

RUN = "team/run42"


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(0.02).to(dtype)


@dataclass(frozen=True)
class Cut:
    """A tensor, and where along each dimension it is cut into boxes."""

    tensor: torch.Tensor
    at: Mapping[int, Sequence[int]]

    def boxes(self) -> list[BoxShape]:
        shape = self.tensor.shape
        ends = [(0, *self.at.get(dim, ()), size) for dim, size in enumerate(shape)]
        spans = [list(itertools.pairwise(some)) for some in ends]
        return [
            BoxShape(tuple(one[0] for one in box), tuple(one[1] - one[0] for one in box))
            for box in itertools.product(*spans)
        ]


def whole(tensor: torch.Tensor) -> Cut:
    return Cut(tensor, {})


def rows(tensor: torch.Tensor, *at: int) -> Cut:
    return Cut(tensor, {0: at})


def columns(tensor: torch.Tensor, *at: int) -> Cut:
    return Cut(tensor, {1: at})


def save(
    yard: Yard,
    step: int,
    tensors: Mapping[str, Cut],
    state: State | None = None,
    *,
    base: Manifest | None = None,
    compress: bool = True,
    pack_bytes: int = PACK_LIMIT_BYTES,
    state_text: bytes | None = None,
    forge: Callable[[Manifest], Manifest] | None = None,
) -> Version:
    """Publish a checkpoint; the boxes of a tensor go to as many ranks, by turns.

    `base`: what changed is stored as deltas of this version's blocks. `forge`: what is published
    instead of the manifest.
    """
    name = ModelName.parse(RUN)
    generation = yard.catalogue.begin_generation(name).generation
    ranks = max([len(one.boxes()) for one in tensors.values()], default=1)
    checkpoint = Checkpoint(step=step, generation=generation, ranks=ranks)
    publication = Publication(checkpoint=checkpoint)
    upload = yard.catalogue.open_upload(name, publication)
    delta: Literal["off", "only"] = "off" if base is None else "only"
    options = WriteOptions(compress=compress, delta=delta, pack_bytes=pack_bytes)
    writer = Writer(yard.store, upload, options, bases=Reader(yard.store, yard.catalogue))
    contents = [_share(tensors, rank, yard.block_bytes) for rank in range(ranks)]
    if state is not None or state_text is not None:
        text = encode(state or State()) if state_text is None else state_text
        split = split_plain(STATE_FILE, len(text), yard.block_bytes)
        contents.append(Content(split, [MemorySource(text)]))
    if base is not None:
        contents = [Content(one.split, one.sources, bases_of(one.split, base)) for one in contents]
    blocks = writer.write(contents)
    shares = [share_of(one.split, ids) for one, ids in zip(contents, blocks, strict=True)]
    for rank in range(ranks):
        upload.finish_rank(rank)
    manifest = joined(shares, yard.block_bytes)
    if forge is not None:
        manifest = forge(manifest)
    return publish(yard.store, upload, manifest, publication, upload.id.hex)


def _share(tensors: Mapping[str, Cut], rank: int, block_bytes: int) -> Content:
    entries, sources = [], []
    for name, cut in tensors.items():
        boxes = [box for number, box in enumerate(cut.boxes()) if number == rank]
        if not boxes and cut.tensor.numel():
            continue
        kind, shape = dtype_of(name, cut.tensor), tuple(cut.tensor.shape)
        entries.append(StateTensor(name, kind, shape, boxes=tuple(boxes)))
        for box in boxes:
            part = cut.tensor[
                tuple(
                    slice(begin, begin + size)
                    for begin, size in zip(box.offset, box.shape, strict=True)
                )
            ]
            if part.numel():
                sources.append(MemorySource(bytes_of(part.contiguous())))
    return Content(split_state(entries, block_bytes), sources)


def world_in(folder: Path) -> World:
    return World(folder, str(folder / "store"))


def opened(world: World, **settings: Any) -> AbstractContextManager[Yard]:
    """The yard, as one who is no rank opens it."""
    return world.yard(99, **settings)


def stored_bytes(yard: Yard, ref: str) -> int:
    """Of all blocks a version needs, and of the bases of those that are deltas."""
    needed = {block.id for block in yard.manifest(ref).blocks}
    placed = yard.catalogue.placements(sorted(needed))
    total, bases = 0, set()
    for places in placed.values():
        best = min(
            places, key=lambda one: (one.encoding.base is not None, one.encoding.stored_bytes)
        )
        total += best.encoding.stored_bytes
        bases |= {best.encoding.base} - {None}
    for places in yard.catalogue.placements(sorted(bases)).values():
        alone = [one for one in places if one.encoding.base is None]
        total += min(one.encoding.stored_bytes for one in alone)
    return total


def dcp_load(state: dict[str, Any], reader: YardReader, **more: Any) -> None:
    """Without a group, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(state, storage_reader=reader, **more)


@contextmanager
def refused(error: type[Exception], said: str = "") -> Iterator[None]:
    """What is inside raises an error, which torch wraps into one of its own."""
    with pytest.raises(CheckpointException) as found:
        yield
    ((why, _),) = found.value.failures.values()
    assert isinstance(why, error), repr(why)
    assert re.search(said, str(why)), str(why)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(bits(left), bits(right))
    )
