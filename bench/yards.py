"""A yard as its users have it: what a child pushes there, and how it loads from there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bench.models import as_bytes
from bench.site import Site
from bench.worker import Action, Prepare
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.yard import Yard

MODEL = "bench/model"


def settings_in(folder: str, location: str | None = None) -> Settings:
    """Database, home and cache in a folder of its own. `location`: the rack of who reads."""
    return Settings(
        db=f"sqlite:///{folder}/registry.db",
        home=Path(folder),
        cache=Path(folder, "cache"),
        location=location,
    )


def opened(url: str, folder: str, location: str | None = None) -> Yard:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return open_yard(url, settings=settings_in(folder, location))


def push(
    site: Site,
    *,
    url: str,
    folder: str,
    source: str,
    codec: Literal["auto", "raw"] = "auto",
    delta: Literal["off", "also"] = "off",
    parent: str | None = None,
    copies: int = 1,
    snapshot: bool = False,
) -> Action:
    """Publish a folder as the next version; with `snapshot`, have its files on this node too."""
    yard = opened(url, folder)

    def act() -> list[memoryview]:
        pushed = yard.push(
            source, MODEL, codec=codec, delta=delta, parent=parent, replication=copies
        )
        if snapshot:
            yard.snapshot(pushed.ref)
        return []

    return act


class Load:
    """`Yard.load`, from the ref to the last tensor; placements are asked of the registry."""

    def __init__(self, yard: Yard, ref: str, *, is_half: bool = False, cache: bool = False) -> None:
        self._yard, self._ref, self._cache = yard, ref, cache
        self._slices = {"*": HALF} if is_half else None
        self.read_bytes = 0

    def __call__(self) -> Sequence[memoryview]:
        weights = self._yard.load(self._ref, cache=self._cache, slices=self._slices)
        self.read_bytes = weights.report.stored_bytes
        if others := set(weights.report.read_paths) - {"direct", "local", "short-circuit"}:
            raise RuntimeError(f"read by {others.pop()}")
        return as_bytes(weights)


HALF = slice(0, 2048)
"""The rows of the first of two ranks; `models.WIDTH` are there."""


def load(
    site: Site,
    *,
    url: str,
    folder: str,
    ref: str = MODEL,
    is_half: bool = False,
    cache: bool = False,
) -> Action:
    return Load(opened(url, folder), ref, is_half=is_half, cache=cache)


class _Stream:
    """`Yard.stream`: each tensor is taken and kept, so that memory is as after a load."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard
        self.first_s = 0.0

    def __call__(self) -> Sequence[memoryview]:
        began = time.perf_counter()
        tensors: dict[str, Any] = {}
        for name, tensor in self._yard.stream(MODEL, cache=False):
            if not tensors:
                self.first_s = time.perf_counter() - began
            tensors[name] = tensor
        return as_bytes(tensors)


def stream(site: Site, *, url: str, folder: str) -> Action:
    return _Stream(opened(url, folder))


TASKS: Mapping[str, Prepare] = {
    "yards.push": push,
    "yards.load": load,
    "yards.stream": stream,
}
