"""Filling packs one after the other, while another thread writes each from its first block on.

Blocks wait in memory until they are written, and touching memory for the first time costs the
processor as much as anything else done with a block. So few blocks are encoded ahead: as a block's
memory is usually free again once it is written, the same few buffers serve all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from weightyard import codec
from weightyard.format.block import MIB
from weightyard.format.pack import PackBuilder, most_pack_bytes
from weightyard.names import PackId
from weightyard.storage.store import Again

AHEAD_BYTES = 32 * MIB
"""Memory of blocks that wait for their pack's thread; more only so that another can begin."""

_LOOK_UP_S = 0.1
"""How long one thread waits for another before it checks whether to stop."""


@dataclass(frozen=True, slots=True)
class ReadyBlock:
    """A block to be written, and the buffer it lies in, if any."""

    encoded: codec.Encoded
    buffer: memoryview | None = None
    again: Again | None = None
    """Encodes it once more; if None, the buffer is needed until the pack is closed."""

    @property
    def waiting_bytes(self) -> int:
        """How much memory is free once it is written."""
        return 0 if self.again is None or self.buffer is None else self.buffer.nbytes


class PackInWork:
    """A pack that one thread fills and another one writes.

    Call order: `add` while a block fits → `end`. The thread that writes iterates over the blocks as
    they come, which ends once `stop` is set, and calls `written` after each.
    """

    def __init__(self, pack_bytes: int, most_bytes: int, stop: threading.Event) -> None:
        """`pack_bytes`: how long it may be; `most_bytes`: how long with all that may still come."""
        self.layout = PackBuilder(PackId.new(), pack_bytes)
        self.planned_bytes = min(pack_bytes, most_bytes)
        self.is_closed = False
        """Whether the thread that writes it is free for another pack."""
        self._stop = stop
        self._blocks: SimpleQueue[ReadyBlock | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._waiting_bytes = 0

    def fits(self, block: ReadyBlock) -> bool:
        return self.layout.fits(block.encoded.encoding)

    def add(self, block: ReadyBlock) -> None:
        """Raises TooLarge if it does not fit."""
        self.layout.add(block.encoded.encoding)
        with self._changed:
            self._waiting_bytes += block.waiting_bytes
        self._blocks.put(block)

    def end(self) -> None:
        self._blocks.put(None)

    def wait(self, most_bytes: int) -> None:
        """Wait until waiting blocks take no more memory than that, or `stop` is set."""
        with self._changed:
            while self._waiting_bytes > most_bytes and not self._stop.is_set():
                self._changed.wait(_LOOK_UP_S)

    def __iter__(self) -> Iterator[ReadyBlock]:
        while not self._stop.is_set():
            try:
                block = self._blocks.get(timeout=_LOOK_UP_S)
            except Empty:
                continue
            if block is None:
                return
            yield block

    def written(self, block: ReadyBlock) -> None:
        with self._changed:
            self._waiting_bytes -= block.waiting_bytes
            self._changed.notify_all()


class Filling:
    """Puts blocks into packs, in their order."""

    def __init__(
        self, blocks: int, raw_bytes: int, *, pack_bytes: int, lanes: int, stop: threading.Event
    ) -> None:
        """`blocks`, `raw_bytes`: how many may come; `lanes`: how many threads write packs."""
        self._left_blocks = blocks
        self._left_bytes = raw_bytes
        self._pack_bytes = pack_bytes
        self._lanes = lanes
        self._stop = stop
        self._open: list[PackInWork] = []

    def packs(self, blocks: Iterable[ReadyBlock]) -> Iterator[PackInWork]:
        """Gives each pack as soon as it has a block: the caller has it written while it fills."""
        pack: PackInWork | None = None
        for block in blocks:
            if self._stop.is_set():
                return
            is_new = pack is None or not pack.fits(block)
            if is_new:
                if pack is not None:
                    pack.end()
                pack = self._begun()
            assert pack is not None
            pack.add(block)
            self._left_blocks -= 1
            self._left_bytes -= block.encoded.encoding.raw_bytes
            if is_new:
                yield pack
            if not self._is_another_wanted(pack):
                pack.wait(AHEAD_BYTES)
        if pack is not None:
            pack.end()

    def _begun(self) -> PackInWork:
        most_bytes = most_pack_bytes(self._left_blocks, self._left_bytes)
        pack = PackInWork(self._pack_bytes, most_bytes, self._stop)
        self._open = [*(one for one in self._open if not one.is_closed), pack]
        return pack

    def _is_another_wanted(self, pack: PackInWork) -> bool:
        """Whether a thread is idle that could write the next pack, once this one is full."""
        busy = sum(not one.is_closed for one in self._open)
        if busy >= self._lanes:
            return False
        placements = pack.layout.placements
        raw_bytes = sum(one.encoding.raw_bytes for one in placements)
        left_bytes = self._left_bytes * pack.layout.pack_bytes / max(1, raw_bytes)
        return pack.layout.pack_bytes + left_bytes > self._pack_bytes
