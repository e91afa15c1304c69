"""A safetensors file is split by its tensors, or kept as plain bytes with the reason said."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from format_examples import safetensors_file, split_bytes

from weightyard.format.dtypes import DType, nbytes
from weightyard.format.safetensors import (
    MAX_HEADER_BYTES,
    MAX_HEADER_COMMAS,
    Header,
    OddFile,
    header_length,
    parse_header,
)

TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def parsed(data: bytes) -> Header:
    header = parse_header(data, len(data))
    assert isinstance(header, Header), header
    return header


def test_every_dtype_the_library_writes_is_found_where_the_library_finds_it(tmp_path: Path) -> None:
    tensors = {
        f"t.{dtype}": torch.arange(24, dtype=torch.uint8).repeat(16).view(dtype)
        for dtype in TORCH_DTYPES
    }
    tensors |= {"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)}
    data = safetensors.torch.save(tensors, {"format": "pt"})
    header = parsed(data)
    assert {tensor.name for tensor in header.tensors} == set(tensors)
    listed = dict(safetensors.deserialize(data))
    for tensor in header.tensors:
        entry = listed[tensor.name]
        assert (tensor.dtype, list(tensor.shape)) == (entry["dtype"], entry["shape"])
        assert data[tensor.begin : tensor.end] == bytes(entry["data"])


def test_numpy_files_are_read_alike() -> None:
    arrays = {"b": np.arange(10.0), "a": np.ones((2, 3), np.int16)}
    header = parsed(safetensors.numpy.save(arrays))
    assert {(t.name, t.dtype, t.shape) for t in header.tensors} == {
        ("a", "I16", (2, 3)),
        ("b", "F64", (10,)),
    }


def test_file_without_tensors_is_its_header() -> None:
    data = safetensors.numpy.save({})
    assert parsed(data).tensors == ()
    assert parsed(data).file_bytes == len(data)


def test_header_written_by_others_with_spaces_is_read_too() -> None:
    data = safetensors_file([("ä.weight", DType.F6_E2M3, (4, 2))], spaces=True)
    assert parsed(data).tensors[0].name == "ä.weight"


def test_tensors_come_in_data_order_whatever_the_order_of_the_header() -> None:
    fields = {
        "late": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
        "early": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    }
    assert [t.name for t in parsed(file_of(fields, 8)).tensors] == ["early", "late"]


def file_of(fields: Any, data_bytes: int) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes


ODD = {
    "shorter than a header": b"\x01\x00",
    "header of 100000001 bytes": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
    "past the end": struct.pack("<Q", 3) + b"{}",
    "does not begin with": file_of(b" {}", 0),
    "utf-8": file_of(b'{"\xff":1}', 0),
    "Expecting": file_of(b"{", 0),
    "Extra data": file_of(b"{}{}", 0),
    "appears twice": file_of(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
    ),
    "a key appears twice": file_of(
        b'{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', 1
    ),
    "header: a key appears twice": file_of(b'{"__metadata__":{"a":"","a":""}}', 0),
    "number 4.0": file_of(b'{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}', 4),
    "number NaN": file_of(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', 4),
    "Expected `object`": file_of({"a": []}, 0),
    "Expected `str`": file_of({"__metadata__": {"a": 1}}, 0),
    "Invalid enum value 'U7'": file_of({"a": entry(dtype="U7")}, 4),
    "unknown field": file_of({"a": entry(strides=[1])}, 4),
    "missing required field": file_of({"a": {"dtype": "U8", "shape": [4]}}, 4),
    "`int` >= 0": file_of({"a": entry(shape=[-4])}, 4),
    "length <= 64": file_of({"a": entry(shape=[1] * 65, data_offsets=[0, 1])}, 1),
    "tensor name ''": file_of({"": entry()}, 4),
    "tensor name 'a\\n'": file_of({"a\n": entry()}, 4),
    "tensor name '\\ud800'": file_of({"\ud800": entry()}, 4),
    "tensor name 'xx": file_of({"x" * 1025: entry()}, 4),
    "do not match": file_of({"a": entry(shape=[3])}, 4),
    "offsets do not match": file_of({"a": entry(data_offsets=[4, 0])}, 4),
    "whole bytes": file_of({"a": entry(dtype="F4", shape=[3], data_offsets=[0, 2])}, 2),
    "over 9223372036854775807 bytes": file_of({"a": entry(shape=[1 << 40, 1 << 40, 0])}, 4),
    "a hole": file_of({"a": entry(data_offsets=[1, 5])}, 5),
    "hole or overlap": file_of({"a": entry(), "b": entry(data_offsets=[2, 6])}, 6),
    "tensor b: a hole or overlap": file_of({"a": entry(), "b": entry()}, 4),
    "3 bytes too many": file_of({"a": entry()}, 7),
    "1 bytes too few": file_of({"a": entry()}, 3),
    "values": file_of(b"{" + b"," * (MAX_HEADER_COMMAS + 1), 0),
    "recursion": file_of(b'{"a":' * 100_000, 0),
}


@pytest.mark.parametrize("reason", ODD)
def test_odd_file_is_kept_as_plain_bytes_and_says_why(reason: str) -> None:
    data = ODD[reason]
    split = split_bytes("odd.safetensors", data)
    assert split.odd is not None
    assert reason in split.odd
    assert [file.kind for file in split.files] == ["plain"]
    assert not split.tensors
    assert sum(piece.raw_bytes for piece in split.pieces) == len(data)


def test_header_cut_short_by_the_caller_is_odd_and_no_crash() -> None:
    data = safetensors_file([("a", DType.U8, (4,))])
    assert header_length(data[:8], len(data)) == len(data) - 4
    for given in (0, 3, 8, 20):
        assert isinstance(parse_header(data[:given], len(data)), OddFile)


def test_header_of_20000_tensors_parses_about_as_quickly_as_its_json() -> None:
    shape = (3, 5)
    size = nbytes(DType.BF16, shape)
    fields = {
        f"model.layers.{i}.mlp.weight": {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(20_000)
    }
    data = file_of(fields, 20_000 * size)
    start = time.process_time()
    json.loads(json.dumps(fields))
    as_json = time.process_time()
    assert len(parsed(data).tensors) == 20_000
    assert time.process_time() - as_json < 10 * (as_json - start)
