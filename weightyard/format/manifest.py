"""A manifest: what a version consists of (docs/format.md §6).

It has one form only: the same content is the same JSON, byte for byte, and so has one digest.
`decode` accepts nothing else, which settles repeated keys, unknown fields and odd numbers at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product
from typing import Annotated, TypeAlias

import msgspec
import zstandard
from blake3 import blake3
from typing_extensions import Buffer

from weightyard.errors import InvalidName, ManifestInvalid, Refused, TooLarge, UnknownFormat
from weightyard.format.block import CHUNK_BYTES, MAX_BLOCK_BYTES, MIB
from weightyard.format.dtypes import MAX_INT, MAX_RANK, DType, nbytes
from weightyard.names import BlockId, Digest, FilePath, is_tensor_name

MANIFEST_FORMAT = 1
"""The version written, and the newest one read."""

MAX_STORED_BYTES = 64 * MIB
"""Of a manifest as stored."""

MAX_JSON_BYTES = 256 * MIB
"""Of its JSON; also the largest zstd window a reader must offer."""

MAX_COMMAS = 12 << 20
"""In its JSON, counted before it is parsed: they bound what parsing allocates."""

MAX_FILES = 1 << 17
MAX_TENSORS = 1 << 19
MAX_BOXES = 1 << 20
MAX_EXTENTS = 1 << 21
MAX_BLOCKS = 1 << 20

MAX_CORNERS = 1 << 22
"""Corners of boxes looked at, where tensors are cut along more than one dimension."""

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
_Dims: TypeAlias = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANK)]


class Extent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A run of bytes inside a block."""

    block: _Size
    """Its number in the manifest's list of blocks."""
    offset: _Size
    length: _Size


class BlockEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A block the version needs."""

    hex: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    raw_bytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_BLOCK_BYTES)]

    @property
    def id(self) -> BlockId:
        return BlockId(self.hex)


class Box(msgspec.Struct, frozen=True, gc=False):
    """An n-dimensional part of a tensor; its extents hold its elements in row-major order."""

    offset: _Dims
    shape: _Dims
    extents: tuple[Extent, ...]


class FileEntry(msgspec.Struct, frozen=True, gc=False):
    """A file of the version: its bytes are its extents, one after the other."""

    path: str
    bytes: _Size
    kind: Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9]{1,16}\Z")]
    """How it was split: `plain`, `safetensors`, …; its bytes come back the same way for all."""
    extents: tuple[Extent, ...]

    @property
    def name(self) -> FilePath:
        return FilePath(self.path)


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """A tensor: of a file, or of a state dict."""

    name: str
    file: _Size | None
    """The number of its file; None in a state dict."""
    dtype: DType
    shape: _Dims
    boxes: tuple[Box, ...]
    """Disjoint, together the whole tensor. None for a tensor without elements."""
    tied: str | None
    """The first tensor of the same memory, whose boxes these are too."""


class Manifest(msgspec.Struct, frozen=True, gc=False):
    """A version's content. Carries no number: equal content is one manifest."""

    format: _Size
    block_bytes: _Size
    blocks: tuple[BlockEntry, ...]
    """Each once, in the order in which the extents below first need them."""
    files: tuple[FileEntry, ...]
    """By path."""
    tensors: tuple[TensorEntry, ...]
    """By file (state dict first), then by name."""


class _Head(msgspec.Struct):
    format: _Size


def encode(manifest: Manifest) -> tuple[Digest, bytes]:
    """A manifest's digest and the bytes to store. Raises ManifestInvalid, TooLarge."""
    check(manifest)
    text = msgspec.json.encode(manifest)
    stored = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(text)
    for what, size, limit in (
        ("JSON", len(text), MAX_JSON_BYTES),
        ("values", text.count(b","), MAX_COMMAS),
        ("bytes", len(stored), MAX_STORED_BYTES),
    ):
        if size > limit:
            raise TooLarge(f"manifest of {size} {what}; at most {limit}: push in parts")
    return _digest(text), stored


def decode(stored: Buffer, expected: Digest | None) -> Manifest:
    """The manifest in these stored bytes, every rule of the format checked.

    Raises ManifestInvalid (also if its digest is not the expected one), UnknownFormat.
    """
    return from_json(_decompress(memoryview(stored)), expected)


