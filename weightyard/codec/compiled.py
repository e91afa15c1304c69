"""Compiled code, if the package has it: splitting and merging planes, folds, Huffman coding.

The C files here are compiled when the package is built, if there is a compiler (docs/design/0012).
Each call says whether it was done; if not, NumPy or zstd does it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightyard.codec.arena import Bytes
from weightyard.format.block import CHUNK_BYTES, Codec

_FILE = Path(__file__).with_name("_compiled.so")
_NAMES = {
    Codec.PLANES_BF16: "bf16",
    Codec.PLANES_FP16: "fp16",
    Codec.PLANES_FP32: "fp32",
    Codec.PLANES_FP64: "fp64",
}
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_Signature = tuple[type[Any] | None, list[type[ctypes.c_void_p | ctypes.c_size_t]]]
_SIGNATURES: dict[str, _Signature] = {
    "fold_bytes": (None, [_POINTER, _SIZE, _POINTER, _POINTER]),
    "huffman_frame": (_SIZE, [_POINTER, _SIZE, _POINTER, _SIZE, _POINTER]),
    "huffman_scratch_bytes": (_SIZE, []),
    "unhuffman_frame": (ctypes.c_int, [_POINTER, _SIZE, _POINTER, _SIZE]),
}
for _codec, _name in _NAMES.items():
    for _verb in ("split", "merge"):
        _SIGNATURES[f"{_verb}_{_name}"] = (None, [_POINTER] * (1 + _codec.planes) + [_SIZE])


def _load() -> dict[str, ctypes._NamedFuncPointer]:
    """The functions of the library; none where it is missing, or for other machines."""
    if sys.byteorder != "little":
        return {}
    found = {}
    try:
        library = ctypes.CDLL(str(_FILE))  # its calls let other threads run
        for name, (result, arguments) in _SIGNATURES.items():
            function = library[name]
            function.restype, function.argtypes = result, arguments
            found[name] = function
    except (OSError, AttributeError):
        return {}
    return found


_functions = _load()


def is_there() -> bool:
    """Whether this installation has compiled code."""
    return bool(_functions)


def split(codec: Codec, raw: Bytes, planes: Sequence[Bytes]) -> bool:
    """Fill the planes from the elements in `raw`, if there is compiled code for it."""
    return _call("split", codec, raw, planes)


def merge(codec: Codec, planes: Sequence[Bytes], raw: Bytes) -> bool:
    """Fill `raw` with the elements of these planes, if there is compiled code for it."""
    return _call("merge", codec, raw, planes)


def _call(verb: str, codec: Codec, raw: Bytes, planes: Sequence[Bytes]) -> bool:
    function = _functions.get(f"{verb}_{_NAMES.get(codec)}")
    count = raw.size // codec.planes
    arrays = (raw, *planes)
    # Compiled code checks nothing: so other lengths and memory with gaps are kept from it.
    if function is None or raw.size != count * len(planes):
        return False
    if any(plane.size != count for plane in planes):
        return False
    if not all(array.flags.c_contiguous and array.itemsize == 1 for array in arrays):
        return False
    function(*(array.ctypes.data for array in arrays), count)
    return True


def fold(raw: Bytes) -> tuple[int, int] | None:
    """The two sums of these bytes, if there is compiled code for them."""
    function = _functions.get("fold_bytes")
    if function is None or not raw.flags.c_contiguous or raw.itemsize != 1:
        return None
    total, weighted = ctypes.c_uint64(), ctypes.c_uint64()
    function(raw.ctypes.data, raw.size, ctypes.byref(total), ctypes.byref(weighted))
    return total.value, weighted.value


class HuffmanCoder:
    """Codes numbers of which some are frequent; for one thread, in memory of its own."""

    def __init__(self) -> None:
        self._scratch: Bytes | None = None
        self._frame = np.empty(CHUNK_BYTES, np.uint8)

    def frame(self, data: memoryview) -> memoryview | None:
        """A zstd frame of these bytes, smaller than they are, which the next call overwrites.

        None if there is no compiled code, and for bytes it is not meant for: those that would not
        shrink, are too few, or more than a chunk.
        """
        code = _functions.get("huffman_frame")
        if code is None or len(data) > CHUNK_BYTES or not data.c_contiguous:
            return None
        if self._scratch is None:
            self._scratch = np.zeros(_functions["huffman_scratch_bytes"](), np.uint8)
        raw = np.frombuffer(data, np.uint8)
        length = code(
            raw.ctypes.data, raw.size, self._frame.ctypes.data, raw.size, self._scratch.ctypes.data
        )
        return self._frame[:length].data if length else None


def decode_huffman(frame: memoryview, out: memoryview) -> bool:
    """Fill `out` exactly from a frame that HuffmanCoder made, if there is compiled code for it.

    False also for any other bytes: `out` then holds nothing of use, and zstd decides what they are.
    """
    decode = _functions.get("unhuffman_frame")
    if decode is None or out.readonly or not (frame.c_contiguous and out.c_contiguous):
        return False
    stored, raw = np.frombuffer(frame, np.uint8), np.frombuffer(out, np.uint8)
    return bool(decode(stored.ctypes.data, stored.size, raw.ctypes.data, raw.size))
