"""Anchors: checkpoints of which those that follow are stored as deltas.

An anchor is a save whose new blocks are all stored standalone. Its raw bytes stay at hand, in host
memory or on a local disk, as far as a budget allows; blocks beyond it have no base, and are stored
standalone ever after. Every rank has its own, of the boxes it writes. The writer reads an anchor's
pieces right into that memory, before it hashes and encodes them: nothing is copied for it.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from weightyard import codec
from weightyard.closing import Closing
from weightyard.errors import YardError
from weightyard.format.assembly import Share, share_of
from weightyard.format.block import MIB, block_id
from weightyard.format.manifest import MANIFEST_FORMAT, Manifest
from weightyard.format.splitting import Split
from weightyard.logs import Log
from weightyard.names import BlockId
from weightyard.transfer.bases import bases_of, pieces_alone
from weightyard.transfer.options import require_whole
from weightyard.transfer.plan import Wanted
from weightyard.transfer.source import piece_bytes, translated
from weightyard.transfer.writer import Bases, Content, WriteOptions, WriteReport

_log = Log(__name__)

ANCHOR_EVERY = 20
"""Saves from one anchor to the next, at most."""

ANCHOR_BYTES = 2048 * MIB
"""Raw bytes kept at hand by each rank, unless told otherwise."""

WORTH_AN_ANCHOR = 0.6
"""If blocks with a base take more than this part of their standalone size, an anchor is due."""

_PROBED_PIECES = 12
"""How many pieces of a save are probed, to see beforehand how large deltas would be."""


class Anchors(Closing):
    """One rank's last anchor. Gives a writer the bases of deltas, where these are worth it.

    Call order for each save: prepared → (the writer reads) → note. A failed save is not noted: the
    next one is stored as if it had not been tried.
    """

    def __init__(
        self,
        store: Bases,
        options: WriteOptions,
        *,
        budget_bytes: int = ANCHOR_BYTES,
        folder: Path | None = None,
        every: int = ANCHOR_EVERY,
    ) -> None:
        """`store` reads blocks whose bytes at hand turn out wrong. `options`: the writer's.

        `folder`: keep bytes in a file there instead of in memory. It has no name: it is gone with
        the process. Raises BadSetting, NotAllowed, NoSuchThing.
        """
        require_whole("anchor_every", every, 1)
        require_whole("anchors_bytes", budget_bytes, 0)
        self._store = store
        self._options = options
        self._budget_bytes = budget_bytes
        self._every = every
        self._at_hand: _AtHand = _InMemory() if folder is None else _OnDisk(folder)
        self._parent: Manifest | None = None
        self._before: Mapping[int, BlockId] = {}
        """For the save under way: number of a piece → the block at its place in the anchor."""
        self._changed: set[BlockId] = set()  # blocks of the anchor that a later save replaced
        self._chosen: list[int] = []  # pieces of the anchor under way that are to be kept
        self._since = 0
        self._is_due = True

    @property
    def is_due(self) -> bool:
        """Whether the next save is to be an anchor."""
        return self._is_due

    @property
    def kept_bytes(self) -> int:
        """Raw bytes at hand."""
        return self._at_hand.kept_bytes

    def prepared(self, content: Content) -> Content:
        """What is to be saved, with bases for its pieces; or, if an anchor is due, with memory to
        read the pieces into."""
        self._before = {}
        if self._parent is not None:
            self._before = bases_of(content.split, self._parent)
        before = self._before.items()
        at_hand = {number: block for number, block in before if block in self._at_hand}
        self._is_due = self._is_due or not self._is_worth_it(content, at_hand)
        if self._is_due:
            return replace(content, into=self._room(content.split))
        return replace(content, bases=at_hand)

    def _is_worth_it(self, content: Content, at_hand: Mapping[int, BlockId]) -> bool:
        """Whether deltas will be small enough; probes some of the pieces that changed.

        Without, all of them would be encoded only to find that this should have been an anchor.
        """
        stored_bytes = all_bytes = 0
        step = -(-len(at_hand) // _PROBED_PIECES)
        for number in sorted(at_hand)[:: max(1, step)]:
            piece = content.split.pieces[number]
            raw, base = piece_bytes(piece, content.sources), self._at_hand.read(at_hand[number])
            if base is None or np.array_equal(np.frombuffer(raw, np.uint8), base):
                continue
            hint = self._options.hint(piece)
            whole_bytes = codec.estimate(raw, hint=self._options.whole_hint(raw, hint))
            stored_bytes += self._options.delta_bytes(raw, base, hint, whole_bytes) or whole_bytes
            all_bytes += whole_bytes
        return stored_bytes <= WORTH_AN_ANCHOR * all_bytes

    def read(self, wanted: Sequence[Wanted], /) -> None:
        """Fill every buffer with bytes of the anchor's blocks. Raises as the store does."""
        for want in wanted:
            raw = self._at_hand.read(want.block)
            # A delta against wrong bytes would be noticed only when it is read.
            if raw is not None and block_id(raw) == want.block:
                want.into[:] = raw[want.offset : want.end]
                continue
            _log.warning("anchor.bytes_lost", block=want.block)
            self._store.read([want])

    def note(self, content: Content, blocks: Sequence[BlockId], report: WriteReport) -> None:
        """Take note of a save of prepared content that has succeeded."""
        if self._is_due:
            self._keep(content, blocks)
            self._since, self._is_due = 0, False
        else:
            self._since += 1
            self._changed |= set(self._before.values()) - set(blocks)
        # What can have no base, such as bundles of small tensors, is left out of the judgement.
        whole_bytes = report.based_whole_bytes
        left = report.based_bytes / whole_bytes if whole_bytes else 0.0
        if self._since >= self._every - 1 or (self._since and left > WORTH_AN_ANCHOR):
            self._is_due = True

    def close(self) -> None:
        self._at_hand.close()
        self._parent, self._is_due = None, True

    def _room(self, split: Split) -> Mapping[int, memoryview]:
        """Memory for the pieces to be kept: as many as fit the budget.

        First those whose block changed since the last anchor: they may well change again.
        """
        before = self._before
        room_bytes = 0
        self._chosen = []
        for number in sorted(pieces_alone(split), key=lambda one: self._is_still(before.get(one))):
            raw_bytes = split.pieces[number].raw_bytes
            if room_bytes + raw_bytes <= self._budget_bytes:
                self._chosen.append(number)
                room_bytes += raw_bytes
        try:
            return self._at_hand.room({one: split.pieces[one].raw_bytes for one in self._chosen})
        except (YardError, OSError) as why:  # the save itself is whole without it
            _log.warning("anchor.not_kept", reason=why)
            self._chosen = []
            return {}

    def _is_still(self, before: BlockId | None) -> bool:
        return before is not None and before not in self._changed

    def _keep(self, content: Content, blocks: Sequence[BlockId]) -> None:
        self._parent = _as_manifest(share_of(content.split, blocks), content.split.block_bytes)
        self._changed = set()
        try:
            for number in self._chosen:
                raw = content.into.get(number)
                if raw is None:
                    raw = piece_bytes(content.split.pieces[number], content.sources)
                self._at_hand.keep(blocks[number], raw)
        except (YardError, OSError) as why:
            _log.warning("anchor.not_kept", reason=why)


