"""Publishing: a checkpoint's weights as a version of a model.

Tensors that stay as they are become a new manifest over the checkpoint's blocks: not a byte is
copied. Tensors that get another dtype, are cut anew into one box each, or go to another project
where a yard keeps the content of projects apart, are read and written again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch.distributed.tensor import DTensor

from weightyard.errors import DoesNotFit, NoSuchThing, Refused
from weightyard.format.assembly import Share, joined, share_of
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType, nbytes
from weightyard.format.manifest import Manifest, TensorEntry
from weightyard.format.splitting import SMALL_BYTES
from weightyard.loader.state import is_other, state_content, torch_dtype
from weightyard.logs import Log
from weightyard.names import ModelName, is_tensor_name
from weightyard.records import Publication, Pushed, Version
from weightyard.transfer.alive import kept_alive
from weightyard.transfer.catalogue import Packing
from weightyard.transfer.durable import least_replicas
from weightyard.transfer.publish import publish
from weightyard.transfer.writer import WriteOptions, Writer

if TYPE_CHECKING:
    from weightyard.yard import Yard

_log = Log(__name__)

_BATCH_BYTES = 256 * MIB
"""How much is written anew at once: bounds the memory, yet lets packs become full."""

_CLAIM_BLOCKS = 1024


class Published(Pushed):
    """A version just published from a checkpoint, and what that took."""

    recoded_bytes: int = Field(
        default=0, description="Raw bytes of tensors that were read and written, after any cast"
    )


@dataclass(frozen=True, slots=True)
class Export:
    """What becomes of a checkpoint's tensors."""

    kept: Mapping[str, TensorEntry]
    """By their new names, tensors whose blocks are used as they are."""
    recoded: Mapping[str, TensorEntry]
    """By their new names, tensors that are read and written again."""
    tied: Mapping[str, str]
    """New name → the first name of the same memory. They are in none of the others."""


def plan_export(
    manifest: Manifest,
    rename: Callable[[str], str | None],
    *,
    dtype: torch.dtype | None = None,
    consolidate: bool = False,
    ties: Sequence[Sequence[str]] = (),
) -> Export:
    """Which tensors of a checkpoint are published, and how. Pure.

    `rename` gives a tensor's new name, or None to leave it out. `ties`: names, as in the
    checkpoint, of tensors that are one and the same memory. Raises NoSuchThing if nothing is left,
    DoesNotFit if two tensors would get the same name, Refused for what cannot be a name.
    """
    named: dict[str, TensorEntry] = {}
    for entry in manifest.tensors:
        if entry.file is not None or (name := rename(entry.name)) is None:
            continue
        if not isinstance(name, str) or not is_tensor_name(name):
            raise Refused(f"{entry.name[:200]}: {name!r:.80} cannot be the name of a tensor")
        if name in named:
            raise DoesNotFit(
                f"{name} would be both {named[name].name} and {entry.name}", [], [name]
            )
        named[name] = entry
    if not named:
        raise NoSuchThing("the checkpoint has no tensors to publish")
    tied = _tied(named, ties)
    kept, recoded = {}, {}
    for name, entry in named.items():
        if name in tied:
            continue
        is_cast = dtype is not None and _is_cast(entry.dtype, dtype)
        if is_cast or (consolidate and not _is_cut_as_pushed(entry, manifest)):
            recoded[name] = entry
        else:
            kept[name] = entry
    return Export(kept, recoded, tied)


def _tied(named: Mapping[str, TensorEntry], ties: Sequence[Sequence[str]]) -> dict[str, str]:
    new_names = {entry.name: name for name, entry in named.items()}
    tied = {}
    for group in ties:
        first, *others = sorted(new_names[name] for name in group if name in new_names) or [""]
        for other in others:
            one, two = named[first], named[other]
            if (one.dtype, one.shape) == (two.dtype, two.shape):
                tied[other] = first
    return tied


def _is_cast(stored: DType, to: torch.dtype) -> bool:
    now = torch_dtype(stored)
    return now.is_floating_point and now != to


def _is_cut_as_pushed(entry: TensorEntry, manifest: Manifest) -> bool:
    """Whether a push of the tensor would have blocks of just these bytes."""
    length = nbytes(entry.dtype, entry.shape)
    if length == 0:
        return True
    if len(entry.boxes) != 1 or length < SMALL_BYTES:  # small ones share blocks with others
        return False
    extents = entry.boxes[0].extents
    return all(
        extent.offset == 0
        and extent.length == manifest.blocks[extent.block].raw_bytes
        and (at == len(extents) - 1 or extent.length == manifest.block_bytes)
        for at, extent in enumerate(extents)
    )


