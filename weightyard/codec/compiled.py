"""Splitting and merging planes by compiled code, one pass each, where the package has it.

planes.c is compiled when the package is built, if there is a compiler (docs/design/0012). What it
does not do, NumPy does: `split` and `merge` say whether it was done.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

from weightyard.codec.arena import Bytes
from weightyard.format.block import Codec

_FILE = Path(__file__).with_name("_planes.so")
_NAMES = {
    Codec.PLANES_BF16: "bf16",
    Codec.PLANES_FP16: "fp16",
    Codec.PLANES_FP32: "fp32",
    Codec.PLANES_FP64: "fp64",
}


def _load() -> dict[str, ctypes._NamedFuncPointer]:
    """The functions of the library; none where it is missing, or for other machines."""
    if sys.byteorder != "little":
        return {}
    found = {}
    try:
        library = ctypes.CDLL(str(_FILE))  # its calls let other threads run
        for codec, name in _NAMES.items():
            for verb in ("split", "merge"):
                function = library[f"{verb}_{name}"]
                function.restype = None
                function.argtypes = [ctypes.c_void_p] * (1 + codec.planes) + [ctypes.c_size_t]
                found[function.__name__] = function
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
    # Compiled code believes what it is told: other lengths and memory with gaps are not for it.
    if function is None or raw.size != count * len(planes):
        return False
    if any(plane.size != count for plane in planes):
        return False
    if not all(array.flags.c_contiguous and array.itemsize == 1 for array in arrays):
        return False
    function(*(array.ctypes.data for array in arrays), count)
    return True
