"""Layouts: how a tensor is spread over ranks, and which slice of it is this rank's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from weightyard.errors import Unsupported
from weightyard.loader.slicing import Index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


@dataclass(frozen=True, slots=True)
class Layout:
    """As a DTensor has it: a mesh of ranks and, for each of its dimensions, `Shard` or `Replicate`.

    Wherever one is asked for, a DTensor itself will do as well.
    """

    device_mesh: DeviceMesh
    placements: Sequence[Placement]


def is_layout(value: object) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


def local_index(layout: Any, shape: Sequence[int]) -> Index:
    """The slice of a tensor of this shape that this rank has. Raises Unsupported."""
    coordinate = layout.device_mesh.get_coordinate()
    if coordinate is None:
        raise Unsupported("this rank is not in the mesh of the layout")
    rows = [[range(size)] for size in shape]
    for placement, ranks, rank in zip(
        layout.placements, layout.device_mesh.shape, coordinate, strict=True
    ):
        # With FSDP2 over tensor parallelism, later dimensions of the mesh cut first: a strided
        # shard is a part of each of the pieces they made. `is_shard()` is False for it.
        pieces = getattr(placement, "split_factor", 1)
        if hasattr(placement, "split_factor") or placement.is_shard():
            cut = [_chunk(one, ranks, rank) for one in _chunks(rows[placement.dim], pieces)]
            rows[placement.dim] = [run for runs in cut for run in runs]
        elif not placement.is_replicate():
            raise Unsupported(f"{placement}: tensors are loaded sharded or replicated")
    return tuple(_one_run(runs, layout.placements) for runs in rows)


def _chunks(runs: Sequence[range], count: int) -> list[list[range]]:
    return [_chunk(runs, count, number) for number in range(count)]


def _chunk(runs: Sequence[range], count: int, number: int) -> list[range]:
    """One of so many parts, as torch.chunk cuts: the last ones may be short, or empty."""
    length = -(-sum(map(len, runs)) // count)
    skip, left = number * length, length
    found = []
    for run in runs:
        if part := run[skip : skip + left]:
            found.append(part)
        skip, left = max(0, skip - len(run)), left - len(part)
    return found


def _one_run(runs: Sequence[range], placements: Sequence[Placement]) -> slice:
    if not runs:
        return slice(0, 0)
    if any(before.stop != after.start for before, after in pairwise(runs)):
        raise Unsupported(
            f"{tuple(placements)}: this rank's rows are not next to each other: shard otherwise"
        )
    return slice(runs[0].start, runs[-1].stop)
