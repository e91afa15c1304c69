"""Verifying: whether bytes are those of the blocks they should be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import Buffer

from weightyard import codec
from weightyard.errors import BlockCorrupt
from weightyard.format.block import Encoding, block_id
from weightyard.format.manifest import FileEntry, Manifest
from weightyard.transfer.source import Source


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """Bytes of a block that lie somewhere in the file."""

    offset: int
    length: int
    at: int
    """In the file."""

    @property
    def end(self) -> int:
        return self.offset + self.length


def require_stored(encoding: Encoding, stored: memoryview) -> None:
    """See that a block's stored bytes match their checksums, with zeros between segments.

    Raises BlockCorrupt. This is all that can be checked without decoding (a delta needs its base).
    """
    codec.verify(encoding, stored)
    for index, segment in enumerate(encoding.segments):
        if any(
            stored[encoding.offsets[index] + segment.stored_bytes : encoding.offsets[index + 1]]
        ):
            raise BlockCorrupt(f"block {encoding.block}: padding of segment {index} is not zero")


def require_block(encoding: Encoding, stored: memoryview, base: Buffer | None = None) -> None:
    """The same, and that the raw bytes match the block's id and fold.

    `base`: the raw bytes of a delta's base. Raises BlockCorrupt, and Refused for a base that does
    not fit.
    """
    require_stored(encoding, stored)
    raw = np.empty(encoding.raw_bytes, np.uint8).data
    codec.decode(encoding, stored, raw, base=base)
    codec.verify_whole(encoding, raw)
    if codec.fold(raw) != encoding.fold:
        raise BlockCorrupt(f"block {encoding.block}: its fold is another")


def has_content(manifest: Manifest, file: FileEntry, source: Source) -> bool:
    """Whether a file surely has the bytes its manifest says, with every one checked."""
    try:
        require_content(manifest, file, source, all_of_it=True)
    except BlockCorrupt:
        return False
    return True


def require_content(
    manifest: Manifest, file: FileEntry, source: Source, *, all_of_it: bool = False
) -> None:
    """See that a file has the bytes its manifest says. Raises BlockCorrupt.

    A block of which the file has only a part cannot be checked: its name is a hash of all of it.
    It passes, unless `all_of_it` is to be checked.
    """
    if source.length != file.bytes:
        raise BlockCorrupt(f"{file.path} has {source.length} bytes, not {file.bytes}")
    parts: dict[int, list[_Part]] = defaultdict(list)
    at = 0
    for extent in file.extents:
        parts[extent.block].append(_Part(extent.offset, extent.length, at))
        at += extent.length
    for number, found in parts.items():
        block = manifest.blocks[number]
        raw = _whole(sorted(found), block.raw_bytes, source)
        if raw is None:
            if all_of_it:
                raise BlockCorrupt(f"{file.path} has a part only of block {block.hex}")
            continue
        again = found if len(found) > 1 else []
        if block_id(raw) != block.id or not all(_is_same(raw, part, source) for part in again):
            raise BlockCorrupt(f"{file.path}: its bytes are not those of block {block.hex}")


def _whole(parts: Sequence[_Part], raw_bytes: int, source: Source) -> bytearray | None:
    """A block put together from the file; None if the file does not have all of it."""
    raw = bytearray(raw_bytes)
    done = 0
    for part in parts:
        if part.offset > done:
            return None
        if part.end > done:
            into = memoryview(raw)[done : part.end]
            source.read_into(part.at + done - part.offset, into)
            done = part.end
    return raw if done == raw_bytes else None


def _is_same(raw: bytearray, part: _Part, source: Source) -> bool:
    """Whether a part has the bytes of the block: several parts may repeat the same ones."""
    return raw[part.offset : part.end] == source.read_at(part.at, part.length)