def from_json(text: bytes, expected: Digest | None) -> Manifest:
    """As `decode`, from the JSON that was compressed."""
    if expected is not None and _digest(text) != expected:
        raise ManifestInvalid(f"manifest {expected}: its content has another digest")
    if text.count(b",") > MAX_COMMAS:
        raise ManifestInvalid(f"manifest of over {MAX_COMMAS} values")
    try:
        found = msgspec.json.decode(text, type=_Head).format
        if found > MANIFEST_FORMAT:
            raise UnknownFormat("manifest", found, MANIFEST_FORMAT)
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise ManifestInvalid(f"manifest: {str(why)[:200]}") from None
    if msgspec.json.encode(manifest) != text:
        raise ManifestInvalid("manifest: JSON is not in the one form allowed")
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Hold a manifest against every rule of the format. Raises ManifestInvalid, saying where."""
    if manifest.format != MANIFEST_FORMAT:
        raise ManifestInvalid(f"format {manifest.format}")
    if not is_block_size(manifest.block_bytes):
        raise ManifestInvalid(f"block size {manifest.block_bytes}")
    tensors = manifest.tensors
    boxes = [box for tensor in tensors for box in tensor.boxes]
    extents = sum(len(file.extents) for file in manifest.files)
    extents += sum(len(box.extents) for box in boxes)
    for what, count, limit in (
        ("blocks", len(manifest.blocks), MAX_BLOCKS),
        ("files", len(manifest.files), MAX_FILES),
        ("tensors", len(tensors), MAX_TENSORS),
        ("boxes", len(boxes), MAX_BOXES),
        ("extents", extents, MAX_EXTENTS),
    ):
        if count > limit:
            raise ManifestInvalid(f"{count} {what}; at most {limit}")
    cursor = _BlockCursor(manifest)
    _check_files(manifest.files, cursor)
    _check_tensors(manifest, cursor)
    cursor.finish()


def is_block_size(block_bytes: int) -> bool:
    """Whether a yard may have this block size: whole chunks, at most MAX_BLOCK_BYTES."""
    return CHUNK_BYTES <= block_bytes <= MAX_BLOCK_BYTES and block_bytes % CHUNK_BYTES == 0


class _BlockCursor:
    """Walks all extents in order and holds them against the list of blocks."""

    def __init__(self, manifest: Manifest) -> None:
        self._sizes = [block.raw_bytes for block in manifest.blocks]
        self._seen = 0
        if len({block.hex for block in manifest.blocks}) != len(self._sizes):
            raise ManifestInvalid("a block is listed twice")
        if any(size > manifest.block_bytes for size in self._sizes):
            raise ManifestInvalid("a block is longer than the block size")

    def walk(self, extents: Iterable[Extent], length: int, where: str) -> None:
        """Extents lie in their blocks, do not continue each other, and add up to `length`."""
        sizes, seen = self._sizes, self._seen
        total = 0
        last_block, last_end = -1, 0
        for extent in extents:
            block, offset = extent.block, extent.offset
            end = offset + extent.length
            if block >= seen:
                if block > seen or block >= len(sizes):
                    raise ManifestInvalid(f"{where}: block {block} is not the next one listed")
                seen += 1
            if end > sizes[block] or end == offset:
                raise ManifestInvalid(f"{where}: an extent is empty or leaves its block")
            if block == last_block and offset == last_end:
                raise ManifestInvalid(f"{where}: two extents should be one")
            total += extent.length
            last_block, last_end = block, end
        self._seen = seen
        if total != length:
            raise ManifestInvalid(f"{where}: {length} bytes, its extents have {total}")

    def finish(self) -> None:
        if self._seen != len(self._sizes):
            raise ManifestInvalid(f"block {self._seen} is not used")


class _FileRuns:
    """The runs of blocks a file consists of: a tensor of the file is made of nothing else."""

    def __init__(self, file: FileEntry) -> None:
        by_block: dict[int, list[tuple[int, int]]] = {}
        for extent in file.extents:
            run = (extent.offset, extent.offset + extent.length)
            by_block.setdefault(extent.block, []).append(run)
        # Sorted by start. Runs may overlap: so each has the furthest end of all up to it.
        self._by_block = {
            block: list(accumulate(sorted(runs), lambda one, two: (two[0], max(one[1], two[1]))))
            for block, runs in by_block.items()
        }

    def hold(self, extent: Extent) -> bool:
        """Whether an extent lies inside one of the runs."""
        runs = self._by_block.get(extent.block, [])
        before = bisect_right(runs, (extent.offset, MAX_INT))
        return before > 0 and extent.offset + extent.length <= runs[before - 1][1]


def _check_files(files: Sequence[FileEntry], cursor: _BlockCursor) -> None:
    for before, after in pairwise(files):
        if before.path >= after.path:
            raise ManifestInvalid(f"file {after.path[:80]!a}: repeated or not in order")
    paths = {file.path for file in files}
    for number, file in enumerate(files):
        try:
            parts = file.name.parts
        except InvalidName as why:
            raise ManifestInvalid(f"file {number}: {why}") from None
        folder = ""
        for part in parts[:-1]:
            folder = f"{folder}/{part}" if folder else part
            if folder in paths:
                raise ManifestInvalid(f"file {folder} is also a folder, of {file.path}")
        cursor.walk(file.extents, file.bytes, f"file {file.path}")


def _check_tensors(manifest: Manifest, cursor: _BlockCursor) -> None:
    corners_left = MAX_CORNERS
    by_name: dict[str, TensorEntry] = {}
    last = (-2, "")
    runs: _FileRuns | None = None
    for tensor in manifest.tensors:
        where = f"tensor {tensor.name[:80]!a}"
        if not is_tensor_name(tensor.name):
            raise ManifestInvalid(f"{where}: not a name a tensor may have")
        file = -1 if tensor.file is None else tensor.file
        if file >= len(manifest.files):
            raise ManifestInvalid(f"{where}: there is no file {file}")
        if (file, tensor.name) <= last:
            raise ManifestInvalid(f"{where}: repeated or not in order")
        if file != last[0]:
            by_name.clear()
            runs = None if tensor.file is None else _FileRuns(manifest.files[file])
        last = (file, tensor.name)
        by_name[tensor.name] = tensor
        try:
            size = nbytes(tensor.dtype, tensor.shape)
            lengths = [nbytes(tensor.dtype, box.shape) for box in tensor.boxes]
        except Refused as why:
            raise ManifestInvalid(f"{where}: {why}") from None
        corners_left -= check_cover(tensor, size, corners_left, where)
        for box, length in zip(tensor.boxes, lengths, strict=True):
            cursor.walk(box.extents, length, where)
            if runs is not None and not all(map(runs.hold, box.extents)):
                raise ManifestInvalid(f"{where}: it has bytes that its file has not")
        if tensor.tied is not None:
            _check_tied(tensor, by_name.get(tensor.tied), where)


def _check_tied(tensor: TensorEntry, first: TensorEntry | None, where: str) -> None:
    if first is None or first is tensor:
        raise ManifestInvalid(f"{where}: tied to no earlier tensor of its file")
    if first.tied is not None:
        raise ManifestInvalid(f"{where}: tied to {first.name}, which is tied itself")
    if (first.dtype, first.shape, first.boxes) != (tensor.dtype, tensor.shape, tensor.boxes):
        raise ManifestInvalid(f"{where}: tied to {first.name}, but not the same")


def check_cover(tensor: TensorEntry, size: int, corners_left: int, where: str) -> int:
    """Whether a tensor's boxes cover each element once; returns how many corners were looked at.

    The indicator function of a box is the signed sum, over its corners, of the indicators of
    "at or beyond this corner in every dimension", and those are linearly independent. So boxes
    cover the tensor once exactly if their signed corners add up to the signed corners of the
    tensor: no pairs are compared, whatever the pattern. Raises ManifestInvalid.
    """
    rank = len(tensor.shape)
    boxes = tensor.boxes
    if len(boxes) == 1 and boxes[0].shape == tensor.shape and not any(boxes[0].offset):
        if size and len(boxes[0].offset) == rank:
            return 0
    elif not size and not boxes:
        return 0
    for box in boxes:
        if len(box.offset) != rank or len(box.shape) != rank or 0 in box.shape:
            raise ManifestInvalid(f"{where}: a box is empty or has another number of dimensions")
    for before, after in pairwise(boxes):
        if before.offset >= after.offset:
            raise ManifestInvalid(f"{where}: boxes are repeated or not in order")
    cut = [
        dim
        for dim, whole in enumerate(tensor.shape)
        if any(box.offset[dim] or box.shape[dim] != whole for box in boxes)
    ]
    needed = (len(boxes) + 1) << len(cut)
    if needed > corners_left:
        raise ManifestInvalid(f"{where}: boxes are cut in too many ways to be checked")
    corners: Counter[tuple[int, ...]] = Counter()
    signs = [(-1) ** sum(ends) for ends in product((0, 1), repeat=len(cut))]
    for box in boxes:
        spans = [(box.offset[dim], box.offset[dim] + box.shape[dim]) for dim in cut]
        for corner, sign in zip(product(*spans), signs, strict=True):
            corners[corner] += sign
    for corner, sign in zip(product(*((0, tensor.shape[d]) for d in cut)), signs, strict=True):
        corners[corner] -= sign
    if not boxes or any(corners.values()):
        raise ManifestInvalid(f"{where}: boxes overlap, leave it, or leave a hole")
    return needed


def _decompress(stored: memoryview) -> bytes:
    if stored.nbytes > MAX_STORED_BYTES:
        raise ManifestInvalid(f"manifest of {stored.nbytes} bytes; at most {MAX_STORED_BYTES}")
    try:
        frame = zstandard.get_frame_parameters(stored)
        if not 0 < frame.content_size <= MAX_JSON_BYTES:  # unknown is 2^64 - 1
            raise ManifestInvalid(f"manifest: its content must be 1 to {MAX_JSON_BYTES} bytes")
        # Decompressed in one go it needs no window, so zstd itself does not mind how large it is.
        if frame.window_size > MAX_JSON_BYTES:
            raise ManifestInvalid(f"manifest: its frame wants a window of {frame.window_size}")
        text: bytes = zstandard.ZstdDecompressor(max_window_size=MAX_JSON_BYTES).decompress(
            stored, allow_extra_data=False
        )
    except zstandard.ZstdError as why:
        raise ManifestInvalid(f"manifest: {why}") from None
    return text


def _digest(text: bytes) -> Digest:
    return Digest(blake3(text).hexdigest())
