"""ServiceReader: reads blocks through the service, for hosts that cannot reach the store."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from weightyard.errors import BlockCorrupt, NoSuchThing
from weightyard.format.block import block_id
from weightyard.format.manifest import Manifest
from weightyard.names import BlockId
from weightyard.transfer.plan import Wanted
from weightyard.transfer.report import ReadReport
from weightyard.transfer.together import run_together

_AT_ONCE = 4
"""How many blocks are fetched together; each is in memory until it is checked."""


class Fetches(Protocol):
    """Gives the raw bytes of a block, piece by piece."""

    def __call__(self, block: BlockId, write: Callable[[bytes], object], /) -> object: ...


class ServiceReader:
    """Reads blocks of one version. Thread-safe.

    A block is received as a whole, and its id checked before any of it goes into a buffer.
    """

    def __init__(self, manifest: Manifest, fetch: Fetches) -> None:
        self._raw_bytes = {block.id: block.raw_bytes for block in manifest.blocks}
        self._fetch = fetch

    def read(
        self, wanted: Iterable[Wanted], progress: Callable[[int], None] | None = None
    ) -> ReadReport:
        """Fill every buffer. `progress` is told of raw bytes done.

        Raises NoSuchThing for a block the version does not have, BlockCorrupt, and what the
        service raises; then the buffers' content is undefined.
        """
        by_block: dict[BlockId, list[Wanted]] = defaultdict(list)
        for want in wanted:
            by_block[want.block].append(want)
        report = ReadReport()
        lock = threading.Lock()

        def get(block: BlockId, parts: Sequence[Wanted]) -> None:
            raw = self._whole(block)
            done_bytes = 0
            for part in parts:
                part.into[:] = raw[part.offset : part.end]
                done_bytes += part.into.nbytes
            with lock:
                report.raw_bytes += done_bytes
                report.stored_bytes += len(raw)
                report.requests += 1
                if progress is not None:
                    progress(done_bytes)

        calls = [partial(get, block, parts) for block, parts in by_block.items()]
        run_together(_AT_ONCE, "weightyard-blocks", calls)
        return report

    def _whole(self, block: BlockId) -> memoryview:
        raw_bytes = self._raw_bytes.get(block)
        if raw_bytes is None:
            raise NoSuchThing(f"the version has no block {block}")
        raw = memoryview(bytearray(raw_bytes))  # growing, it would take more memory than it needs
        come = 0

        def write(piece: bytes) -> None:
            nonlocal come
            if come + len(piece) > raw_bytes:
                raise BlockCorrupt(f"block {block}: more than its {raw_bytes} bytes were sent")
            raw[come : come + len(piece)] = piece
            come += len(piece)

        self._fetch(block, write)
        if block_id(raw[:come]) != block:
            raise BlockCorrupt(f"block {block}: the service sent other bytes")
        return raw
