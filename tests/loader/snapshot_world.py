"""What the tests of snapshots have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from weightyard.names import Digest
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.yard import Yard

BERT = "team/bert"


def settings_in(folder: Path, **more: Any) -> Settings:
    """Of a node whose home and cache are below a folder."""
    return Settings(home=folder / "home", cache=folder / "cache", deadline_s=5.0, **more)


def yard_in(folder: Path, **more: Any) -> Yard:
    """An embedded yard below a folder."""
    return open_yard(str(folder / "store"), settings=settings_in(folder, **more))


def write_model(folder: Path, *seeds: int, elements: int = 50_000) -> Path:
    """A model of as many shards as there are seeds, and a config."""
    folder.mkdir(parents=True)
    for number, seed in enumerate(seeds):
        values = np.random.default_rng(seed).normal(0, 0.02, elements).astype("<f4")
        (folder / "shards").mkdir(exist_ok=True)
        safetensors.numpy.save_file(
            {f"layer{number}.weight": values, f"layer{number}.bias": values[:7]},
            folder / "shards" / f"model-{number}.safetensors",
        )
    (folder / "config.json").write_text('{"layers": 2}')
    return folder


def content(folder: Path) -> Mapping[str, bytes]:
    """Every file of a folder, by its path."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if not file.is_dir()
    }


def leftovers(cache: Path) -> list[str]:
    """What lies in the folders of things being made or removed."""
    root = cache / "snapshots"
    return [
        str(file.relative_to(root))
        for name in (".building", ".going")
        for file in (root / name).glob("*")
    ]


def push(yard: Yard, model: Path) -> Digest:
    return Digest(yard.push(model, BERT, alias="prod").digest)


def damage(file: Path, at: int | None = None) -> None:
    """Change a byte, by default in the middle, not the time: as a disk does."""
    before = file.stat()
    at = before.st_size // 2 if at is None else at
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))
    file.chmod(0o400)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
