"""How much memory a tensor of several GiB needs beyond itself when it is written and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bench.buffers import MIB, fresh
from bench.models import catalogue_of
from bench.peers import native_client
from bench.samples import Footprint
from bench.site import Site
from bench.worker import Action, Prepare
from weightyard.format.assembly import manifest_of
from weightyard.format.block import DEFAULT_BLOCK_BYTES
from weightyard.format.dtypes import DType
from weightyard.format.manifest import decode, encode
from weightyard.format.splitting import StateTensor, split_state
from weightyard.settings import Settings
from weightyard.storage.opening import open_store
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.plan import wanted_of
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

FOLDER = "/bench/memory"
_TILE_BYTES = 32 * MIB


def big_tensor(length: int) -> memoryview:
    """bf16 weights of which no two blocks are equal, made without memory beyond themselves."""
    words = np.empty(length // 2, np.uint16)
    tile = np.random.default_rng(3).standard_normal(_TILE_BYTES // 2, np.float32)
    tile = (tile.view(np.uint32) >> 16).astype(np.uint16)
    for number, start in enumerate(range(0, len(words), len(tile))):
        part = words[start : start + len(tile)]
        np.bitwise_xor(tile[: len(part)], np.uint16(number % 128), out=part)
        part[:: DEFAULT_BLOCK_BYTES // 2] = number
    return words.data.cast("B")


def write(site: Site, *, url: str, manifest: str, length: int) -> Action:
    tensor = big_tensor(length)
    store = open_store(url, Settings())
    store.init()

    def act() -> list[memoryview]:
        split = split_state([StateTensor("big", DType.BF16, (length // 2,))], DEFAULT_BLOCK_BYTES)
        writer = Writer(store, MemoryCatalogue().upload(), WriteOptions(replication=1))
        ids = writer.write([Content(split, [MemorySource(tensor)])])
        Path(manifest).write_bytes(encode(manifest_of([split], ids))[1])
        return []

    return act


def read(site: Site, *, url: str, manifest: str, length: int) -> Action:
    store = open_store(url, Settings())
    content = decode(Path(manifest).read_bytes(), None)
    reader = Reader(store, catalogue_of(store))
    into = fresh(length)
    (tensor,) = content.tensors

    def act() -> list[memoryview]:
        reader.read(want for box in tensor.boxes for want in wanted_of(content, box.extents, into))
        return []

    return act


TASKS: Mapping[str, Prepare] = {"memory.write": write, "memory.read": read}


def run(site: Site, length: int, done: Callable[[Footprint], object]) -> tuple[Footprint, ...]:
    """Write one tensor, then read it, in a process each."""
    options = {
        "url": f"{site.url}{FOLDER}",
        "manifest": f"{site.scratch}/big.manifest",
        "length": length,
        "is_repeatable": False,
    }
    rows = []
    try:
        for task in ("write", "read"):
            sample = site.run_child(f"memory.{task}", options)
            rows.append(Footprint(task, length, sample.peak_rss_bytes, sample.seconds))
            done(rows[-1])
    finally:
        native_client(site).delete(FOLDER, recursive=True)
    return tuple(rows)