def publish_checkpoint(
    yard: Yard,
    checkpoint: Version,
    model: ModelName,
    publication: Publication,
    export: Export,
    manifest: Manifest,
    dtype: torch.dtype | None = None,
) -> Published:
    """Make the version. All of it is visible when this returns, or nothing.

    Raises as a push and a load do, also if the checkpoint was removed meanwhile.
    """
    store = yard.store
    options = WriteOptions(min_replicas=least_replicas(store, None))
    with kept_alive(yard.catalogue.open_upload(model, publication)) as upload:
        export = _claimable(upload, manifest, export)
        writer = Writer(store, upload, options)
        shares = [_kept_share(manifest, export)]
        recoded_bytes = 0
        for state in _recoded_states(yard, checkpoint, export, dtype):
            content = state_content(state, manifest.block_bytes)
            recoded_bytes += sum(piece.raw_bytes for piece in content.split.pieces)
            (blocks,) = writer.write([content])
            shares.append(share_of(content.split, blocks))
        made = _with_ties(joined(shares, manifest.block_bytes), export.tied)
        version = publish(
            store,
            upload,
            made,
            publication,
            secrets.token_hex(16),
            min_replicas=options.min_replicas,
        )
    yard.settle()
    report = writer.report
    _log.info(
        "run.published",
        version=version.ref,
        checkpoint=checkpoint.ref,
        recoded_bytes=recoded_bytes,
        new_bytes=report.new_bytes,
    )
    return Published(
        **version.model_dump(),
        new_bytes=report.new_bytes,
        stored_bytes=report.stored_bytes,
        packs_written=report.packs_written,
        recoded_bytes=recoded_bytes,
    )


def _claimable(upload: Packing, manifest: Manifest, export: Export) -> Export:
    """Hold the blocks that are used as they are.

    Tensors with other blocks are written again: a yard may keep the content of each project apart.
    If the blocks are gone, reading them will fail and say so.
    """
    of_tensor = {name: sorted(_blocks_of(entry)) for name, entry in export.kept.items()}
    wanted = sorted({number for numbers in of_tensor.values() for number in numbers})
    missing: set[int] = set()
    for start in range(0, len(wanted), _CLAIM_BLOCKS):
        batch = wanted[start : start + _CLAIM_BLOCKS]
        held = upload.claim([manifest.blocks[number].id for number in batch])
        missing.update(number for number in batch if manifest.blocks[number].id not in held)
    lost = {name for name, numbers in of_tensor.items() if not missing.isdisjoint(numbers)}
    return Export(
        {name: entry for name, entry in export.kept.items() if name not in lost},
        {**export.recoded, **{name: export.kept[name] for name in lost}},
        export.tied,
    )


def _blocks_of(entry: TensorEntry) -> set[int]:
    return {extent.block for box in entry.boxes for extent in box.extents}


def _kept_share(manifest: Manifest, export: Export) -> Share:
    """The tensors that consist of the checkpoint's blocks as before."""
    tensors = tuple(
        TensorEntry(name, None, entry.dtype, entry.shape, entry.boxes, None)
        for name, entry in export.kept.items()
    )
    return Share(manifest.blocks, (), tensors)


def _recoded_states(
    yard: Yard, checkpoint: Version, export: Export, dtype: torch.dtype | None
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors to be written again, as state dicts of a bounded size.

    Small ones come last and all at once: they are put into blocks together, by name.
    """
    if not export.recoded:
        return
    new_names = {entry.name: name for name, entry in export.recoded.items()}
    small: dict[str, torch.Tensor] = {}
    batch: dict[str, torch.Tensor] = {}
    batch_bytes = 0
    for name, tensor in yard.stream(checkpoint.ref, tensors=sorted(new_names), dtype=dtype):
        if name not in new_names:  # tied to one that is wanted
            continue
        if tensor.nbytes < SMALL_BYTES:
            small[new_names[name]] = tensor
            continue
        if batch and batch_bytes + tensor.nbytes > _BATCH_BYTES:
            yield batch
            batch, batch_bytes = {}, 0
        batch[new_names[name]] = tensor
        batch_bytes += tensor.nbytes
    if batch:
        yield batch
    if small:
        yield small


def _with_ties(manifest: Manifest, tied: Mapping[str, str]) -> Manifest:
    entries = {entry.name: entry for entry in manifest.tensors}
    for name, first in tied.items():
        one = entries[first]
        entries[name] = TensorEntry(name, None, one.dtype, one.shape, one.boxes, first)
    tensors = tuple(entries[name] for name in sorted(entries))
    return Manifest(manifest.format, manifest.block_bytes, manifest.blocks, manifest.files, tensors)


def ties_of(items: Mapping[str, Any]) -> list[list[str]]:
    """Names of tensors that are one and the same memory."""
    same: dict[object, list[str]] = {}
    for name, value in items.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.numel():
            memory = (local.data_ptr(), local.stride(), value.shape, value.dtype, is_other(local))
            same.setdefault(memory, []).append(name)
    return [names for names in same.values() if len(names) > 1]
