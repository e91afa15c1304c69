"""docs/format.md is enough: a reader written from the page alone reads what weightyard writes."""

from __future__ import annotations

import json
import re
import struct
from itertools import pairwise, product, zip_longest
from math import prod
from operator import mul
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard
from blake3 import blake3
from format_examples import Blocks, safetensors_file, split_bytes

from weightyard.codec import Encoded, encode, encode_delta, fold
from weightyard.format import block, dtypes, manifest, pack, safetensors, splitting
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, Codec, block_id, segment_checksum
from weightyard.format.dtypes import DType
from weightyard.format.pack import PACK_HEADER, PackBuilder, padding
from weightyard.format.splitting import BoxShape, StateTensor
from weightyard.names import MAX_PATH_BYTES, MAX_TENSOR_NAME_BYTES, PackId, is_tensor_name
from weightyard.records import Version
from weightyard.registry import binding, history
from weightyard.registry.binding import Owner, YardFile
from weightyard.registry.history import JournalEntry

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def second_reader(packs: dict[str, bytes]) -> dict[str, bytes]:
    """All blocks of packs, given by name. From docs/format.md; nothing of weightyard is used."""
    planes_of = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8}

    def word(codec: int, r: int) -> int:
        if codec == 2:
            return ((r >> 1) & 0x7F80) | ((r & 0x80) << 8) | (r & 0x7F)
        if codec == 4:
            return ((r >> 1) & 0x7F800000) | ((r & 0x800000) << 8) | (r & 0x7FFFFF)
        if codec == 5:
            moved = (r & 0x10000000000000) << 11
            return ((r >> 1) & 0x7FF0000000000000) | moved | (r & 0xFFFFFFFFFFFFF)
        return r

    def segment(data: bytes, kind: int, n: int) -> bytes:
        if kind == 0:
            return data
        if kind == 2:
            return data * n
        assert zstandard.get_frame_parameters(data).content_size == n
        return zstandard.ZstdDecompressor(max_window_size=1 << 20).decompress(data)

    raw, deltas = {}, []
    for pack_id, file in packs.items():
        magic = bytes.fromhex("89 57 59 50 41 43 4B 0A")
        assert struct.unpack("<8sII", file[:16]) == (magic, 1, 0)
        at, length, checksum, version, zero, end = struct.unpack("<QQQII8s", file[-40:])
        assert (version, zero, end, at + length + 40) == (1, 0, magic, len(file))
        footer = file[at : at + length]
        assert xxhash.xxh3_64_intdigest(footer) == checksum
        own_id, entries, segments, zero = struct.unpack("<16sIIQ", footer[:32])
        assert (own_id.hex(), zero) == (pack_id, 0)
        assert length == 32 + 104 * entries + 16 * segments
        table = 32 + 104 * entries
        place = 16
        for number in range(entries):
            fields = struct.unpack_from("<32s32sQQQIIBB6s", footer, 32 + 104 * number)
            name, base, offset, total, weighted, raw_bytes, count, codec, has_base, _ = fields
            assert offset == place
            planes = planes_of[codec]
            content = b""
            for first in range(0, count, planes):
                n = min(1 << 20, raw_bytes - len(content)) // planes
                merged = []
                for index in range(first, first + planes):
                    check, stored, kind, *_ = struct.unpack_from("<QIB3s", footer, table)
                    table += 16
                    data = file[place : place + stored]
                    assert not any(file[place + stored : place + -(-stored // 16) * 16])
                    place += -(-stored // 16) * 16
                    seed = int.from_bytes(name[:8], "little") + index * 0x9E3779B97F4A7C15
                    assert xxhash.xxh3_64_intdigest(data, seed % 2**64) == check
                    merged.append(segment(data, kind, n))
                if planes == 1:
                    content += merged[0]
                else:
                    content += b"".join(
                        word(codec, int.from_bytes(r, "big")).to_bytes(planes, "little")
                        for r in zip(*merged, strict=True)
                    )
            if has_base:
                deltas.append((name, base, content, total, weighted))
            else:
                raw[name] = (content, total, weighted)
        assert place == at
    for name, base, difference, total, weighted in deltas:
        content = bytes(a ^ b for a, b in zip(difference, raw[base][0], strict=True))
        assert raw.setdefault(name, (content, total, weighted)) == (content, total, weighted)
    for name, (content, total, weighted) in raw.items():
        assert blake3(content).digest() == name
        padded = content + bytes(-len(content) % 8)
        words = struct.unpack(f"<{len(padded) // 8}Q", padded)
        assert sum(words) % 2**64 == total
        assert sum((i + 1) * w for i, w in enumerate(words)) % 2**64 == weighted
    return {name.hex(): content for name, (content, _, _) in raw.items()}


def second_manifest_reader(stored: bytes, digest: str, blocks: dict[str, bytes]) -> dict:
    """Files and tensors of a manifest. From docs/format.md; nothing of weightyard is used."""
    text = zstandard.ZstdDecompressor(max_window_size=1 << 28).decompress(stored)
    assert blake3(text).hexdigest() == digest
    fields = json.loads(text)
    assert fields["format"] == 1
    names = [name for name, _ in fields["blocks"]]

    def content(extents: list[list[int]]) -> bytes:
        return b"".join(blocks[names[b]][at : at + length] for b, at, length in extents)

    def whole(tensor: dict) -> bytes:
        """Its elements in row-major order: each row of each box goes to its own place."""
        shape, width = tensor["shape"], WIDTHS[tensor["dtype"]]
        out = bytearray(prod(shape) * width)
        strides = [prod(shape[dim + 1 :]) * width for dim in range(len(shape))]
        for box in tensor["boxes"]:
            data = content(box["extents"])
            row_bytes = prod(box["shape"][-1:]) * width
            rows = product(*map(range, box["shape"][:-1]))
            for number, row in enumerate(rows):
                place = map(sum, zip_longest(box["offset"], row, fillvalue=0))
                at = sum(map(mul, place, strides))
                out[at : at + row_bytes] = data[number * row_bytes : (number + 1) * row_bytes]
        return bytes(out)

    return {
        "files": {file["path"]: content(file["extents"]) for file in fields["files"]},
        "tensors": {tensor["name"]: whole(tensor) for tensor in fields["tensors"]},
    }


WIDTHS = {"BF16": 2, "F32": 4, "I64": 8}
"""Bytes of an element, from section 7."""

ONE, OTHER = "ab" * 16, "cd" * 16

LEFT_OUT = ("aliases", "last_used", "damaged")
"""Of a version's record: what changes by itself."""


def packed(*encoded: Encoded, pack_id: str = ONE) -> bytes:
    """A pack of these blocks, as a writer writes it."""
    builder = PackBuilder(PackId(pack_id))
    file = bytearray(PACK_HEADER)
    for each in encoded:
        builder.add(each.encoding)
        for data in each.segments:
            file += data
            file += padding(len(data))
    file += builder.finish()
    assert len(file) == builder.pack_bytes
    return bytes(file)


def weights(count: int, dtype: object) -> bytes:
    return np.random.default_rng(3).normal(0, 0.02, count).astype(dtype).tobytes()


def test_second_reader_reads_every_codec_and_delta() -> None:
    noise = np.random.default_rng(4).bytes(MIB + 777)
    raws = {
        Codec.RAW: noise,
        Codec.ZSTD: b"the same again " * 80_000,
        Codec.PLANES_BF16: weights(600_000, ml_dtypes.bfloat16),
        Codec.PLANES_FP16: weights(40_000, np.float16) + bytes(40_000),
        Codec.PLANES_FP32: weights(270_000, np.float32),
        Codec.PLANES_FP64: np.linspace(-1, 1, 5_000).tobytes(),
    }
    encoded = [encode(raw, hint=codec) for codec, raw in raws.items()]
    assert {each.encoding.codec for each in encoded} == set(Codec)
    base = raws[Codec.PLANES_BF16]
    changed = base[:1_000_000] + weights(100_000, ml_dtypes.bfloat16)
    assert len(changed) == len(base)
    delta = encode_delta(changed, base, block_id(base), hint=Codec.PLANES_BF16)
    blocks = second_reader({ONE: packed(*encoded, delta)})
    assert blocks == {block_id(raw).hex: raw for raw in (*raws.values(), changed)}


def test_second_reader_reads_a_whole_version() -> None:
    data = safetensors_file(
        [("big", DType.F32, (700, 500)), ("one", DType.BF16, (8,)), ("two", DType.I64, ())]
    )
    split = split_bytes("model.safetensors", data)
    raws = [
        b"".join(data[part.start : part.start + part.length] for part in piece.parts)
        for piece in split.pieces
    ]
    digest, stored = manifest.encode(manifest_of([split], [[block_id(raw) for raw in raws]]))
    file = packed(
        *(encode(raw, hint=piece.codec) for raw, piece in zip(raws, split.pieces, strict=True))
    )
    version = second_manifest_reader(stored, digest.hex, second_reader({ONE: file}))
    assert version["files"] == {"model.safetensors": data}
    start = len(data) - 700 * 500 * 4 - 16 - 8
    assert version["tensors"]["two"] == data[-8:]
    assert version["tensors"]["big"] == data[start : start + 700 * 500 * 4]


@pytest.mark.parametrize("order", [(ONE, OTHER), (OTHER, ONE)])
def test_second_reader_finds_the_base_of_a_delta_in_another_pack(order: tuple[str, str]) -> None:
    base = weights(30_000, np.float32)
    changed = base[:60_000] + weights(15_000, np.float32)
    delta = encode_delta(changed, base, block_id(base), hint=Codec.PLANES_FP32)
    packs = {
        ONE: packed(encode(base, hint=Codec.PLANES_FP32)),
        OTHER: packed(delta, pack_id=OTHER),
    }
    blocks = second_reader({name: packs[name] for name in order})
    assert blocks == {block_id(raw).hex: raw for raw in (base, changed)}


@pytest.mark.parametrize(
    "cuts",
    [((), (2, 5)), ((1,), ()), ((1,), (2, 5))],
    ids=["by columns", "by rows", "both ways"],
)
def test_second_reader_puts_a_tensor_of_many_boxes_together(
    cuts: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    whole = np.arange(3 * 7 * 5, dtype="<f4").reshape(3, 7, 5)
    spans = [
        list(pairwise(sorted({0, *cut, size}))) for cut, size in zip(cuts, (3, 7), strict=True)
    ]
    parts = [whole[a:b, c:d] for (a, b), (c, d) in product(*spans)]
    boxes = tuple(BoxShape((a, c, 0), (b - a, d - c, 5)) for (a, b), (c, d) in product(*spans))
    split = splitting.split_state([StateTensor("w", DType.F32, whole.shape, boxes=boxes)], MIB)
    kept = Blocks()
    names = kept.keep(split, [part.tobytes() for part in parts])
    digest, stored = manifest.encode(manifest_of([split], [names]))
    file = packed(*(encode(raw) for raw in kept.data.values()))
    version = second_manifest_reader(stored, digest.hex, second_reader({ONE: file}))
    assert version["tensors"]["w"] == whole.tobytes()


def test_examples_on_the_page_are_right() -> None:
    example = PAGE.split("```json\n")[1].split("```")[0]
    text = "".join(line.strip() for line in example.splitlines()).encode()
    digest, _ = manifest.encode(manifest.decode(zstandard.compress(text), None))
    assert f"its digest is `{digest}`" in PAGE
    raw = b"weights in a yard"
    name, sums = block_id(raw), fold(raw)
    assert f"id `{name}`, the fold total `{sums.total:016x}`" in PAGE
    assert f"weighted `{sums.weighted:016x}`" in PAGE
    assert f"checksum is `{segment_checksum(raw, name, 0):016x}`" in PAGE
    assert f"would have `{segment_checksum(raw, name, 1):016x}`" in PAGE


@pytest.mark.parametrize(
    "row",
    [
        f"block, raw | {block.MAX_BLOCK_BYTES} bytes",
        f"block size of a yard | {block.CHUNK_BYTES} to {block.MAX_BLOCK_BYTES} bytes, "
        "whole chunks",
        f"chunk, raw | {block.CHUNK_BYTES} bytes",
        f"pack | {pack.MAX_PACK_BYTES} bytes (written: {pack.PACK_LIMIT_BYTES})",
        f"footer of a pack | {pack.MAX_FOOTER_BYTES} bytes",
        f"manifest as stored | {manifest.MAX_STORED_BYTES} bytes",
        f"JSON of a manifest | {manifest.MAX_JSON_BYTES} bytes, {manifest.MAX_COMMAS} commas",
        f"blocks in a manifest | {manifest.MAX_BLOCKS}",
        f"files in a manifest | {manifest.MAX_FILES}",
        f"tensors in a manifest | {manifest.MAX_TENSORS}",
        f"boxes in a manifest | {manifest.MAX_BOXES}",
        f"extents in a manifest | {manifest.MAX_EXTENTS}",
        f"dimensions of a tensor | {dtypes.MAX_RANK}",
        f"corners of boxes in a manifest, as section 6 counts them | {manifest.MAX_CORNERS}",
        f"path, tensor name | {MAX_PATH_BYTES} bytes",
        f"path, tensor name | {MAX_TENSOR_NAME_BYTES} bytes",
        f"`yard.json`, owner | {binding.MAX_BINDING_BYTES} bytes",
        f"commit record, entry of the journal | {history.MAX_RECORD_BYTES} bytes",
        f"safetensors header split by tensors | {safetensors.MAX_HEADER_BYTES} bytes, "
        f"{safetensors.MAX_HEADER_COMMAS} commas",
    ],
)
def test_limits_on_the_page_are_those_of_the_code(row: str) -> None:
    assert f"| {row} |" in PAGE


def test_the_page_names_every_field_of_the_records() -> None:
    for kind in (YardFile, Owner, JournalEntry):
        others = "".join(f', "{name}": …' for name in kind.__struct_fields__[1:])
        assert f'`{{"format": 1{others}}}`' in PAGE.replace("{…}", "…")
    recorded = [name for name in Version.model_fields if name not in LEFT_OUT]
    listed = PAGE.split("Its fields are ")[1].split(".")[0]
    assert re.findall(r"`(\w+)`", listed) == recorded
    assert all(f"`{name}`" in PAGE for name in LEFT_OUT)


def test_every_dtype_and_codec_is_on_the_page() -> None:
    assert all(f"`{dtype}`" in PAGE for dtype in DType)
    for codec in Codec:
        label = codec.name.lower().replace("planes_", "planes of ")
        assert f"| {label} | {codec.value} | {codec.planes} |" in PAGE
    assert (splitting.SMALL_BYTES, splitting.BUNDLE_BYTES) == (64 * 1024, MIB)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("a b", True),
        ("ä́", True),
        ("", False),
        ("a/b\\c:d", True),
        ("a\tb", False),
        ("a\u200bb", False),
        ("é" * 513, False),
    ],
)
def test_tensor_names_follow_the_rule_on_the_page(name: str, allowed: bool) -> None:
    assert is_tensor_name(name) is allowed
