"""Comparing two versions: by their manifests, and by their bytes where those do not decide.

Call order: `doubtful_pairs` → `equal_pairs`, which reads → `diff_manifests`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from weightyard.format.block import MIB
from weightyard.format.manifest import Extent, Manifest
from weightyard.names import BlockId
from weightyard.records import Diff
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import ReadsBlocks

_READ_BYTES = 16 * MIB
"""Of each version in memory at once, unless one part is longer."""


class Part(NamedTuple):
    """A run of a block's bytes."""

    block: str
    offset: int
    length: int
    is_all: bool
    """Whether it is the whole block: then a part that is all of another block has other bytes."""


class Pair(NamedTuple):
    """Parts of two versions, equally long, in the same place of a tensor or file."""

    old: Part
    new: Part


class _Content(NamedTuple):
    """What a tensor or file holds."""

    form: tuple[object, ...]
    parts: tuple[Part, ...]


def doubtful_pairs(before: Manifest, after: Manifest) -> Set[Pair]:
    """The pairs whose bytes decide whether a tensor or file changed. Pure.

    Small tensors share a block, which gets another name when any one of them changes.
    """
    both = (
        (_tensors(before), _tensors(after)),
        (_files(before), _files(after)),
    )
    return {
        pair
        for old, new in both
        for name in old.keys() & new.keys()
        for pair in _deciding(old[name], new[name]) or ()
    }


def equal_pairs(pairs: Collection[Pair], old: ReadsBlocks, new: ReadsBlocks) -> Set[Pair]:
    """The pairs whose bytes are equal. `old` and `new` read the two versions; raises as they do."""
    equal: set[Pair] = set()
    for some in _batches(sorted(pairs)):
        contents = (
            _read(old, [pair.old for pair in some]),
            _read(new, [pair.new for pair in some]),
        )
        equal.update(pair for pair, was, now in zip(some, *contents, strict=True) if was == now)
    return equal


def diff_manifests(before: Manifest, after: Manifest, equal: Set[Pair] = frozenset()) -> Diff:
    """What was added, removed and changed. Pure.

    Unchanged is what consists of the same parts of blocks, pairs in `equal` counting as the same.
    """
    old_tensors, new_tensors = _tensors(before), _tensors(after)
    old_files, new_files = _files(before), _files(after)
    tensors_changed, tensors_same = _compared(old_tensors, new_tensors, equal)
    files_changed, files_same = _compared(old_files, new_files, equal)
    sizes = {block.hex: block.raw_bytes for block in (*before.blocks, *after.blocks)}
    shared = {block.hex for block in before.blocks} & {block.hex for block in after.blocks}
    return Diff(
        tensors_added=_only_in(new_tensors, old_tensors),
        tensors_removed=_only_in(old_tensors, new_tensors),
        tensors_changed=tensors_changed,
        tensors_same=tensors_same,
        files_added=_only_in(new_files, old_files),
        files_removed=_only_in(old_files, new_files),
        files_changed=files_changed,
        files_same=files_same,
        before_bytes=sum(block.raw_bytes for block in before.blocks),
        after_bytes=sum(block.raw_bytes for block in after.blocks),
        shared_bytes=sum(sizes[name] for name in shared),
    )


def _tensors(manifest: Manifest) -> dict[str, _Content]:
    found: dict[str, _Content] = {}
    for tensor in manifest.tensors:
        file = f"{manifest.files[tensor.file].path}:" if tensor.file is not None else ""
        boxes = tuple((box.offset, box.shape) for box in tensor.boxes)
        extents = [extent for box in tensor.boxes for extent in box.extents]
        found[f"{file}{tensor.name}"] = _Content(
            (tensor.dtype, tensor.shape, boxes), _parts(manifest, extents)
        )
    return found


def _files(manifest: Manifest) -> dict[str, _Content]:
    return {file.path: _Content((), _parts(manifest, file.extents)) for file in manifest.files}


def _parts(manifest: Manifest, extents: Sequence[Extent]) -> tuple[Part, ...]:
    found = ((manifest.blocks[extent.block], extent) for extent in extents)
    return tuple(
        Part(block.hex, extent.offset, extent.length, extent.length == block.raw_bytes)
        for block, extent in found
    )


def _deciding(old: _Content, new: _Content) -> Set[Pair] | None:
    """The pairs on which equality depends; None: contents differ, or blocks are cut otherwise."""
    if old.form != new.form or len(old.parts) != len(new.parts):
        return None
    pairs = {Pair(*both) for both in zip(old.parts, new.parts, strict=True) if both[0] != both[1]}
    if any(was.length != now.length or (was.is_all and now.is_all) for was, now in pairs):
        return None
    return pairs


def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """In their order, as many together as may be in memory."""
    some: list[Pair] = []
    some_bytes = 0
    for pair in pairs:
        if some and some_bytes + pair.old.length > _READ_BYTES:
            yield some
            some, some_bytes = [], 0
        some.append(pair)
        some_bytes += pair.old.length
    if some:
        yield some


def _read(reader: ReadsBlocks, parts: Sequence[Part]) -> list[bytearray]:
    contents = [bytearray(part.length) for part in parts]
    reader.read(
        [
            Wanted(BlockId(part.block), part.offset, memoryview(content))
            for part, content in zip(parts, contents, strict=True)
        ]
    )
    return contents


def _only_in(these: Mapping[str, _Content], those: Mapping[str, _Content]) -> tuple[str, ...]:
    return tuple(sorted(these.keys() - those.keys()))


def _compared(
    old: Mapping[str, _Content], new: Mapping[str, _Content], equal: Set[Pair]
) -> tuple[tuple[str, ...], int]:
    """The names of what changed, and how much did not."""
    both = old.keys() & new.keys()
    changed = [
        name
        for name in both
        if (pairs := _deciding(old[name], new[name])) is None or not pairs <= equal
    ]
    return tuple(sorted(changed)), len(both) - len(changed)
