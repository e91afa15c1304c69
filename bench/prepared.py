"""Models in yards: made, pushed and removed again by the sections about loading."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import peers
from bench.models import TENSOR_BYTES, WIDTH, bf16_words, make_model, write_model
from bench.site import Site

FOLDER = "/bench/yards"
RAW, PLANES = "raw", "planes"
CODECS = {RAW: "raw", PLANES: "auto"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model as a file, and the yards it was pushed to."""

    source: Path
    """A folder with `model.safetensors`."""
    length: int
    """Of its tensors."""
    digest: str
    yards: dict[str, dict[str, Any]]
    """What tasks want to know of a yard, by how it encodes."""

    @property
    def file(self) -> Path:
        return self.source / "model.safetensors"


@contextmanager
def pushed(
    site: Site,
    length: int,
    *codecs: str,
    is_trained: bool = False,
    folder: str | None = None,
    **options: Any,
) -> Iterator[Prepared]:
    """A model in a yard for each codec; in HDFS, or in a local folder. All of it is removed after.

    Raises NotToBeHad if there are no trained weights.
    """
    here = Path(folder or site.scratch, "trained" if is_trained else "model")
    source = here / "source"
    source.mkdir(parents=True)
    try:
        file = source / "model.safetensors"
        digest = make_trained(file, length) if is_trained else make_model(file, length)
        yards = {}
        for codec in codecs:
            url = f"{here}/{codec}/store" if folder else f"{site.url}{FOLDER}/{codec}"
            yards[codec] = {"url": url, "folder": f"{here}/{codec}"}
            wanted = {**yards[codec], "source": str(source), "codec": CODECS[codec], **options}
            site.run_child("yards.push", {**wanted, "is_repeatable": False})
        yield Prepared(source, max(1, length // TENSOR_BYTES) * TENSOR_BYTES, digest, yards)
    finally:
        shutil.rmtree(here)
        if not folder:
            peers.native_client(site).delete(FOLDER, recursive=True)


class NotToBeHad(Exception):
    """There are no trained weights on this machine, and none could be fetched."""


def make_trained(file: Path, tensor_bytes: int) -> str:
    """A real model's weights as bf16, over and over, moved on each time: no blocks are equal."""
    from bench.codec import trained_weights

    trained = trained_weights()
    if trained is None:
        raise NotToBeHad("no trained weights could be fetched")
    moved = 0

    def words() -> bytes:
        nonlocal moved
        moved += 1_000_003
        return bf16_words(np.roll(trained, moved)[: WIDTH * WIDTH].copy())

    return write_model(file, tensor_bytes, words)
