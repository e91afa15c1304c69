"""A store filled with small blocks, and reading all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strategies import content

from weightyard.format.block import KIB, MIB
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import BlockId
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.learned import Learned
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.report import ReadReport
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

BLOCK_BYTES = 64 * KIB
"""The least that has a block of its own."""


class Filled:
    """A store with many small blocks, each in a pack of its own: each is a read of its own."""

    def __init__(self, folder: Path, packs: int) -> None:
        self.store = LocalStore(folder)
        self.store.init()
        self.catalogue = MemoryCatalogue()
        data = [content(BLOCK_BYTES, "weights", seed) for seed in range(packs)]
        tensors = [StateTensor(f"t{i:02}", DType.BF16, (BLOCK_BYTES // 2,)) for i in range(packs)]
        writer = Writer(self.store, self.catalogue.upload(), WriteOptions(pack_bytes=BLOCK_BYTES))
        (ids,) = writer.write(
            [Content(split_state(tensors, MIB), [MemorySource(one) for one in data])]
        )
        self.blocks: dict[BlockId, bytes] = dict(zip(ids, data, strict=True))
        assert len(self.catalogue.packs) == packs

    def read_all(self, store: Store, **how: Any) -> ReadReport:
        out = {block: bytearray(BLOCK_BYTES) for block in self.blocks}
        reader = Reader(store, self.catalogue, **{"learned": Learned(), **how})
        report = reader.read(Wanted(block, 0, memoryview(into)) for block, into in out.items())
        assert out == self.blocks
        return report
