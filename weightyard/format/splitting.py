"""Splitting: which bytes become which blocks (docs/format.md §7).

Equal bytes are stored once only if all writers cut them alike: so the rules are part of the format.
Nothing here reads data. A split is a plan: pieces to be read, named and stored, and the files and
tensors made of them. A block's name is known only when it was read; until then extents refer to
pieces by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Protocol, TypeAlias

from weightyard.errors import BadSetting, InvalidName, Refused
from weightyard.format.block import CHUNK_BYTES, KIB, MAX_BLOCK_BYTES, MIB, Codec
from weightyard.format.dtypes import DType, codec_hint, nbytes
from weightyard.format.manifest import Box, Extent, FileEntry, TensorEntry, is_block_size
from weightyard.format.safetensors import (
    LENGTH_BYTES,
    Header,
    OddFile,
    header_length,
    parse_header,
)
from weightyard.names import FilePath, is_tensor_name

SMALL_BYTES = 64 * KIB
"""A tensor, or box of one, strictly under this shares a bundle with its neighbours."""

BUNDLE_BYTES = MIB
"""No bundle is longer."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of source bytes."""

    source: int
    """0 for a file; for a state dict the number of the box, see `split_state`."""
    start: int
    length: int


@dataclass(frozen=True)
class Piece:
    """A block to be: its raw bytes are its parts, one after the other."""

    parts: tuple[Part, ...]
    codec: Codec
    """What to try first."""

    @cached_property
    def raw_bytes(self) -> int:
        return sum(part.length for part in self.parts)


