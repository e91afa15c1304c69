"""Loaded: blocks of a version that lie in the host's memory, in tensors that were loaded.

The tensors belong to the caller, who may change, drop or move them at any time. So only weak
references are kept, and bytes taken from them count only once they have the name of their block.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from weightyard.closing import Closing
from weightyard.format.block import MIB, block_id
from weightyard.format.manifest import Manifest
from weightyard.loader.plan import TensorPlan
from weightyard.loader.proving import read_proved
from weightyard.loader.state import bytes_of, torch_dtype
from weightyard.names import BlockId
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import ReadReport

if TYPE_CHECKING:
    import torch

_COPIED_BYTES = MIB
_SCRATCH_BYTES = 64 * MIB

ReadStore: TypeAlias = Callable[[Sequence[Wanted], Callable[[int], None] | None], ReadReport]
"""Fills every buffer from the store, or raises."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a block that lie in a tensor's memory."""

    offset: int
    """In the block."""
    length: int
    memory: weakref.ref[torch.UntypedStorage]
    at: int
    """In that memory."""

    @property
    def end(self) -> int:
        return self.offset + self.length


class Loaded:
    """What was loaded of a version, and where it lies if it is on the host as it is stored."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._parts: dict[BlockId, list[_Part]] = defaultdict(list)

    @property
    def rest_bytes(self) -> int:
        """Of blocks of the version of which nothing lies in the host's memory any more."""
        return sum(block.raw_bytes for block in self.manifest.blocks if not self._is_here(block.id))

    def note(self, plan: TensorPlan, tensor: torch.Tensor) -> None:
        """Remember where a tensor is, as long as it lives."""
        memory = _memory_of(plan, tensor)
        begin = int(tensor.storage_offset()) * tensor.element_size()
        for fetch in plan.fetches:
            at = begin + fetch.goes if isinstance(fetch.goes, int) else None  # else scattered
            if memory is None or at is None:
                continue
            for extent in fetch.extents:
                part = _Part(extent.offset, extent.length, memory, at)
                self._parts[self.manifest.blocks[extent.block].id].append(part)
                at += extent.length

    def parts(self, block: BlockId) -> Sequence[_Part]:
        """The known parts of a block, ordered by where they begin."""
        return sorted(self._parts.get(block, ()), key=lambda part: part.offset)

    def _is_here(self, block: BlockId) -> bool:
        return any(part.memory() is not None for part in self._parts.get(block, ()))


class LoadedReader(Closing):
    """Reads blocks out of what was loaded; what is not there, or was changed, from the store.

    Every block is hashed as a whole and compared with its name. For one thread. Takes little memory
    besides what reading the store takes.
    """

    def __init__(self, loaded: Loaded, read_store: ReadStore) -> None:
        self._loaded = loaded
        self._read_store = read_store
        self._sizes = {block.id: block.raw_bytes for block in loaded.manifest.blocks}
        self._copies = os.memfd_create("weightyard-copies", os.MFD_CLOEXEC)
        self.taken_bytes = 0
        """What was taken from memory."""
        self.read_bytes = 0
        """What was read from the store."""

    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], None] | None = None, /
    ) -> ReadReport:
        """Fill every buffer. Raises what reading the store raises, BlockCorrupt."""
        by_block: dict[BlockId, list[Wanted]] = defaultdict(list)
        for want in wanted:
            by_block[want.block].append(want)
        missing: list[tuple[int, list[Wanted]]] = []
        for block, wants in by_block.items():
            if not self._take(block, wants):
                missing.append((self._sizes[block], wants))
                continue
            done_bytes = sum(want.into.nbytes for want in wants)
            self.taken_bytes += done_bytes
            if progress is not None:
                progress(done_bytes)
        report = ReadReport()
        for some in _in_turns(missing):
            self.read_bytes += sum(want.into.nbytes for want in some)
            report += read_proved(lambda them: self._read_store(them, progress), self._sizes, some)
        return report

    def close(self) -> None:
        if self._copies >= 0:
            os.close(self._copies)
            self._copies = -1

    def _take(self, block: BlockId, wants: Sequence[Wanted]) -> bool:
        """Fill buffers with a block's bytes if all of it is there and right."""
        length = self._sizes[block]
        whole = next((want.into for want in wants if want.into.nbytes == length), None)
        raw = np.empty(length, np.uint8).data if whole is None else whole
        # The copy is hashed, not what it is made of: that may change at any time.
        if not self._put_together(block, raw) or block_id(raw) != block:
            return False
        for want in wants:
            if want.into is not whole:
                want.into[:] = raw[want.offset : want.end]
        return True

    def _put_together(self, block: BlockId, raw: memoryview) -> bool:
        done = 0
        for part in self._loaded.parts(block):
            if part.offset > done or done == raw.nbytes:
                break
            if part.end > done and (memory := part.memory()) is not None:
                into = raw[done : part.end]
                if not self._copy(memory, part.at + done - part.offset, into):
                    return False
                done = part.end
        return done == raw.nbytes

    def _copy(self, memory: torch.UntypedStorage, at: int, into: memoryview) -> bool:
        """Copy what a storage holds now; False if it holds that no more."""
        import torch

        source = bytes_of(torch.empty(0, dtype=torch.uint8).set_(memory))
        if at + into.nbytes > source.nbytes:
            return False
        for begin in range(0, into.nbytes, _COPIED_BYTES):
            piece = into[begin : begin + _COPIED_BYTES]
            # The storage lives, but its memory may be freed meanwhile: `share_memory_` replaces it.
            # Reading it would then kill this process; to the kernel's write it is an error.
            try:
                copied = os.pwrite(self._copies, source[at + begin :][: piece.nbytes], 0)
                if copied != piece.nbytes or os.preadv(self._copies, [piece], 0) != copied:
                    return False
            except OSError:
                return False
        return True


def _in_turns(blocks: Iterable[tuple[int, list[Wanted]]]) -> Iterator[list[Wanted]]:
    """What is wanted of blocks, in groups that take little memory to prove."""
    together: list[Wanted] = []
    scratch_bytes = 0
    for length, wants in blocks:
        is_whole = any(want.into.nbytes == length for want in wants)
        scratch_bytes += 0 if is_whole else length
        if together and scratch_bytes > _SCRATCH_BYTES:
            yield together
            together, scratch_bytes = [], length
        together += wants
    if together:
        yield together


def _memory_of(plan: TensorPlan, tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage] | None:
    """The memory in which a tensor's bytes lie as they are stored; None if they do not.

    Memory that can be resized is left out: its owner may do so at any time.
    """
    if (
        tensor.device.type != "cpu"
        or tensor.dtype != torch_dtype(plan.dtype)
        or not tensor.is_contiguous()
        or tensor.nbytes != plan.bytes
    ):
        return None
    storage = tensor.untyped_storage()
    return None if storage.resizable() else weakref.ref(storage)
