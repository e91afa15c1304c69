"""The element types a tensor may have, and how many bytes a shape takes (docs/format.md §7)."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from weightyard.errors import Refused, TooLarge
from weightyard.format.block import Codec

MAX_INT = (1 << 63) - 1
"""No size, offset or product in a file is larger, so a reader may use signed 64-bit integers."""

MAX_RANK = 64
"""Dimensions of a tensor; NumPy's own limit."""


class DType(enum.StrEnum):
    """Element types by the names safetensors gives them, and two complex ones that torch adds."""

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C32 = "C32"
    I64 = "I64"
    U64 = "U64"
    F64 = "F64"
    C64 = "C64"
    C128 = "C128"

    @property
    def bits(self) -> int:
        """Bits of one element. Elements under a byte are packed without gaps."""
        return _BITS[self]


_BITS = {
    DType.BOOL: 8,
    DType.F4: 4,
    DType.F6_E2M3: 6,
    DType.F6_E3M2: 6,
    DType.U8: 8,
    DType.I8: 8,
    DType.F8_E5M2: 8,
    DType.F8_E4M3: 8,
    DType.F8_E8M0: 8,
    DType.F8_E4M3FNUZ: 8,
    DType.F8_E5M2FNUZ: 8,
    DType.I16: 16,
    DType.U16: 16,
    DType.F16: 16,
    DType.BF16: 16,
    DType.I32: 32,
    DType.U32: 32,
    DType.F32: 32,
    DType.C32: 32,
    DType.I64: 64,
    DType.U64: 64,
    DType.F64: 64,
    DType.C64: 64,
    DType.C128: 128,
}

# A complex number is two floats side by side, so its planes are those of its parts.
_PLANES = {
    DType.BF16: Codec.PLANES_BF16,
    DType.F16: Codec.PLANES_FP16,
    DType.C32: Codec.PLANES_FP16,
    DType.F32: Codec.PLANES_FP32,
    DType.C64: Codec.PLANES_FP32,
    DType.F64: Codec.PLANES_FP64,
    DType.C128: Codec.PLANES_FP64,
}


def nbytes(dtype: DType, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor; no dimensions is one element.

    A dimension of 0 counts as 1 in the bound, because strides are computed from the others.
    Raises TooLarge (rank over MAX_RANK, or over MAX_INT bytes), Refused (a negative dimension,
    or elements under a byte that do not fill whole bytes).
    """
    if len(shape) > MAX_RANK:
        raise TooLarge(f"a tensor of {len(shape)} dimensions; at most {MAX_RANK}")
    elements = 1
    strides = _BITS[dtype]
    for size in shape:
        if size < 0:
            raise Refused(f"a dimension of {size}")
        elements *= size
        strides *= size or 1
        if strides > 8 * MAX_INT:
            raise TooLarge(f"a {dtype} tensor of over {MAX_INT} bytes")
    whole, rest = divmod(elements * _BITS[dtype], 8)
    if rest:
        raise Refused(f"{elements} elements of {dtype} do not fill whole bytes")
    return whole


def codec_hint(dtype: DType) -> Codec:
    """The codec to try on a tensor of this type: byte planes for floats, zstd for the rest."""
    return _PLANES.get(dtype, Codec.ZSTD)