@dataclass(frozen=True, slots=True)
class Split:
    """A file, or a state dict, as pieces. In `files` and `tensors` extents number the pieces."""

    block_bytes: int
    pieces: tuple[Piece, ...]
    files: tuple[FileEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    odd: str | None = None
    """Why a file was kept as plain bytes although its suffix promised more."""


@dataclass(frozen=True, slots=True)
class BoxShape:
    """Which part of a tensor a box is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a state dict, or of one rank's share of it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    storage: Hashable | None = None
    """Equal for tensors that are one and the same memory; None for a tensor of its own."""
    boxes: tuple[BoxShape, ...] | None = None
    """The boxes at hand, each a source of its own; None: one box, the whole tensor."""

    def box_shapes(self) -> tuple[BoxShape, ...]:
        """The boxes at hand that have elements."""
        if self.boxes is None:
            whole = BoxShape((0,) * len(self.shape), self.shape)
            return () if 0 in self.shape else (whole,)
        return tuple(box for box in self.boxes if 0 not in box.shape)


class _Cutter:
    """Hands out pieces in the order in which their first bytes are wanted."""

    def __init__(self, block_bytes: int) -> None:
        if not is_block_size(block_bytes):
            raise BadSetting(
                f"block size {block_bytes}: a multiple of {CHUNK_BYTES}, at most {MAX_BLOCK_BYTES}"
            )
        self._block_bytes = block_bytes
        self._pieces: list[tuple[list[Part], set[Codec]]] = []
        self._bundle = -1
        """The number of the piece that small tensors go into."""
        self._bundle_bytes = BUNDLE_BYTES  # as if one were full: the first small tensor begins one

    def cut(self, source: int, start: int, length: int, codec: Codec) -> tuple[Extent, ...]:
        """Bytes of their own: cut every block size."""
        extents = []
        for begin in range(0, length, self._block_bytes):
            run = min(self._block_bytes, length - begin)
            extents.append(Extent(len(self._pieces), 0, run))
            self._pieces.append(([Part(source, start + begin, run)], {codec}))
        return tuple(extents)

    def tensor(self, source: int, start: int, length: int, codec: Codec) -> tuple[Extent, ...]:
        """A tensor or box: cut, or put into the bundle if it is small."""
        if not 0 < length < SMALL_BYTES:
            return self.cut(source, start, length, codec)
        if self._bundle_bytes + length > BUNDLE_BYTES:
            self._bundle, self._bundle_bytes = len(self._pieces), 0
            self._pieces.append(([], set()))
        parts, codecs = self._pieces[self._bundle]
        extent = Extent(self._bundle, self._bundle_bytes, length)
        self._bundle_bytes += length
        codecs.add(codec)
        if parts and parts[-1].source == source and parts[-1].start + parts[-1].length == start:
            parts[-1] = Part(source, parts[-1].start, parts[-1].length + length)
        else:
            parts.append(Part(source, start, length))
        return (extent,)

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(
            Piece(tuple(parts), next(iter(codecs)) if len(codecs) == 1 else Codec.ZSTD)
            for parts, codecs in self._pieces
        )


def split_plain(path: FilePath, size: int, block_bytes: int, *, odd: str | None = None) -> Split:
    """Any file: cut every block size from its start."""
    cutter = _Cutter(block_bytes)
    extents = cutter.cut(0, 0, size, Codec.ZSTD)
    file = FileEntry(path.text, size, "plain", extents)
    return Split(block_bytes, cutter.pieces(), (file,), odd=odd)


def split_safetensors(path: FilePath, header: Header, block_bytes: int) -> Split:
    """A safetensors file: its header bytes, then each tensor for itself, in data order."""
    cutter = _Cutter(block_bytes)
    extents = list(cutter.cut(0, 0, header.header_bytes, Codec.ZSTD))
    tensors = []
    for tensor in header.tensors:
        codec = codec_hint(tensor.dtype)
        mine = cutter.tensor(0, tensor.begin, tensor.end - tensor.begin, codec)
        extents += mine
        boxes = (Box((0,) * len(tensor.shape), tensor.shape, mine),) if mine else ()
        tensors.append(TensorEntry(tensor.name, 0, tensor.dtype, tensor.shape, boxes, None))
    file = FileEntry(path.text, header.file_bytes, "safetensors", tuple(extents))
    return Split(block_bytes, cutter.pieces(), (file,), tuple(tensors))


def split_state(tensors: Sequence[StateTensor], block_bytes: int) -> Split:
    """A state dict, or one rank's share: each box for itself, by name; ties are kept.

    Sources are the boxes of `box_shapes()`, numbered through the tensors as given, the boxes of
    tied tensors included. Tied are tensors with the same storage, dtype, shape and boxes; only the
    first by name is cut. Raises InvalidName, Refused.
    """
    cutter = _Cutter(block_bytes)
    sources: list[tuple[StateTensor, int]] = []
    number = 0
    for tensor in tensors:
        sources.append((tensor, number))
        number += len(tensor.box_shapes())
    sources.sort(key=lambda pair: pair[0].name)
    firsts: dict[Hashable, TensorEntry] = {}
    entries: list[TensorEntry] = []
    for tensor, source in sources:
        if not is_tensor_name(tensor.name):
            raise InvalidName(f"tensor name {tensor.name[:80]!a}")
        if entries and entries[-1].name == tensor.name:
            raise Refused(f"tensor {tensor.name} is there twice")
        nbytes(tensor.dtype, tensor.shape)
        shapes = tensor.box_shapes()
        memory = (tensor.storage, tensor.dtype, tensor.shape, shapes)
        first = None if tensor.storage is None else firsts.get(memory)
        if first:
            boxes, tied = first.boxes, first.name
        else:
            boxes, tied = _cut_boxes(cutter, tensor, shapes, source), None
        entry = TensorEntry(tensor.name, None, tensor.dtype, tensor.shape, boxes, tied)
        firsts.setdefault(memory, entry)
        entries.append(entry)
    return Split(block_bytes, cutter.pieces(), (), tuple(entries))


def _cut_boxes(
    cutter: _Cutter, tensor: StateTensor, shapes: Sequence[BoxShape], source: int
) -> tuple[Box, ...]:
    codec = codec_hint(tensor.dtype)
    boxes = []
    for number, box in enumerate(shapes, source):
        if len(box.offset) != len(tensor.shape) or len(box.shape) != len(tensor.shape):
            raise Refused(f"tensor {tensor.name}: a box with another number of dimensions")
        extents = cutter.tensor(number, 0, nbytes(tensor.dtype, box.shape), codec)
        boxes.append(Box(box.offset, box.shape, extents))
    return tuple(boxes)


ReadAt: TypeAlias = Callable[[int, int], bytes]
"""(start, length) → that many bytes of the file being split."""


class Splitter(Protocol):
    """Looks into files of one suffix. Must give the same split for the same bytes, always."""

    def __call__(
        self, path: FilePath, size: int, read_at: ReadAt, block_bytes: int
    ) -> Split | OddFile:
        """The split of a file, or why it has to be kept as plain bytes.

        Reads what it needs by `read_at`, bounded, and lets its errors pass.
        """


def _safetensors(path: FilePath, size: int, read_at: ReadAt, block_bytes: int) -> Split | OddFile:
    length = header_length(read_at(0, min(LENGTH_BYTES, size)), size)
    if isinstance(length, OddFile):
        return length
    header = parse_header(read_at(0, length), size)
    return header if isinstance(header, OddFile) else split_safetensors(path, header, block_bytes)


SPLITTERS: Mapping[str, Splitter] = MappingProxyType({".safetensors": _safetensors})
"""By suffix, lower case. Adding one changes how new versions are cut, never old ones."""


def split_file(path: FilePath, size: int, read_at: ReadAt, block_bytes: int) -> Split:
    """Any file, split by what it is."""
    splitter = SPLITTERS.get(PurePosixPath(path.text).suffix.lower())
    if splitter is None:
        return split_plain(path, size, block_bytes)
    split = splitter(path, size, read_at, block_bytes)
    if isinstance(split, OddFile):
        return split_plain(path, size, block_bytes, odd=split.reason)
    return split
