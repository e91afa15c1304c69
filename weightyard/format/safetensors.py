"""Headers of safetensors files: where each tensor lies (docs/format.md §7).

A file whose header is anything but ordinary is no error: it is kept as plain bytes. So the
functions here return an `OddFile` with the reason instead of raising.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from typing_extensions import Buffer

from weightyard.errors import Refused
from weightyard.format.dtypes import MAX_INT, MAX_RANK, DType, nbytes
from weightyard.names import is_tensor_name

LENGTH_BYTES = 8
"""A file begins with the length of its JSON, little-endian."""

MAX_HEADER_BYTES = 100_000_000
"""Of JSON; the bound of the safetensors library."""

MAX_HEADER_COMMAS = 1 << 21
"""Counted before the JSON is parsed: they bound the values in it, and so what parsing allocates.

Enough for 400,000 matrices."""


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor as the header lists it; offsets are from the beginning of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file holds. Its tensors follow each other without holes to its end."""

    header_bytes: int
    """Length field and JSON: where the first tensor begins."""
    tensors: tuple[HeaderTensor, ...]
    """In data order."""

    @property
    def file_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else self.header_bytes


@dataclass(frozen=True, slots=True)
class OddFile:
    """Why a file cannot be split by what is in it. It is kept as plain bytes."""

    reason: str


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: DType
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MAX_RANK)]
    data_offsets: tuple[_Size, _Size]


def header_length(head: Buffer, file_bytes: int) -> int | OddFile:
    """How many bytes of a file are its header, by its first eight bytes."""
    first = bytes(memoryview(head)[:LENGTH_BYTES])
    if file_bytes < LENGTH_BYTES or len(first) < LENGTH_BYTES:
        return OddFile("shorter than a header")
    json_bytes = int.from_bytes(first, "little")
    if json_bytes > MAX_HEADER_BYTES:
        return OddFile(f"header of {json_bytes} bytes; at most {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + json_bytes > file_bytes:
        return OddFile("header runs past the end of the file")
    return LENGTH_BYTES + json_bytes


def parse_header(head: Buffer, file_bytes: int) -> Header | OddFile:
    """The tensors of a file, by its header bytes (as many as `header_length` says, or more)."""
    length = header_length(head, file_bytes)
    if isinstance(length, OddFile):
        return length
    raw = bytes(memoryview(head)[LENGTH_BYTES:length])
    if len(raw) != length - LENGTH_BYTES:
        return OddFile("header bytes are missing")
    if not raw.startswith(b"{"):
        return OddFile("header does not begin with '{'")
    if raw.count(b",") > MAX_HEADER_COMMAS:
        return OddFile(f"header of over {MAX_HEADER_COMMAS} values")
    try:
        fields = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_float=_refuse, parse_constant=_refuse
        )
        msgspec.convert(fields.pop("__metadata__", {}), dict[str, str])
        entries = msgspec.convert(fields, dict[str, _Entry])
    except (ValueError, RecursionError) as why:  # msgspec.ValidationError is a ValueError
        return OddFile(f"header: {str(why)[:200]}")
    return _in_data_order(entries, length, file_bytes)


def _in_data_order(
    entries: dict[str, _Entry], header_bytes: int, file_bytes: int
) -> Header | OddFile:
    tensors = []
    for name, entry in entries.items():
        if not is_tensor_name(name):
            return OddFile(f"tensor name {name[:80]!a}")
        begin, end = entry.data_offsets
        try:
            expected = nbytes(entry.dtype, entry.shape)
        except Refused as why:
            return OddFile(f"tensor {name}: {why}")
        if end - begin != expected:
            return OddFile(f"tensor {name}: offsets do not match its shape and dtype")
        tensors.append(
            HeaderTensor(
                name, entry.dtype, tuple(entry.shape), header_bytes + begin, header_bytes + end
            )
        )
    tensors.sort(key=attrgetter("begin", "end", "name"))
    at = header_bytes
    for tensor in tensors:
        if tensor.begin != at:
            return OddFile(f"tensor {tensor.name}: a hole or overlap before it")
        at = tensor.end
    if at != file_bytes:
        return OddFile(f"{abs(file_bytes - at)} bytes too {'many' if file_bytes > at else 'few'}")
    return Header(header_bytes, tuple(tensors))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice")
    return fields


def _refuse(text: str) -> Any:
    raise ValueError(f"number {text[:40]}")
