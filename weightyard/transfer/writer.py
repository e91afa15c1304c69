"""The writer: pieces become blocks, blocks become packs, packs become durable.

For each batch of pieces: hash → claim what the store has → plan packs → encode and prove → stage →
publish → wait for replicas → tell the catalogue. Only the last step makes a block claimable.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np

from weightyard import codec
from weightyard.format.block import Codec, block_id
from weightyard.format.pack import PACK_HEADER, PACK_LIMIT_BYTES, PackBuilder, padding
from weightyard.format.splitting import Piece, Split
from weightyard.names import BlockId, PackId
from weightyard.storage import layout
from weightyard.storage.store import FileOptions, Stage, Store
from weightyard.transfer.catalogue import Packing
from weightyard.transfer.durable import require_replicas
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import Source, piece_bytes
from weightyard.transfer.together import run_together

_BATCH_PIECES = 1024
"""Claimed in one call; at 16 MiB a block this is one call for 16 GiB."""

_USUAL_SIZE_LEFT = {
    Codec.PLANES_BF16: 0.68,
    Codec.PLANES_FP16: 0.87,
    Codec.PLANES_FP32: 0.85,
    Codec.PLANES_FP64: 0.95,
}
"""For planning how many blocks go into a pack; a wrong guess costs a shorter pack, no more."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How packs are made."""

    replication: int | None = None
    policy: str | None = None
    min_replicas: int = 1
    """A pack is not durable before it lies on this many DataNodes."""
    replicas_timeout_s: float = 30.0
    compress: bool = True
    delta: Literal["off", "also", "only"] = "off"
    """What to do with a block that is much like its base: store it whole, both ways, or as a delta.

    A delta is kept if it is worth it; `also` lets those who have nothing read the block whole.
    """
    pack_bytes: int = PACK_LIMIT_BYTES
    threads: int = max(2, os.cpu_count() or 2)
    """For hashing and encoding."""
    lanes: int = 2
    """Packs being written at once; each holds up to `pack_bytes` in memory until it is closed."""


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What writing did."""

    logical_bytes: int = 0
    """Of all pieces, as they are in their sources."""
    new_bytes: int = 0
    """Of the blocks the store did not have, before encoding."""
    stored_bytes: int = 0
    """Of the packs written, footers included."""
    blocks: int = 0
    blocks_new: int = 0
    packs_written: int = 0


@dataclass(frozen=True, slots=True)
class Content:
    """A split and the sources its pieces are cut from."""

    split: Split
    sources: Sequence[Source]
    bases: Mapping[int, BlockId] = field(default_factory=dict)
    """Number of a piece → a block of the same length that it may be much like."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece, where its bytes are, and the block it may be much like."""

    piece: Piece
    sources: Sequence[Source]
    base: BlockId | None = None

    def read(self) -> memoryview:
        return piece_bytes(self.piece, self.sources)


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """A block the store does not have, and where its bytes come from."""

    id: BlockId
    cut: Cut


def plan_packs(blocks: Sequence[PlannedBlock], options: WriteOptions) -> list[list[PlannedBlock]]:
    """Which new blocks to put together: neighbours, about a pack full of them."""
    groups: list[list[PlannedBlock]] = []
    room = 0.0
    for block in blocks:
        size_left = _USUAL_SIZE_LEFT.get(block.cut.piece.codec, 1.0) if options.compress else 1.0
        takes = block.cut.piece.raw_bytes * size_left
        if takes > room:
            groups.append([])
            room = 0.98 * options.pack_bytes
        groups[-1].append(block)
        room -= takes
    return groups


