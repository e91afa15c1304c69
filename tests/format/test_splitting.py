"""Splitting: every byte once, the same cuts for the same content, and everything comes back."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from format_examples import NOISE, Blocks, fake_ids, safetensors_file, split_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from weightyard.errors import BadSetting, InvalidName, ManifestInvalid, Refused
from weightyard.format import manifest as manifests
from weightyard.format.assembly import manifest_of
from weightyard.format.block import DEFAULT_BLOCK_BYTES, KIB, MIB, Codec
from weightyard.format.dtypes import MAX_INT, DType, nbytes
from weightyard.format.splitting import (
    BUNDLE_BYTES,
    SMALL_BYTES,
    BoxShape,
    StateTensor,
    split_plain,
    split_state,
)
from weightyard.names import FilePath

DTYPES = st.sampled_from(list(DType))


@st.composite
def shaped(draw: st.DrawFn, max_elements: int) -> tuple[DType, tuple[int, ...]]:
    """Any dtype with any shape of up to four dimensions that fills whole bytes."""
    dtype = draw(DTYPES)
    shape: tuple[int, ...] = ()
    left = max_elements * 8 // dtype.bits
    for _ in range(draw(st.integers(0, 4))):
        # Powers of two and their neighbours reach the bounds of blocks and bundles.
        size = draw(
            st.integers(0, 6)
            | st.sampled_from([2**k + d for k in range(3, 22) for d in (-1, 0, 1)])
        )
        shape += (min(size, left),)
        left //= max(shape[-1], 1)
    if np.prod(shape, dtype=object) * dtype.bits % 8:
        shape += (4,)
    return dtype, shape


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, DType, tuple[int, ...]]]:
    shapes = draw(st.lists(shaped(600_000), max_size=24))
    shapes += draw(st.lists(shaped(3_000_000), max_size=1))
    return [(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(shapes)]


@settings(max_examples=60, deadline=None)
@given(models())
def test_file_and_tensors_come_back_from_blocks_bit_for_bit(
    model: list[tuple[str, DType, tuple[int, ...]]],
) -> None:
    data = safetensors_file(model)
    split = split_bytes("m.safetensors", data)
    parts = sorted((part.start, part.length) for piece in split.pieces for part in piece.parts)
    at = 0
    for start, length in parts:
        assert start == at
        at += length
    assert at == len(data)

    blocks = Blocks()
    digest, stored = manifests.encode(manifest_of([split], [blocks.keep(split, [data])]))
    manifest = manifests.decode(stored, digest)
    (file,) = manifest.files
    assert blocks.read(manifest, file.extents) == data
    start = len(data) - sum(nbytes(dtype, shape) for _, dtype, shape in model)
    whole = {}
    for name, dtype, shape in model:
        whole[name] = (dtype, shape, data[start : start + nbytes(dtype, shape)])
        start += nbytes(dtype, shape)
    assert whole == {
        tensor.name: (
            tensor.dtype,
            tensor.shape,
            b"".join(blocks.read(manifest, box.extents) for box in tensor.boxes),
        )
        for tensor in manifest.tensors
    }


@settings(max_examples=60, deadline=None)
@given(models())
def test_pieces_keep_to_the_sizes_of_the_format(
    model: list[tuple[str, DType, tuple[int, ...]]],
) -> None:
    split = split_bytes("m.safetensors", safetensors_file(model))
    for piece in split.pieces:
        assert 0 < piece.raw_bytes <= MIB
        assert piece.raw_bytes % piece.codec.planes == 0
    small = {box.extents[0].block for t in split.tensors for box in t.boxes if _size(t) < 64 * KIB}
    large = {
        e.block for t in split.tensors for b in t.boxes for e in b.extents if _size(t) >= 64 * KIB
    }
    assert not small & large
    assert all(split.pieces[number].raw_bytes <= BUNDLE_BYTES for number in small)


def _size(tensor: manifests.TensorEntry) -> int:
    return nbytes(tensor.dtype, tensor.shape)


def test_tensor_is_cut_every_block_size_and_files_from_their_start() -> None:
    split = split_plain(FilePath("a.bin"), 2 * DEFAULT_BLOCK_BYTES + 5, DEFAULT_BLOCK_BYTES)
    assert [piece.raw_bytes for piece in split.pieces] == [16 * MIB, 16 * MIB, 5]
    assert [piece.parts[0].start for piece in split.pieces] == [0, 16 * MIB, 32 * MIB]
    assert split_plain(FilePath("empty"), 0, MIB).pieces == ()


def test_only_tensors_strictly_under_64_kib_are_bundled() -> None:
    data = safetensors_file(
        [
            ("a", DType.U8, (SMALL_BYTES - 1,)),
            ("b", DType.U8, (SMALL_BYTES,)),
            ("c", DType.U8, (SMALL_BYTES - 1,)),
        ]
    )
    a, b, c = split_bytes("m.safetensors", data).tensors
    assert a.boxes[0].extents[0].block == c.boxes[0].extents[0].block
    assert b.boxes[0].extents == (manifests.Extent(b.boxes[0].extents[0].block, 0, SMALL_BYTES),)


def test_bundle_is_closed_before_it_would_pass_1_mib() -> None:
    size = SMALL_BYTES - 1
    data = safetensors_file([(f"{i:02}", DType.U8, (size,)) for i in range(18)])
    bundles = split_bytes("m.safetensors", data).pieces[1:]
    assert [piece.raw_bytes for piece in bundles] == [16 * size, 2 * size]
    assert [len(piece.parts) for piece in bundles] == [1, 1]


@pytest.mark.parametrize(
    ("dtypes", "codec"),
    [
        ((DType.BF16, DType.BF16), Codec.PLANES_BF16),
        ((DType.F32, DType.C64), Codec.PLANES_FP32),
        ((DType.BF16, DType.F16), Codec.ZSTD),
        ((DType.I8, DType.U8), Codec.ZSTD),
    ],
)
def test_bundle_takes_the_codec_all_its_tensors_share(
    dtypes: tuple[DType, ...], codec: Codec
) -> None:
    data = safetensors_file([(str(i), dtype, (8,)) for i, dtype in enumerate(dtypes)])
    assert split_bytes("m.safetensors", data).pieces[1].codec is codec


def test_suffix_decides_who_looks_into_a_file_and_others_are_plain() -> None:
    data = safetensors_file([("a", DType.F32, (4,))])
    assert split_bytes("x/M.SafeTensors", data).files[0].kind == "safetensors"
    for path in ("safetensors", "m.bin", "m.safetensors.bak"):
        assert split_bytes(path, data).files[0].kind == "plain"
        assert split_bytes(path, data).odd is None


def test_same_tensor_in_two_files_is_one_block() -> None:
    weight = ("w", DType.F32, (1024, 256))
    first = safetensors_file([weight])
    second = safetensors_file([weight, ("other", DType.F32, (3,))])
    blocks = Blocks()
    splits = [split_bytes("a.safetensors", first), split_bytes("b.safetensors", second)]
    ids = [blocks.keep(splits[0], [first]), blocks.keep(splits[1], [second])]
    manifest = manifest_of(splits, ids)
    one, _, two = manifest.tensors
    assert one.boxes == two.boxes
    assert sum(block.raw_bytes for block in manifest.blocks) < 1.01 * MIB
    for file, data in zip(manifest.files, (first, second), strict=True):
        assert blocks.read(manifest, file.extents) == data


def test_order_in_which_things_are_pushed_does_not_change_the_digest() -> None:
    files = {"b": NOISE[:900_000], "a/c": NOISE[1:900_000], "a!": NOISE[2:900_000]}
    tensors = {f"t{i}": NOISE[i : i + 4 * 999 * i] for i in range(9)}
    digests = set()
    for seed in range(5):
        blocks, order = Blocks(), random.Random(seed)
        paths = order.sample(sorted(files), len(files))
        names = order.sample(sorted(tensors), len(tensors))
        splits = [split_bytes(path, files[path]) for path in paths]
        ids = [blocks.keep(split, [files[p]]) for split, p in zip(splits, paths, strict=True)]
        shapes = [StateTensor(name, DType.F32, (int(name[1:]), 999)) for name in names]
        splits.append(split_state(shapes, MIB))
        ids.append(blocks.keep(splits[-1], [tensors[name] for name in names if name != "t0"]))
        digests.add(manifests.encode(manifest_of(splits, ids))[0])
    assert len(digests) == 1


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    split = split_state(
        [
            StateTensor("lm_head", DType.BF16, (256, 256), storage="shared"),
            StateTensor("embed", DType.BF16, (256, 256), storage="shared"),
            StateTensor("copy", DType.BF16, (256, 256), storage="own"),
            StateTensor("view", DType.BF16, (65536,), storage="shared"),
            StateTensor("none", DType.BF16, (256, 256)),
            StateTensor("none2", DType.BF16, (256, 256)),
        ],
        MIB,
    )
    assert [(t.name, t.tied) for t in split.tensors] == [
        ("copy", None),
        ("embed", None),
        ("lm_head", "embed"),
        ("none", None),
        ("none2", None),
        ("view", None),
    ]
    assert len(split.pieces) == 5
    assert split.pieces[1].parts[0].source == 1
    assert manifest_of([split], [fake_ids(split)]).tensors[2].tied == "embed"


def test_empty_tensor_has_no_bytes_and_a_scalar_one_element() -> None:
    split = split_state(
        [StateTensor("empty", DType.F32, (3, 0)), StateTensor("scalar", DType.F64, ())], MIB
    )
    empty, scalar = manifest_of([split], [fake_ids(split)]).tensors
    assert empty.boxes == ()
    assert [(box.shape, box.extents[0].length) for box in scalar.boxes] == [((), 8)]


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (StateTensor("a\x00b", DType.F32, (1,)), InvalidName),
        (StateTensor("", DType.F32, (1,)), InvalidName),
        (StateTensor("a", DType.F32, (MAX_INT,)), Refused),
        (StateTensor("a", DType.F4, (3,)), Refused),
        (StateTensor("a", DType.F32, (4,), boxes=(BoxShape((0, 0), (4,)),)), Refused),
        (StateTensor("twice", DType.F32, (4,)), Refused),
    ],
)
def test_state_that_cannot_be_kept_is_refused(tensor: StateTensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        split_state([tensor, StateTensor("twice", DType.F32, (1,))], MIB)


@pytest.mark.parametrize("block_bytes", [0, 4096, MIB + 1, 128 * MIB])
def test_block_size_outside_the_format_is_refused(block_bytes: int) -> None:
    with pytest.raises(BadSetting, match="block size"):
        split_plain(FilePath("a"), 1, block_bytes)


def _tiling(
    draw: st.DrawFn, offset: tuple[int, ...], shape: tuple[int, ...], depth: int
) -> list[BoxShape]:
    """A tensor cut in two, and the halves again, along any dimensions."""
    dim = draw(st.integers(0, len(shape) - 1))
    if depth == 0 or shape[dim] < 2:
        return [BoxShape(offset, shape)]
    at = draw(st.integers(1, shape[dim] - 1))
    left = (*shape[:dim], at, *shape[dim + 1 :])
    right = (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
    moved = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
    return _tiling(draw, offset, left, depth - 1) + _tiling(draw, moved, right, depth - 1)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], list[BoxShape]]:
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    return shape, _tiling(draw, (0,) * len(shape), shape, draw(st.integers(0, 4)))


@settings(max_examples=150, deadline=None)
@given(sharded(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_tensor_sharded_in_any_way_over_ranks_comes_back_whole(
    case: tuple[tuple[int, ...], list[BoxShape]], ranks: int, shuffled: random.Random
) -> None:
    shape, boxes = case
    array = np.frombuffer(NOISE, np.uint32, int(np.prod(shape))).reshape(shape)
    shuffled.shuffle(boxes)
    blocks = Blocks()
    splits, ids = [], []
    for rank in range(ranks):
        mine = tuple(boxes[rank::ranks])
        split = split_state([StateTensor("w", DType.U32, shape, boxes=mine)], MIB)
        sources = [array[_region(box.offset, box.shape)].tobytes() for box in mine]
        splits.append(split)
        ids.append(blocks.keep(split, sources))
    manifest = manifest_of(splits, ids)
    (tensor,) = manifest.tensors
    got = np.zeros_like(array)
    for box in tensor.boxes:
        raw = np.frombuffer(blocks.read(manifest, box.extents), np.uint32)
        got[_region(box.offset, box.shape)] = raw.reshape(box.shape)
    assert (got == array).all()


def _region(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_boxes_are_accepted_exactly_when_they_cover_every_element_once(data: st.DataObject) -> None:
    shape, boxes = data.draw(sharded())
    for _ in range(data.draw(st.integers(0, 2))):
        number = data.draw(st.integers(0, len(boxes) - 1))
        dim = data.draw(st.integers(0, len(shape) - 1))
        offset, size = list(boxes[number].offset), list(boxes[number].shape)
        change = data.draw(st.sampled_from(["drop", "move", "grow", "repeat"]))
        if change == "drop" and len(boxes) > 1:
            del boxes[number]
        elif change == "move":
            offset[dim] = max(0, offset[dim] + data.draw(st.sampled_from([-1, 1])))
        elif change == "grow":
            size[dim] = max(1, size[dim] + data.draw(st.sampled_from([-1, 1])))
        else:
            boxes.append(boxes[number])
        if change in ("move", "grow"):
            boxes[number] = BoxShape(tuple(offset), tuple(size))
    counts = np.zeros([size + 20 for size in shape], int)
    for box in boxes:
        counts[_region(box.offset, box.shape)] += 1
    inside = _region((0,) * len(shape), shape)
    covered = (counts[inside] == 1).all() and counts.sum() == np.prod(shape)
    split = split_state([StateTensor("w", DType.U8, shape, boxes=tuple(boxes))], MIB)
    if covered:
        manifest_of([split], [fake_ids(split)])
    else:
        with pytest.raises(ManifestInvalid, match="tensor 'w'"):
            manifest_of([split], [fake_ids(split)])


def test_boxes_that_no_single_cut_divides_are_accepted() -> None:
    pinwheel = (
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
        ((2, 1), (1, 2)),
    )
    boxes = tuple(BoxShape(offset, shape) for offset, shape in pinwheel)
    split = split_state([StateTensor("w", DType.U8, (3, 3), boxes=boxes)], MIB)
    assert len(manifest_of([split], [fake_ids(split)]).tensors[0].boxes) == 5


def test_boxes_cut_along_very_many_dimensions_are_refused_without_work() -> None:
    boxes = tuple(BoxShape(at, (1,) * 12) for at in product((0, 1), repeat=12))
    split = split_state([StateTensor("w", DType.U8, (2,) * 12, boxes=boxes)], MIB)
    with pytest.raises(ManifestInvalid, match="too many ways"):
        manifest_of([split], [fake_ids(split)])


@pytest.mark.parametrize(
    ("shapes", "corners"),
    [
        ([[((0, 0), (4, 6))]], 0),
        ([[]], 0),
        ([[((0, 0), (4, 3)), ((0, 3), (4, 3))]], 3 << 1),
        ([[((0, 0), (1, 6)), ((1, 0), (3, 3)), ((1, 3), (3, 3))]], 4 << 2),
        ([[((0, 0), (1, 6)), ((1, 0), (3, 6))]] * 3, 3 * (3 << 1)),
    ],
    ids=["whole", "empty", "one way", "both ways", "three tensors"],
)
def test_corners_are_counted_as_the_page_says(
    shapes: list[list[tuple[tuple[int, int], tuple[int, int]]]],
    corners: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [
        StateTensor(
            f"w{number}",
            DType.U8,
            (4, 6) if boxes else (0, 6),
            boxes=tuple(BoxShape(offset, shape) for offset, shape in boxes),
        )
        for number, boxes in enumerate(shapes)
    ]
    split = split_state(tensors, MIB)
    monkeypatch.setattr(manifests, "MAX_CORNERS", corners)
    manifest_of([split], [fake_ids(split)])
    if corners:
        monkeypatch.setattr(manifests, "MAX_CORNERS", corners - 1)
        with pytest.raises(ManifestInvalid, match="too many ways"):
            manifest_of([split], [fake_ids(split)])


def test_a_box_of_elements_under_a_byte_fills_whole_bytes() -> None:
    halves = [BoxShape((0, 0), (2, 3)), BoxShape((0, 3), (2, 1))]
    whole = split_state([StateTensor("w", DType.F4, (2, 4), boxes=tuple(halves))], MIB)
    manifest_of([whole], [fake_ids(whole)])
    with pytest.raises(Refused, match="whole bytes"):
        split_state([StateTensor("w", DType.F4, (2, 4), boxes=(BoxShape((0, 0), (1, 3)),))], MIB)


@pytest.mark.parametrize("dtype", [DType.C32, DType.C128])
def test_a_safetensors_file_with_complex_numbers_of_torch_is_split_like_any_other(
    dtype: DType,
) -> None:
    split = split_bytes("m.safetensors", safetensors_file([("w", dtype, (3, 5))]))
    assert [(tensor.name, tensor.dtype) for tensor in split.tensors] == [("w", dtype)]


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    splits = [
        split_state([StateTensor("w", dtype, (4,), boxes=(BoxShape((at,), (2,)),))], MIB)
        for at, dtype in ((0, DType.F32), (2, DType.I32))
    ]
    with pytest.raises(Refused, match="differs from split to split"):
        manifest_of(splits, [fake_ids(split) for split in splits])


def test_files_that_cannot_lie_beside_each_other_are_refused() -> None:
    for paths in (("a", "a"), ("a", "a/b"), ("a/b", "a/b/c/d")):
        splits = [split_plain(FilePath(path), 3, MIB) for path in paths]
        with pytest.raises(ManifestInvalid):
            manifest_of(splits, [fake_ids(split) for split in splits])
