"""A follower brings in a version of which one block in twenty differs, and changes over to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from bench.models import as_bytes
from bench.prepared import PLANES, Prepared, pushed
from bench.rows import Planned, measure
from bench.samples import Kind, Row
from bench.site import Site
from bench.worker import Action, Prepare
from bench.yards import MODEL, opened
from weightyard.format.block import DEFAULT_BLOCK_BYTES

FULL, SWAP, SWAP_DELTA = "full load", "swap", "swap, a delta beside"
SHARE = 0.05
SERVED, ANOTHER, NEXT = 1, 2, 3
"""Versions. Both others differ from what is served in the same blocks, each in its own way."""
_ALIAS = "live"
_POLL_S = 0.02
_TIMEOUT_S = 60.0


class _Swap:
    """From the move of the alias until what is served is the new version.

    To another version and back before, untimed: who has followed for a while is as warm as who
    loads again, and has not seen the next version either.
    """

    def __init__(self, url: str, folder: str) -> None:
        self._yard = opened(url, folder)
        self._yard.set_alias(MODEL, _ALIAS, SERVED)
        self._served = self._yard.load(f"{MODEL}@{_ALIAS}", cache=False)
        self._follower = self._yard.follow(f"{MODEL}@{_ALIAS}", self._served, poll_s=_POLL_S)
        self.read_bytes = 0
        for version in (ANOTHER, SERVED):
            self._move(version)

    def __call__(self) -> Sequence[memoryview]:
        self._move(NEXT)
        return as_bytes(self._served)

    def _move(self, version: int) -> None:
        self._yard.set_alias(MODEL, _ALIAS, version)
        ready = self._follower.wait(_TIMEOUT_S)
        report = self._follower.report
        if ready is None or report is None:
            raise RuntimeError(f"not brought: {self._follower.failure}")
        self._follower.apply()
        self.read_bytes = report.stored_bytes


def swap(site: Site, *, url: str, folder: str) -> Action:
    return _Swap(url, folder)


TASKS: Mapping[str, Prepare] = {"swap.swap": swap}


def run(site: Site, length: int, repeat: int, done: Callable[[Row], object]) -> tuple[Row, ...]:
    rows: tuple[Row, ...] = ()
    for way, delta in ((SWAP, "off"), (SWAP_DELTA, "also")):
        with pushed(site, length, PLANES) as model:
            yard = model.yards[PLANES]
            full = Row(Kind.OURS, "weightyard", FULL, model.length, group=way, is_fresh=True)
            planned = [Planned(full, "yards.load", {**yard, "ref": f"{MODEL}@v{SERVED}"})]
            after = {**yard, "source": str(model.source), "delta": delta, "is_repeatable": False}
            for version in (ANOTHER, NEXT):
                with _changed(model, seed=version):
                    site.run_child("yards.push", {**after, "parent": f"{MODEL}@v{SERVED}"})
            row = Row(Kind.OURS, "weightyard", way, model.length, group=way)
            planned.append(Planned(row, "swap.swap", {**yard, "is_repeatable": False}))
            rows += measure(site, planned, repeat, done)
    return rows


@contextmanager
def _changed(model: Prepared, seed: int) -> Iterator[None]:
    """One block in twenty, spread over the model, moved by as little as a training step does."""
    _flip_some(model, seed)
    try:
        yield
    finally:
        _flip_some(model, seed)


def _flip_some(model: Prepared, seed: int) -> None:
    """The last bit of a tenth of the values; once more, and all is as it was."""
    blocks = model.length // DEFAULT_BLOCK_BYTES
    data = np.memmap(model.file, np.uint8, "r+")
    words = data[-model.length :].view(np.uint16)
    random = np.random.default_rng(seed)
    width = DEFAULT_BLOCK_BYTES // 2
    for block in np.linspace(0, blocks - 1, max(1, round(SHARE * blocks)), dtype=int):
        part = words[block * width : (block + 1) * width]
        part ^= random.random(width) < 0.1
    data.flush()
