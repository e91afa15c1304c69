"""The command line on an embedded yard of its own, in this process or as a real one."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_runs import Cli
from service_world import world

__all__ = ["world"]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("weightyard")
    before = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = before


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Commands on an empty yard; no variable of the outside reaches them."""
    for name in ("URL", "STORE", "DB", "TOKEN", "VIA", "OFFLINE", "ON_UNAVAILABLE", "CACHE_MAX"):
        monkeypatch.delenv(f"WEIGHTYARD_{name}", raising=False)
    monkeypatch.setenv("WEIGHTYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WEIGHTYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WEIGHTYARD_DEADLINE_S", "2")
    monkeypatch.setenv("COLUMNS", "100")
    return Cli()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two tensors and a config."""
    return _model(tmp_path_factory.mktemp("models") / "base", seed=1)


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its last tensor changed."""
    return _model(tmp_path_factory.mktemp("models") / "tuned", seed=2)


def _model(folder: Path, seed: int) -> Path:
    tensors = {
        "trunk": np.random.default_rng(0).normal(0, 0.02, (256, 256)),
        "head": np.random.default_rng(seed).normal(0, 0.02, (256, 128)),
    }
    header, at, parts = {}, 0, []
    for name, values in tensors.items():
        data = values.astype("<f4").tobytes()
        offsets = [at, at + len(data)]
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": offsets}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    folder.mkdir()
    content = b"".join([struct.pack("<Q", len(text)), text, *parts])
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text('{"layers": 2}')
    return folder