def _as_manifest(share: Share, block_bytes: int) -> Manifest:
    """A share as a manifest, in which bases are looked up; it has only a part of the version."""
    return Manifest(MANIFEST_FORMAT, block_bytes, share.blocks, (), share.tensors)


class _AtHand(Closing):
    """Raw bytes of blocks, kept by this process. Reading is thread-safe.

    Call order: room → keep → read → close, and from room on again.
    """

    kept_bytes = 0

    @abstractmethod
    def __contains__(self, block: BlockId) -> bool: ...

    @abstractmethod
    def room(self, lengths: Mapping[int, int]) -> Mapping[int, memoryview]:
        """Forget all blocks. Returns memory for those that will be kept, by their numbers; none if
        they are kept elsewhere. Raises OSError, YardError."""

    @abstractmethod
    def keep(self, block: BlockId, raw: memoryview) -> None:
        """Keep a block's bytes; if `room` gave memory, they lie there. Raises StoreFull."""

    @abstractmethod
    def read(self, block: BlockId) -> memoryview | None:
        """A block's bytes; None if they cannot be had. They may be wrong."""


class _InMemory(_AtHand):
    """Keeps one anchor after the other in the same memory: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self._kept: dict[BlockId, memoryview] = {}
        self._memory = np.empty(0, np.uint8)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._kept

    def room(self, lengths: Mapping[int, int]) -> Mapping[int, memoryview]:
        self._forget()
        room_bytes = sum(lengths.values())
        if self._memory.size < room_bytes:
            # NumPy would ask for huge pages. A machine whose memory is full of cached files has to
            # move those about first, which takes three times as long as the copy.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = np.frombuffer(mmap.mmap(-1, room_bytes, flags=flags), np.uint8)
        ends = accumulate(lengths.values())
        return {
            number: self._memory[end - length : end].data
            for (number, length), end in zip(lengths.items(), ends, strict=True)
        }

    def keep(self, block: BlockId, raw: memoryview) -> None:
        self._kept[block] = raw
        self.kept_bytes += raw.nbytes

    def read(self, block: BlockId) -> memoryview | None:
        return self._kept.get(block)

    def close(self) -> None:
        self._forget()
        self._memory = np.empty(0, np.uint8)

    def _forget(self) -> None:
        self._kept = {}
        self.kept_bytes = 0


class _OnDisk(_AtHand):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[BlockId, tuple[int, int]] = {}
        self._file = self._made()

    def __contains__(self, block: BlockId) -> bool:
        return block in self._places

    def room(self, lengths: Mapping[int, int]) -> Mapping[int, memoryview]:
        self.close()
        self._file = self._made()
        return {}

    def keep(self, block: BlockId, raw: memoryview) -> None:
        at, rest = self.kept_bytes, raw
        with translated(self._folder):
            while rest:
                done = os.pwrite(self._file.fileno(), rest, at)
                at, rest = at + done, rest[done:]
        self._places[block] = (self.kept_bytes, raw.nbytes)
        self.kept_bytes += raw.nbytes

    def read(self, block: BlockId) -> memoryview | None:
        if block not in self._places:
            return None
        start, length = self._places[block]
        raw = np.empty(length, np.uint8).data
        rest = raw
        try:
            while rest and (done := os.preadv(self._file.fileno(), [rest], start)):
                start, rest = start + done, rest[done:]
        except OSError as why:
            _log.warning("anchor.not_read", folder=self._folder, reason=why)
            return None
        return None if rest else raw  # None: the file was cut short

    def close(self) -> None:
        self._places = {}
        self.kept_bytes = 0
        self._file.close()

    def _made(self) -> io.FileIO:
        with translated(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryFile(dir=self._folder, buffering=0)
