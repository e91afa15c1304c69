"""Manifests: one form, one digest, and no lie gets past `decode`."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zstandard
from blake3 import blake3
from format_examples import small_manifest

from weightyard.errors import ManifestInvalid, TooLarge, UnknownFormat
from weightyard.format import manifest as manifests
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import MAX_INT, DType
from weightyard.format.manifest import (
    BlockEntry,
    Box,
    Extent,
    FileEntry,
    Manifest,
    TensorEntry,
    decode,
    encode,
)
from weightyard.names import Digest, FilePath


def stored(text: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(text)


def test_manifest_comes_back_equal_and_is_named_by_its_json() -> None:
    manifest = small_manifest()
    digest, data = encode(manifest)
    assert decode(data, digest) == manifest
    assert digest.hex == blake3(zstandard.decompress(data)).hexdigest()
    assert manifest.files[0].name == FilePath("conf/config.json")


def test_compressing_again_does_not_change_the_name() -> None:
    digest, data = encode(small_manifest())
    again = stored(zstandard.decompress(data), level=19)
    assert again != data
    assert encode(decode(again, digest))[0] == digest


def test_manifest_of_another_digest_is_refused() -> None:
    _, data = encode(small_manifest())
    with pytest.raises(ManifestInvalid, match="another digest"):
        decode(data, Digest("0" * 64))


def test_newer_format_is_named_and_nothing_else_of_it_is_read() -> None:
    with pytest.raises(UnknownFormat, match="version 7; this weightyard reads up to 1") as caught:
        decode(stored(b'{"shape":{"of":"things to come"},"format":7}'), None)
    assert (caught.value.found, caught.value.known) == (7, 1)


def test_empty_version_is_a_version() -> None:
    manifest = Manifest(1, MIB, (), (), ())
    assert decode(encode(manifest)[1], None) == manifest


Change = Callable[[dict[str, Any]], object]


def replacing(**fields: Any) -> Change:
    return lambda m: m.update(fields)


def tensor(name: str, /, **fields: Any) -> Change:
    return lambda m: next(t for t in m["tensors"] if t["name"] == name).update(fields)


def file(number: int, **fields: Any) -> Change:
    return lambda m: m["files"][number].update(fields)


def box(name: str, number: int, **fields: Any) -> Change:
    return lambda m: next(t for t in m["tensors"] if t["name"] == name)["boxes"][number].update(
        fields
    )


def rename(old: str, new: str) -> Change:
    return tensor(old, name=new)


def renumber(m: dict[str, Any], numbers: dict[int, int]) -> None:
    """List blocks in another order; what the extents mean stays the same."""
    old = m["blocks"]
    m["blocks"] = [old[numbers.get(number, number)] for number in range(len(old))]
    owners = m["files"] + [box for each in m["tensors"] for box in each["boxes"]]
    for owner in owners:
        for extent in owner["extents"]:
            extent[0] = numbers.get(extent[0], extent[0])


# The example's tensors: head, input (tied to head), step; big, empty, norm.bias, norm.weight.
LIES: dict[str, tuple[Change, str]] = {
    "format 0": (replacing(format=0), "format 0"),
    "negative format": (replacing(format=-1), "format"),
    "format is no integer": (replacing(format="1"), "Expected `int`"),
    "block size 0": (replacing(block_bytes=0), "block size"),
    "block size of no whole chunks": (replacing(block_bytes=MIB + 1), "block size"),
    "block size over the bound": (replacing(block_bytes=128 * MIB), "block size"),
    "field missing": (lambda m: m.pop("files"), "missing required field"),
    "field unknown": (replacing(more=1), "one form"),
    "extent of four": (lambda m: m["files"][0]["extents"][0].append(0), "one form"),
    "extent of two": (lambda m: m["files"][0]["extents"][0].pop(), "at least"),
    "number as float": (file(0, bytes=700.0), "float|one form"),
    "number as NaN": (file(0, bytes="NaN"), "Expected `int`"),
    "number over 2^63-1": (file(0, bytes=MAX_INT + 1), "<= 9223372036854775807"),
    "number over 2^64": (file(0, bytes=1 << 70), "int"),
    "block id in capitals": (lambda m: m["blocks"][0].__setitem__(0, "A" * 64), "regex"),
    "block id too short": (lambda m: m["blocks"][0].__setitem__(0, "a" * 63), "regex"),
    "block listed twice": (
        lambda m: m["blocks"][1].__setitem__(0, m["blocks"][0][0]),
        "listed twice",
    ),
    "block of no bytes": (lambda m: m["blocks"][0].__setitem__(1, 0), "`int` >"),
    "block over the bound": (lambda m: m["blocks"][0].__setitem__(1, 1 << 40), "`int` <="),
    "block over the block size": (
        lambda m: m["blocks"][0].__setitem__(1, MIB + 1),
        "longer than the block size",
    ),
    "block not used": (lambda m: m["blocks"].append(["f" * 64, 1]), "not used"),
    "blocks in another order": (lambda m: renumber(m, {0: 1, 1: 0}), "not the next one"),
    "extent of no block": (
        lambda m: m["tensors"][2]["boxes"][0]["extents"][0].__setitem__(0, 99),
        "not the next one",
    ),
    "extent past its block": (
        lambda m: m["files"][0]["extents"][0].__setitem__(1, 1),
        "leaves its block",
    ),
    "extent past 2^63": (
        lambda m: m["files"][0]["extents"][0].__setitem__(1, MAX_INT),
        "leaves its block",
    ),
    "empty extent": (lambda m: m["files"][0]["extents"].append([0, 0, 0]), "empty"),
    "extents that should be one": (
        file(0, extents=[[0, 0, 300], [0, 300, 400]]),
        "should be one",
    ),
    "file longer than its extents": (file(0, bytes=701), "701 bytes, its extents have 700"),
    "file shorter than its extents": (file(0, bytes=0), "0 bytes, its extents have 700"),
    "path that climbs": (file(0, path="../config.json"), "relative"),
    "path from the root": (file(0, path="/etc/passwd"), "relative"),
    "path with a backslash": (file(0, path="conf\\config.json"), "backslash"),
    "path too long": (file(0, path="a" * 2000), "over 1024 bytes"),
    "path twice": (file(0, path="model.safetensors"), "repeated or not in order"),
    "paths not in order": (lambda m: m["files"].reverse(), "not in order"),
    "path that is a folder of another": (
        lambda m: (file(0, path="conf")(m), file(1, path="conf/model")(m)),
        "is also a folder",
    ),
    "kind that is no word": (file(0, kind="../x"), "regex"),
    "tensor name empty": (rename("head", ""), "not a name"),
    "tensor name with a line end": (rename("head", "a\nb"), "not a name|one form"),
    "tensor name that turns text around": (rename("head", "a\u202eb"), "not a name"),
    "tensor name too long": (rename("head", "a" * 1025), "not a name"),
    "tensor twice": (rename("norm.bias", "empty"), "repeated"),
    "tensors not in order": (lambda m: m["tensors"].reverse(), "not in order|repeated"),
    "tensor of no file": (tensor("norm.weight", file=2), "no file 2"),
    "tensor of a negative file": (tensor("big", file=-1), "file"),
    "tensor of a file with bytes of another file": (
        box("norm.weight", 0, extents=[[0, 0, 64]]),
        "bytes that its file has not",
    ),
    "tensor of a file with a block of its own": (
        lambda m: (
            box("norm.weight", 0, extents=[[len(m["blocks"]), 0, 64]])(m),
            m["blocks"].append(["f" * 64, 64]),
        ),
        "bytes that its file has not",
    ),
    "tensor of a file that goes on where the file does not": (
        lambda m: (
            file(0, extents=[[0, 0, 699], [0, 0, 1]])(m),
            m["tensors"][-2].update(file=0),
            box("norm.bias", 0, extents=[[0, 636, 64]])(m),
            m["tensors"].insert(3, m["tensors"].pop(-2)),
        ),
        "bytes that its file has not",
    ),
    "dtype unknown": (tensor("step", dtype="I65"), "Invalid enum value"),
    "dtype of another size": (tensor("step", dtype="I32"), "its extents have 8"),
    "rank over the bound": (tensor("step", shape=[1] * 65), "length <= 64"),
    "negative dimension": (tensor("step", shape=[-1]), "`int` >= 0"),
    "shape that overflows": (tensor("empty", shape=[0, 1 << 40, 1 << 40]), "over 92233720"),
    "elements that fill no whole bytes": (tensor("big", dtype="F6_E2M3", shape=[3]), "whole bytes"),
    "shape of another size": (tensor("big", shape=[1024, 1023]), "leave a hole"),
    "box of an empty tensor": (
        tensor("empty", boxes=[{"offset": [0, 0], "shape": [0, 4], "extents": []}]),
        "empty",
    ),
    "no boxes": (tensor("step", boxes=[]), "hole"),
    "box of another rank": (box("head", 0, shape=[4]), "dimensions"),
    "box offset of another rank": (box("step", 0, offset=[0]), "dimensions"),
    "box missing": (lambda m: m["tensors"][0]["boxes"].pop(), "hole"),
    "box twice": (box("head", 1, offset=[0, 0]), "repeated"),
    "boxes not in order": (lambda m: m["tensors"][0]["boxes"].reverse(), "not in order"),
    "boxes that overlap": (box("head", 1, offset=[0, 1]), "overlap"),
    "box that leaves the tensor": (box("head", 3, offset=[3, 2]), "overlap"),
    "box far outside": (box("head", 3, offset=[MAX_INT, MAX_INT]), "leave it"),
    "tied to nothing": (tensor("input", tied="nobody"), "no earlier tensor"),
    "tied to itself": (tensor("head", tied="head"), "no earlier tensor"),
    "tied to a later one": (tensor("head", tied="input"), "no earlier tensor"),
    "tied across files": (tensor("big", tied="head"), "no earlier tensor"),
    "tied to a tied one": (
        lambda m: m["tensors"].insert(2, m["tensors"][1] | {"name": "k", "tied": "input"}),
        "tied itself",
    ),
    "tied but different": (tensor("step", tied="head"), "not the same"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_manifest_is_refused_saying_where(lie: str) -> None:
    change, message = LIES[lie]
    fields = msgspec.json.decode(msgspec.json.encode(small_manifest()))
    change(fields)
    with pytest.raises(ManifestInvalid, match=message):
        decode(stored(msgspec.json.encode(fields)), None)


TEXT = msgspec.json.encode(small_manifest())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "manifest"),
        (b"not zstd", "manifest"),
        (stored(TEXT)[:-1], "manifest"),
        (stored(TEXT) + b"x", "unused data"),
        (stored(TEXT) * 2, "unused data"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(TEXT), "must be 1 to"),
        (stored(bytes(manifests.MAX_JSON_BYTES + 1), 1), "must be 1 to"),
        (bytes(manifests.MAX_STORED_BYTES + 1), "at most"),
        (stored(b"[" + b"," * (manifests.MAX_COMMAS + 1)), "values"),
        (stored(b""), "must be 1 to"),
        (stored(b"[" * 1_000_000), "manifest"),
        (stored(b'{"format":' + b"[" * 1_000_000), "manifest"),
        (stored(b'{"format":\xff}'), "manifest"),
        (stored(b" " + TEXT), "one form"),
        (stored(TEXT + b"\n"), "one form"),
        (stored(TEXT.replace(b'{"format":1', b'{"format":1,"format":1')), "one form"),
        (stored(TEXT.replace(b'"name":"head"', b'"name":"x","name":"head"')), "one form"),
        (stored(TEXT.replace(b'"head"', b'"\\u0068ead"')), "one form"),
        (stored(TEXT.replace(b'"bytes":700', b'"bytes":7e2')), "one form|Expected"),
        (stored(TEXT.replace(b'"name":"head"', b'"name":"\\ud800"')), "manifest"),
        (stored(TEXT.replace(b'"name":"head"', b'"name":"\xed\xa0\x80"')), "manifest"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ManifestInvalid, match=message):
        decode(data, None)


def test_frame_that_promises_more_than_it_has_is_refused() -> None:
    # A frame header: magic, content size of 8 bytes, window; then one run-length block.
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (200 * MIB).to_bytes(8, "little") + b"\x43\x00\x00a"
    with pytest.raises(ManifestInvalid):
        decode(bomb, None)


@pytest.mark.parametrize(("window_log", "is_read"), [(21, True), (28, True), (29, False)])
def test_a_frame_may_want_the_window_that_the_page_says_and_no_larger_one(
    window_log: int, is_read: bool
) -> None:
    text = msgspec.json.encode(small_manifest())
    # Magic, content size of 8 bytes, window; then one block as it is.
    frame = b"\x28\xb5\x2f\xfd\xc0" + bytes([(window_log - 10) << 3])
    frame += struct.pack("<Q", len(text)) + (len(text) << 3 | 1).to_bytes(3, "little") + text
    if is_read:
        assert decode(frame, None) == small_manifest()
    else:
        with pytest.raises(ManifestInvalid, match="window"):
            decode(frame, None)


def test_counts_over_their_bounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = small_manifest()
    for bound in ("MAX_BLOCKS", "MAX_FILES", "MAX_TENSORS", "MAX_BOXES", "MAX_EXTENTS"):
        with monkeypatch.context() as patch:
            patch.setattr(manifests, bound, 1)
            with pytest.raises(ManifestInvalid, match=bound[4:].lower()):
                encode(manifest)
    monkeypatch.setattr(manifests, "MAX_COMMAS", 10)
    with pytest.raises(TooLarge, match="push in parts"):
        encode(manifest)


def test_20000_tensors_and_a_million_extents_are_no_trouble() -> None:
    blocks = tuple(BlockEntry(block_id(b"%d" % i).hex, 16 * MIB) for i in range(10_000))
    tensors = tuple(
        TensorEntry(
            f"t{i:05}",
            0,
            DType.BF16,
            (1 << 22,),
            (Box((0,), (1 << 22,), (Extent(i // 2, i % 2 * 8 * MIB, 8 * MIB),)),),
            None,
        )
        for i in range(20_000)
    )
    whole = tuple(Extent(i, 0, 16 * MIB) for i in range(10_000))
    many = tuple(Extent(i % 10_000, 16 * (i // 10_000), 16) for i in range(1_000_000))
    model = FileEntry("model", 160_000 * MIB, "safetensors", whole)
    for extents in (many[:10_000], many):
        other = FileEntry("other", 16 * len(extents), "plain", extents)
        start = time.process_time()
        digest, data = encode(Manifest(1, 16 * MIB, blocks, (model, other), tensors))
        encoded = time.process_time()
        decode(data, digest)
        decode_s, encode_s = time.process_time() - encoded, encoded - start
        assert decode_s < 10 * encode_s, "about as long: no part of it is looked for in all others"
