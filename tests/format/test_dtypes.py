"""Sizes of tensors: exact, and never more than a signed 64-bit integer holds."""

from __future__ import annotations

import pytest

from weightyard.errors import Refused, TooLarge, YardError
from weightyard.format.block import Codec
from weightyard.format.dtypes import MAX_INT, DType, codec_hint, nbytes


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        (DType.F32, (), 4),
        (DType.F32, (0,), 0),
        (DType.BF16, (3, 5), 30),
        (DType.F4, (2, 3), 3),
        (DType.F6_E2M3, (4,), 3),
        (DType.C128, (2,), 32),
        (DType.U8, (MAX_INT,), MAX_INT),
        (DType.F4, (2 * MAX_INT,), MAX_INT),
        (DType.BOOL, (1,) * 64, 1),
    ],
)
def test_size_is_exact(dtype: DType, shape: tuple[int, ...], size: int) -> None:
    assert nbytes(dtype, shape) == size


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        (DType.F4, (3,), Refused),
        (DType.F6_E3M2, (2,), Refused),
        (DType.U8, (-1,), Refused),
        (DType.U8, (MAX_INT + 1,), TooLarge),
        (DType.U8, (1 << 32, 1 << 32), TooLarge),
        (DType.U8, (0, 1 << 32, 1 << 32), TooLarge),
        (DType.U8, (1 << 32, 1 << 32, 0), TooLarge),
        (DType.C128, (MAX_INT // 8,), TooLarge),
        (DType.U8, (1,) * 65, TooLarge),
    ],
)
def test_impossible_shape_is_refused(
    dtype: DType, shape: tuple[int, ...], error: type[YardError]
) -> None:
    with pytest.raises(error):
        nbytes(dtype, shape)


def test_floats_are_tried_as_planes_of_their_own_width() -> None:
    for dtype in DType:
        codec = codec_hint(dtype)
        if codec is not Codec.ZSTD:
            assert dtype.bits // 8 % codec.planes == 0
    assert codec_hint(DType.C64) is Codec.PLANES_FP32
    assert codec_hint(DType.F8_E4M3) is Codec.ZSTD
