"""Assembled: the tensors of a pushed state dict as a safetensors file, for servers that want one.

Of tied tensors the file has one; the names of the others are in its metadata, as safetensors' own
`save_model` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from weightyard.errors import TooLarge, Unsupported
from weightyard.format.dtypes import DType, nbytes
from weightyard.format.manifest import Extent, Manifest, TensorEntry
from weightyard.format.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES
from weightyard.loader.filling import Filled, fill
from weightyard.loader.plan import Fetch, TensorPlan, plan_tensors
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import ReadReport

_NOT_SAFETENSORS = frozenset((DType.C32, DType.C128))
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class StateFile:
    """What the file holds, and where."""

    header: bytes
    tensors: tuple[tuple[int, TensorEntry], ...]
    """The tensors, and where each begins in the file; those tied to another are left out."""
    bytes: int

    def content(self, manifest: Manifest) -> str:
        """Names what the file holds, by its blocks."""
        name = blake3(self.header)
        for _, tensor in self.tensors:
            for box in tensor.boxes:
                name.update(msgspec.json.encode((box.offset, box.shape)))
                name.update(extents_key(manifest, box.extents))
        return name.hexdigest()


def state_file(manifest: Manifest) -> StateFile | None:
    """The file of a version's state dict; None if it has none. Raises Unsupported, TooLarge."""
    entries = [tensor for tensor in manifest.tensors if tensor.file is None]
    if not entries:
        return None
    for tensor in entries:
        if tensor.dtype in _NOT_SAFETENSORS:
            raise Unsupported(
                f"tensor {tensor.name}: safetensors files have no {tensor.dtype}; load the version "
                "instead"
            )
    first = [tensor for tensor in entries if tensor.tied is None]
    first.sort(key=lambda tensor: (-tensor.dtype.bits, tensor.name))  # so that each is aligned
    metadata = {"format": "pt"}
    metadata |= {tensor.name: tensor.tied for tensor in entries if tensor.tied is not None}
    fields: dict[str, object] = {"__metadata__": metadata}
    at = 0
    offsets = []
    for tensor in first:
        end = at + nbytes(tensor.dtype, tensor.shape)
        fields[tensor.name] = {
            "dtype": tensor.dtype.value,
            "shape": tensor.shape,
            "data_offsets": (at, end),
        }
        offsets.append(at)
        at = end
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise TooLarge(f"a safetensors header of {len(text)} bytes; at most {MAX_HEADER_BYTES}")
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    begins = [len(header) + offset for offset in offsets]
    return StateFile(header, tuple(zip(begins, first, strict=True)), len(header) + at)


def extents_key(manifest: Manifest, extents: tuple[Extent, ...]) -> bytes:
    """A key for the bytes of extents: the same in every manifest, however it numbers blocks."""
    return msgspec.json.encode(
        [(manifest.blocks[extent.block].hex, extent.offset, extent.length) for extent in extents]
    )


def fill_state(
    read: Callable[[Sequence[Wanted]], ReadReport],
    manifest: Manifest,
    state: StateFile,
    into: memoryview,
) -> None:
    """Read the file's bytes. Raises what the read raises."""
    into[: len(state.header)] = state.header
    straight: list[Filled] = []
    for begin, entry in state.tensors:
        (plan,) = plan_tensors([entry])
        memory = into[begin : begin + plan.bytes]
        targets = [_target(plan, fetch, memory) for fetch in plan.fetches]
        if plan.is_picked:  # picking takes memory of its own: one tensor at a time
            fill(read, manifest.blocks, targets)
        else:
            straight += targets
    fill(read, manifest.blocks, straight)


def _target(plan: TensorPlan, fetch: Fetch, memory: memoryview) -> Filled:
    if isinstance(fetch.goes, int):
        memory = memory[fetch.goes : fetch.goes + fetch.length]
    return Filled(fetch, plan.dtype, memory)
