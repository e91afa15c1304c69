"""Catalogue: what the transfer engines need to know and say about packs and blocks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from weightyard.format.pack import Placement
from weightyard.names import BlockId, PackId


class Catalogue(Protocol):
    """Where blocks lie. Thread-safe. Call order for a writer: claim → begin_pack → add_pack."""

    def claim(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        """The placements of those blocks that the store has. Others are left out."""

    def begin_pack(self, pack: PackId) -> None:
        """Say that a pack is about to be written. Always before it has a file."""

    def add_pack(self, pack: PackId, placements: Sequence[Placement]) -> None:
        """Say that a pack is published and durable. From here on its blocks can be claimed."""


class MemoryCatalogue:
    """A catalogue of this process: what it wrote, and what pack footers told it."""

    def __init__(self, placements: Sequence[Placement] = ()) -> None:
        self._lock = threading.Lock()
        self._placements: dict[BlockId, list[Placement]] = {}
        self.packs: dict[PackId, Sequence[Placement]] = {}
        self._learn(placements)

    def claim(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        with self._lock:
            known = ((block, self._placements.get(block)) for block in blocks)
            return {block: tuple(found) for block, found in known if found}

    def begin_pack(self, pack: PackId) -> None:
        pass  # what this process leaves behind when it dies, nobody else knows of anyway

    def add_pack(self, pack: PackId, placements: Sequence[Placement]) -> None:
        with self._lock:
            self.packs[pack] = tuple(placements)
            self._learn(placements)

    def _learn(self, placements: Sequence[Placement]) -> None:
        for placement in placements:
            self._placements.setdefault(placement.encoding.block, []).append(placement)
