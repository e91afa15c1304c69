"""Comparing two versions by their manifests. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightyard.format.manifest import Extent, Manifest
from weightyard.records import Diff

_Content = tuple[object, ...]


def diff_manifests(before: Manifest, after: Manifest) -> Diff:
    """What was added, removed and changed. Equal bytes are the same, wherever they lie."""
    old_tensors, new_tensors = _tensors(before), _tensors(after)
    old_files, new_files = _files(before), _files(after)
    sizes = {block.hex: block.raw_bytes for block in (*before.blocks, *after.blocks)}
    shared = {block.hex for block in before.blocks} & {block.hex for block in after.blocks}
    return Diff(
        tensors_added=_only_in(new_tensors, old_tensors),
        tensors_removed=_only_in(old_tensors, new_tensors),
        tensors_changed=_changed(old_tensors, new_tensors),
        tensors_same=_same(old_tensors, new_tensors),
        files_added=_only_in(new_files, old_files),
        files_removed=_only_in(old_files, new_files),
        files_changed=_changed(old_files, new_files),
        files_same=_same(old_files, new_files),
        before_bytes=sum(block.raw_bytes for block in before.blocks),
        after_bytes=sum(block.raw_bytes for block in after.blocks),
        shared_bytes=sum(sizes[name] for name in shared),
    )


def _tensors(manifest: Manifest) -> dict[str, _Content]:
    found: dict[str, _Content] = {}
    for tensor in manifest.tensors:
        file = f"{manifest.files[tensor.file].path}:" if tensor.file is not None else ""
        boxes = tuple(
            (box.offset, box.shape, _bytes_of(manifest, box.extents)) for box in tensor.boxes
        )
        found[f"{file}{tensor.name}"] = (tensor.dtype, tensor.shape, boxes)
    return found


def _files(manifest: Manifest) -> dict[str, _Content]:
    return {file.path: _bytes_of(manifest, file.extents) for file in manifest.files}


def _bytes_of(manifest: Manifest, extents: Sequence[Extent]) -> _Content:
    """What a list of extents holds, in terms of content."""
    return tuple((manifest.blocks[e.block].hex, e.offset, e.length) for e in extents)


def _only_in(these: Mapping[str, _Content], those: Mapping[str, _Content]) -> tuple[str, ...]:
    return tuple(sorted(these.keys() - those.keys()))


def _changed(old: Mapping[str, _Content], new: Mapping[str, _Content]) -> tuple[str, ...]:
    return tuple(sorted(name for name in old.keys() & new.keys() if old[name] != new[name]))


def _same(old: Mapping[str, _Content], new: Mapping[str, _Content]) -> int:
    return sum(old[name] == new[name] for name in old.keys() & new.keys())
