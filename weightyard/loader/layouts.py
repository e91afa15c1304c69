"""Layouts: how a tensor is spread over ranks, and which slice of it is this rank's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightyard.errors import Unsupported
from weightyard.loader.slicing import Index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


@dataclass(frozen=True, slots=True)
class Layout:
    """As a DTensor has it: a mesh of ranks and, for each of its dimensions, `Shard` or `Replicate`.

    A DTensor itself does as well wherever one of these is asked for.
    """

    device_mesh: DeviceMesh
    placements: Sequence[Placement]


def is_layout(value: object) -> bool:
    return hasattr(value, "device_mesh") and hasattr(value, "placements")


def local_index(layout: Any, shape: Sequence[int]) -> Index:
    """The slice of a tensor of this shape that this rank has. Raises Unsupported."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in layout.placements:
        if not (placement.is_shard() or placement.is_replicate()):
            raise Unsupported(f"{placement}: tensors are loaded sharded or replicated")
    if layout.device_mesh.get_coordinate() is None:
        raise Unsupported("this rank is not in the mesh of the layout")
    sizes, offsets = compute_local_shape_and_global_offset(
        tuple(shape), layout.device_mesh, tuple(layout.placements)
    )
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