class Writer:
    """Writes under one upload. Its `report` grows with every call of `write`.

    After an error nothing of the pack concerned can be claimed; packs that were complete stay.
    """

    def __init__(
        self,
        store: Store,
        upload: Packing,
        options: WriteOptions | None = None,
        progress: Callable[[int], None] | None = None,
        bases: Reader | None = None,
    ) -> None:
        """`progress` is told of bytes done; `bases` reads the bases of deltas."""
        self._store = store
        self._upload = upload
        self._options = options or WriteOptions()
        self._progress = progress or (lambda done_bytes: None)
        self._bases = bases
        self._lock = threading.Lock()
        self._report = WriteReport()

    @property
    def report(self) -> WriteReport:
        return self._report

    def write(self, contents: Sequence[Content]) -> list[list[BlockId]]:
        """Put every piece into the store; returns the names of the blocks, content by content.

        Raises what the store and the sources raise, UnderReplicated, and Bug if a codec fails to
        give back what it was given.
        """
        cuts = [
            Cut(piece, content.sources, content.bases.get(number))
            for content in contents
            for number, piece in enumerate(content.split.pieces)
        ]
        ids: list[BlockId] = []
        for start in range(0, len(cuts), _BATCH_PIECES):
            ids += self._write_batch(cuts[start : start + _BATCH_PIECES])
        rest = iter(ids)
        return [list(islice(rest, len(content.split.pieces))) for content in contents]

    def _write_batch(self, cuts: Sequence[Cut]) -> list[BlockId]:
        with ThreadPoolExecutor(self._options.threads, "weightyard-encode") as workers:
            ids = list(workers.map(lambda cut: block_id(cut.read()), cuts))
            by_id = dict(zip(ids, cuts, strict=True))
            known = self._upload.claim(list(by_id))
            new = [PlannedBlock(id, cut) for id, cut in by_id.items() if id not in known]
            bases = self._claimed_bases(new)
            logical_bytes = sum(cut.piece.raw_bytes for cut in cuts)
            new_bytes = sum(block.cut.piece.raw_bytes for block in new)
            self._count(logical_bytes=logical_bytes, new_bytes=new_bytes)
            self._count(blocks=len(cuts), blocks_new=len(new))
            self._progress(logical_bytes - new_bytes)
            stop = threading.Event()
            lanes = [
                partial(self._write_group, group, bases, workers, stop)
                for group in plan_packs(new, self._options)
            ]
            run_together(self._options.lanes, "weightyard-write", lanes, stop)
        return ids

    def _claimed_bases(self, blocks: Sequence[PlannedBlock]) -> Set[BlockId]:
        """The bases that may be used: held by the upload, and standalone. Deltas have depth 1."""
        if self._options.delta == "off" or self._bases is None:
            return frozenset()
        wanted = {block.cut.base for block in blocks} - {None, *(block.id for block in blocks)}
        claimed = self._upload.claim([base for base in wanted if base is not None])
        return {
            base
            for base, placements in claimed.items()
            if any(placement.encoding.base is None for placement in placements)
        }

    def _write_group(
        self,
        group: Sequence[PlannedBlock],
        bases: Set[BlockId],
        workers: ThreadPoolExecutor,
        stop: threading.Event,
    ) -> None:
        """One pack; another one for what does not fit because it shrank less than planned."""
        encoded = self._encoded(group, bases, workers)
        block = next(encoded, None)
        while block is not None and not stop.is_set():
            pack = PackBuilder(PackId.new(), self._options.pack_bytes)
            self._upload.begin_pack(pack.pack)
            name = layout.staging(self._upload.id, pack.pack.hex)
            with self._store.stage(name, self._file_options()) as stage:
                stage.write(PACK_HEADER)
                while block is not None and not stop.is_set() and pack.fits(block.encoding):
                    pack.add(block.encoding)
                    _write_block(stage, block)
                    block = next(encoded, None)
                if stop.is_set():
                    return
                stage.write(pack.finish())
                self._store.publish(stage.close(), layout.pack(pack.pack))
            options = self._options
            path = layout.pack(pack.pack)
            require_replicas(self._store, path, options.min_replicas, options.replicas_timeout_s)
            self._upload.add_pack(pack.pack, pack.pack_bytes, pack.placements)
            self._count(stored_bytes=pack.pack_bytes, packs_written=1)

    def _encoded(
        self,
        group: Sequence[PlannedBlock],
        bases: Set[BlockId],
        workers: ThreadPoolExecutor,
    ) -> Iterator[codec.Encoded]:
        """The blocks of a group encoded, in order, a few of them ahead of need."""
        ahead: deque[Future[list[codec.Encoded]]] = deque()
        try:
            for block in group:
                base = block.cut.base if block.cut.base in bases else None
                ahead.append(workers.submit(self._encode, block, base))
                if len(ahead) > self._options.threads:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            for waiting in ahead:
                waiting.cancel()

    def _encode(self, block: PlannedBlock, base: BlockId | None) -> list[codec.Encoded]:
        """The block whole, as a delta, or both; proved to come back before anyone relies on it."""
        raw = block.cut.read()
        hint = block.cut.piece.codec if self._options.compress else Codec.RAW
        whole = codec.encode(raw, hint=hint, block=block.id)
        codec.prove(whole, raw)
        self._progress(whole.encoding.raw_bytes)
        if base is None or self._bases is None:
            return [whole]
        base_raw = np.empty(raw.nbytes, np.uint8).data
        self._bases.read([Wanted(base, 0, base_raw)])
        delta = codec.encode_delta(raw, base_raw, base, hint=hint, block=block.id)
        if not codec.worth_a_delta(delta, whole):
            return [whole]
        codec.prove(delta, raw, base=base_raw)
        return [delta] if self._options.delta == "only" else [whole, delta]

    def _file_options(self) -> FileOptions:
        options = self._options
        return FileOptions(options.replication, options.pack_bytes, options.policy)

    def _count(self, **more: int) -> None:
        with self._lock:
            counts = {name: getattr(self._report, name) for name in WriteReport.__slots__}
            for name, amount in more.items():
                counts[name] += amount
            self._report = WriteReport(**counts)


def _write_block(stage: Stage, block: codec.Encoded) -> None:
    stage.write(block.stored)
    if pad := padding(block.stored.nbytes):
        stage.write(pad)
