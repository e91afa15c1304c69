"""Yards and models for the tests of the loader."""

from __future__ import annotations

import json
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from sqlalchemy import text

from weightyard.opening import open_yard
from weightyard.registry.database import Database
from weightyard.settings import Settings
from weightyard.yard import Yard

BERT = "team/bert"

_WRITING = ("weightyard-records", "weightyard-stage")
"""Threads that write the records of what was done, behind it. Nobody but `close` waits for them."""

_WRITTEN_S = 60.0

_others: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@contextmanager
def yard_in(folder: Path, url: str | None = None, **settings: object) -> Iterator[Yard]:
    """A yard with nothing of this machine's in it: home and cache are in the folder."""
    given = Settings(home=folder / "home", cache=folder / "cache", **settings)
    with open_yard(url or str(folder / "store"), settings=given) as yard:
        yield yard


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Weights as a trained model has them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(0.02).to(dtype)


def saved(file: Path, tensors: Mapping[str, torch.Tensor], **metadata: str) -> Path:
    """A safetensors file; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), file, metadata or None)
    return file


def sharded(folder: Path, *shards: Mapping[str, torch.Tensor]) -> Path:
    """A model of several files and the index that names them."""
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        path = f"model-{number:05}-of-{len(shards):05}.safetensors"
        saved(folder / path, tensors)
        weight_map |= dict.fromkeys(tensors, path)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(bits(left[name]), bits(right[name]))
        for name in left
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def our_threads() -> list[str]:
    """Those of weightyard that were begun in this test."""
    return [one.name for one in _ours()]


def left_threads() -> list[str]:
    """Those that are still there, but for ones that write records: these are waited for."""
    ours = _ours()
    writing = [one for one in ours if one.name.startswith(_WRITING)]
    for one in writing:
        one.join(_WRITTEN_S)
    return [one.name for one in ours if one not in writing or one.is_alive()]


def leave_out_others() -> None:
    """Count only threads that begin from now on."""
    for one in _all_threads():
        if one.name.startswith(_WRITING):
            one.join(_WRITTEN_S)  # it would begin others
    _others.update(_all_threads())


def _ours() -> list[threading.Thread]:
    return [one for one in _all_threads() if one not in _others]


def _all_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("weightyard")]


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of loopback that nobody else is given, whether or not something listens on it.

    While nothing does, connections are refused. Who listens on it sets SO_REUSEADDR, as all do.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield int(kept.getsockname()[1])


def leases(database: Database) -> int:
    """How many versions somebody is reading."""
    with database.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM read_leases")).scalar_one())
