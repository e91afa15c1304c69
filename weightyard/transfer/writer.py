"""The writer: pieces become blocks, blocks become packs, packs become durable.

The steps run side by side, each in the order of the pieces: read and hash → claim what the store
has → encode and prove the rest → fill packs. Each pack: stage → publish → wait for replicas → tell
the catalogue. Only that last step makes its blocks claimable.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from typing import Literal, Protocol

import numpy as np

from weightyard import codec
from weightyard.errors import BadSetting, Bug, Conflict
from weightyard.format.block import MIB, Codec, Encoding, block_id
from weightyard.format.pack import PACK_HEADER, PACK_LIMIT_BYTES, padding
from weightyard.format.splitting import Piece, Split
from weightyard.names import BlockId
from weightyard.storage import layout
from weightyard.storage.store import Again, FileOptions, Stage, Store
from weightyard.transfer.catalogue import Packing
from weightyard.transfer.cores import cores
from weightyard.transfer.durable import require_replicas, was_counted
from weightyard.transfer.filling import Filling, PackInWork, ReadyBlock
from weightyard.transfer.memory import Buffers, SpareMemory
from weightyard.transfer.plan import Wanted
from weightyard.transfer.source import Source, known_id, learn_id, piece_id, read_piece
from weightyard.transfer.together import run_together

_BATCH_PIECES = 1024
"""The most pieces claimed in one call: at 16 MiB a block, one call for 16 GiB."""

_PAGE_BYTES = 4096
_ODD_BYTES = MIB
"""The most stored bytes of odd blocks that are kept back until the others are written."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How packs are made."""

    replication: int | None = None
    policy: str | None = None
    min_replicas: int = 1
    """A pack is not durable before it lies on this many DataNodes."""
    replicas_timeout_s: float = 30.0
    compress: bool = True
    least_saving: float = 0.0
    """A block that encoding would shorten by a smaller part than this is stored raw, to be read
    faster."""
    delta: Literal["off", "also", "only"] = "off"
    """How to store a block that is much like its base: whole, both ways, or as a delta.

    A delta is kept only if it is worth it; with `also`, readers without the base read it whole.
    """
    pack_bytes: int = PACK_LIMIT_BYTES
    kept_bytes: int = 64 * MIB
    """How much of the pieces claimed in one call is kept in memory until it is encoded.

    After a call that found nothing new nothing is kept, and pieces that are new are read again.
    """
    threads: int = max(2, cores())
    """For hashing and encoding."""
    lanes: int = 2
    """How many packs are written at once. Each keeps deltas in memory until it is closed, and other
    blocks until they are written: up to a pack of them waits there while a lane has nothing to do.

    Their buffers are mostly hardly longer than what is stored, at most four times as long.
    """

    def hint(self, piece: Piece) -> Codec:
        """The codec to try for a piece."""
        return piece.codec if self.compress else Codec.RAW

    def whole_hint(self, raw: memoryview, hint: Codec) -> Codec:
        """The codec by which to store a block standalone; found by probing it."""
        if not self.least_saving or self.saves_enough(codec.estimate(raw, hint=hint), raw):
            return hint
        return Codec.RAW

    def delta_bytes(
        self, raw: memoryview, base: memoryview, hint: Codec, whole_bytes: int
    ) -> int | None:
        """About what a block takes as a delta, found by probing it; None if it is not worth it."""
        stored_bytes = codec.estimate(raw, hint=hint, base=base)
        is_worth_it = codec.worth_a_delta(stored_bytes, whole_bytes)
        return stored_bytes if is_worth_it and self.saves_enough(stored_bytes, raw) else None

    def saves_enough(self, stored_bytes: int, raw: memoryview) -> bool:
        return stored_bytes <= (1 - self.least_saving) * raw.nbytes


def require_delta(delta: str) -> None:
    """See that it is a value there is. Raises BadSetting."""
    if delta not in ("off", "also", "only"):
        raise BadSetting(f"delta={delta!r}: it is 'off', 'also' or 'only'")


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What writing did."""

    logical_bytes: int = 0
    """Of all pieces, as they are in their sources."""
    new_bytes: int = 0
    """Of the blocks the store did not have, before encoding."""
    stored_bytes: int = 0
    """Of the packs written, footers included."""
    whole_bytes: int = 0
    """What the new blocks take standalone; for those kept only as deltas, an estimate."""
    based_bytes: int = 0
    """What the new blocks that had a base take as they were stored, as a delta or whole."""
    based_whole_bytes: int = 0
    """What these take standalone, as in `whole_bytes`."""
    blocks: int = 0
    blocks_new: int = 0
    packs_written: int = 0


class Bases(Protocol):
    """What gives the writer the bases of deltas; a Reader does. Thread-safe."""

    def read(self, wanted: Sequence[Wanted], /) -> object:
        """Fill every buffer, or raise."""
        ...


@dataclass(frozen=True, slots=True)
class Content:
    """A split and the sources its pieces are cut from."""

    split: Split
    sources: Sequence[Source]
    bases: Mapping[int, BlockId] = field(default_factory=dict)
    """Number of a piece → a block of the same length that it may be much like."""
    into: Mapping[int, memoryview] = field(default_factory=dict)
    """Number of a piece → memory of its length, for a caller that wants its bytes afterwards."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece, where its bytes are, and the block it may be much like."""

    piece: Piece
    sources: Sequence[Source]
    base: BlockId | None = None
    into: memoryview | None = None

    def read(self, buffers: Buffers) -> memoryview:
        """A copy of its bytes, where they are wanted or else in a buffer."""
        raw = buffers.take(self.piece.raw_bytes) if self.into is None else self.into
        read_piece(self.piece, self.sources, raw)
        return raw

    @property
    def known(self) -> BlockId | None:
        """Its name, where that is known and nobody wants its bytes."""
        return known_id(self.piece, self.sources) if self.into is None else None

    def require_same(self, block: BlockId, raw: memoryview) -> None:
        """Raises Conflict if these are not the bytes that were hashed."""
        if block_id(raw) != block:
            for source in self.sources:
                (source.names or {}).clear()
            raise Conflict(f"block {block} changed since it was hashed: push it again")


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block the store does not have."""

    id: BlockId
    cut: Cut
    raw: memoryview | None
    """Its bytes, in one of our buffers or in `cut.into`; None: to be read again."""
    base: BlockId | None
    """A block to make a delta of, held by the upload."""


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
        bases: Bases | None = None,
        spare: SpareMemory | None = None,
    ) -> None:
        """`progress` is told of bytes done; `bases` reads the bases of deltas; `spare`: memory that
        another writer left, and this one leaves to the next."""
        self._store = store
        self._upload = upload
        self._options = options or WriteOptions()
        self._progress = progress or (lambda done_bytes: None)
        self._bases = bases
        self._buffers = Buffers(spare)
        self._lock = threading.Lock()
        self._report = WriteReport()

    @property
    def report(self) -> WriteReport:
        return self._report

    def write(self, contents: Sequence[Content]) -> list[list[BlockId]]:
        """Put every piece into the store; returns the names of the blocks, content by content.

        Raises what the store and the sources raise, Conflict if a source changed meanwhile,
        UnderReplicated, and Bug if decoding does not give back what was encoded.
        """
        cuts = [
            Cut(piece, content.sources, content.bases.get(number), content.into.get(number))
            for content in contents
            for number, piece in enumerate(content.split.pieces)
        ]
        ids: list[BlockId] = []
        try:
            self._write_new(cuts, ids)
        finally:
            self._buffers.leave()
        rest = iter(ids)
        return [list(islice(rest, len(content.split.pieces))) for content in contents]

    def _write_new(self, cuts: Sequence[Cut], ids: list[BlockId]) -> None:
        """Write what the store does not have; `ids` gets the names of all blocks."""
        stop = threading.Event()
        with ThreadPoolExecutor(self._options.threads, "weightyard-encode") as workers:
            ready = self._encoded(self._new_blocks(cuts, ids, workers), workers)
            copies = 2 if self._options.delta == "also" else 1
            filling = Filling(
                copies * len(cuts),
                copies * sum(cut.piece.raw_bytes for cut in cuts),
                pack_bytes=self._options.pack_bytes,
                lanes=self._options.lanes,
                stop=stop,
            )
            filled = filling.packs(_odd_last(ready))
            packs = (partial(self._write_pack, pack, stop) for pack in filled)
            run_together(self._options.lanes, "weightyard-write", packs, stop)

    def _new_blocks(
        self, cuts: Sequence[Cut], ids: list[BlockId], workers: ThreadPoolExecutor
    ) -> Iterator[NewBlock]:
        """The blocks that the store does not have, each once; `ids` gets the names of all."""
        begun: set[BlockId] = set()
        start, is_kept = 0, True
        while batch := cuts[start : start + _BATCH_PIECES]:
            if is_kept:
                batch = _within(self._options.kept_bytes, batch)
            new: dict[BlockId, tuple[Cut, memoryview | None]] = {}
            for cut, (id, raw) in zip(
                batch, workers.map(partial(self._hash, is_kept=is_kept), batch), strict=True
            ):
                ids.append(id)
                if id in begun or id in new:
                    self._buffers.give(raw)
                else:
                    new[id] = cut, raw
            for id in self._upload.claim(list(new)):
                self._buffers.give(new.pop(id)[1])
            bases = self._claimed_bases({id: cut for id, (cut, _) in new.items()})
            logical_bytes = sum(cut.piece.raw_bytes for cut in batch)
            new_bytes = sum(cut.piece.raw_bytes for cut, _ in new.values())
            self._count(logical_bytes=logical_bytes, new_bytes=new_bytes)
            self._count(blocks=len(batch), blocks_new=len(new))
            self._progress(logical_bytes - new_bytes)
            for id, (cut, raw) in new.items():
                yield NewBlock(id, cut, raw, cut.base if cut.base in bases else None)
            begun |= new.keys()
            start += len(batch)
            is_kept = bool(new)

    def _hash(self, cut: Cut, is_kept: bool) -> tuple[BlockId, memoryview | None]:
        """The name of a block, and its bytes if they are to be kept.

        They are a copy even if the source is in memory: training may go on meanwhile, and a tensor
        that changed after it was hashed would be stored under the wrong name.
        """
        if (known := cut.known) is not None:
            return known, None
        if not is_kept and cut.into is None:
            return piece_id(cut.piece, cut.sources), None
        raw = cut.read(self._buffers)
        id = block_id(raw)
        learn_id(cut.piece, cut.sources, id)
        return id, raw

    def _claimed_bases(self, new: Mapping[BlockId, Cut]) -> Set[BlockId]:
        """The bases that may be used: held by the upload, and standalone. Deltas have depth 1."""
        if self._options.delta == "off" or self._bases is None:
            return frozenset()
        wanted = {cut.base for cut in new.values()} - {None, *new}
        claimed = self._upload.claim([base for base in wanted if base is not None])
        return {
            base
            for base, placements in claimed.items()
            if any(placement.encoding.base is None for placement in placements)
        }

    def _encoded(
        self, blocks: Iterable[NewBlock], workers: ThreadPoolExecutor
    ) -> Iterator[ReadyBlock]:
        """The blocks encoded, in order, a few of them ahead."""
        ahead: deque[Future[list[ReadyBlock]]] = deque()
        try:
            for block in blocks:
                ahead.append(workers.submit(self._encode, block))
                if len(ahead) > self._options.threads:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            for waiting in ahead:
                waiting.cancel()

    def _encode(self, block: NewBlock) -> list[ReadyBlock]:
        """The block whole, as a delta, or both; proved to come back before anyone relies on it."""
        raw = self._read_again(block) if block.raw is None else block.raw
        hint = self._options.hint(block.cut.piece)
        whole_hint = self._options.whole_hint(raw, hint)
        delta = None
        if block.base is not None:
            delta = self._delta(block.id, block.base, raw, hint, whole_hint)
        self._progress(raw.nbytes)
        if delta is not None and self._options.delta == "only":
            self._buffers.give(raw)
            return [delta]
        room = self._room(raw, whole_hint)
        whole = codec.encode(raw, hint=whole_hint, block=block.id, into=room)
        codec.prove(whole, raw)
        self._count(whole_bytes=whole.stored_bytes)
        if block.base is not None and delta is None:
            self._count(based_bytes=whole.stored_bytes, based_whole_bytes=whole.stored_bytes)
        used, unused = (raw, room) if whole.encoding.codec is Codec.RAW else (room, raw)
        self._buffers.give(unused)
        again = partial(self._stored_again, block.cut, whole_hint, whole.encoding)
        is_kept = used is block.cut.into  # by the caller, whether it is written or not
        ready = ReadyBlock(whole) if is_kept else self._ready(whole, used, again)
        return [ready, *([delta] if delta is not None else [])]

    def _stored_again(self, cut: Cut, hint: Codec, encoding: Encoding) -> memoryview:
        """Encode a block once more, as it was stored. Raises Conflict if its source has changed."""
        raw = cut.into
        if raw is None:
            raw = np.empty(cut.piece.raw_bytes, np.uint8).data
            read_piece(cut.piece, cut.sources, raw)
        cut.require_same(encoding.block, raw)
        again = codec.encode(raw, hint=hint, block=encoding.block)
        if again.encoding != encoding:
            raise Bug(f"block {encoding.block}: encoded twice it is not the same")
        return again.stored

    def _room(self, raw: memoryview, hint: Codec) -> memoryview:
        return self._buffers.take(0 if hint is Codec.RAW else codec.room_for(raw.nbytes, hint))

    def _ready(
        self, encoded: codec.Encoded, buffer: memoryview, again: Again | None = None
    ) -> ReadyBlock:
        """A block to be written, moved to a shorter buffer if its own is much too long.

        Buffers may be kept until a pack is closed. A pack bounds only what is stored in it: without
        this, blocks that shrink to almost nothing would keep buffers as long as they were raw.
        """
        stored = encoded.stored
        if 2 * stored.nbytes >= buffer.nbytes:
            return ReadyBlock(encoded, buffer, again)
        short = self._buffers.take(stored.nbytes)
        np.copyto(np.frombuffer(short, np.uint8), np.frombuffer(stored, np.uint8))
        self._buffers.give(buffer)
        return ReadyBlock(replace(encoded, stored=short), short, again)

    def _delta(
        self, block: BlockId, base: BlockId, raw: memoryview, hint: Codec, whole_hint: Codec
    ) -> ReadyBlock | None:
        """The block as a delta, proved, if that is worth it."""
        if self._bases is None:
            return None
        base_raw = self._buffers.take(raw.nbytes)
        try:
            self._bases.read([Wanted(base, 0, base_raw)])
            # Estimated first: encoding both ways to keep one would cost a training twice as much.
            whole_bytes = codec.estimate(raw, hint=whole_hint)
            if self._options.delta_bytes(raw, base_raw, hint, whole_bytes) is None:
                return None
            room = self._room(raw, hint)
            delta = codec.encode_delta(raw, base_raw, base, hint=hint, block=block, into=room)
            if not codec.worth_a_delta(delta.stored_bytes, whole_bytes):
                self._buffers.give(room)
                return None
            codec.prove(delta, raw, base=base_raw)
        finally:
            self._buffers.give(base_raw)
        self._count(based_bytes=delta.stored_bytes, based_whole_bytes=whole_bytes)
        if self._options.delta == "only":
            self._count(whole_bytes=whole_bytes)
        return self._ready(delta, room)

    def _read_again(self, block: NewBlock) -> memoryview:
        """Read a block's bytes again. Raises Conflict if they are not those that were hashed."""
        raw = block.cut.read(self._buffers)
        block.cut.require_same(block.id, raw)
        return raw

    def _write_pack(self, pack: PackInWork, stop: threading.Event) -> None:
        id = pack.layout.pack
        path = layout.pack(id)
        buffers = []
        self._upload.begin_pack(id)
        options = self._options
        file_options = FileOptions(
            options.replication, pack.planned_bytes, options.policy, counts_replicas=True
        )
        with self._store.stage(layout.staging(self._upload.id, id.hex), file_options) as stage:
            stage.write(PACK_HEADER)
            for block in pack:
                _write_block(stage, block)
                if block.again is None:
                    buffers.append(block.buffer)
                else:
                    self._buffers.give(block.buffer)
                pack.written(block)
            if stop.is_set():
                return
            stage.write(pack.layout.finish())
            staged = stage.close()
            self._store.publish(staged, path)
        pack.is_closed = True
        for buffer in buffers:
            self._buffers.give(buffer)
        if not was_counted(staged, options.min_replicas):
            require_replicas(self._store, path, options.min_replicas, options.replicas_timeout_s)
        self._upload.add_pack(id, pack.layout.pack_bytes, pack.layout.placements)
        self._count(stored_bytes=pack.layout.pack_bytes, packs_written=1)

    def _count(self, **more: int) -> None:
        with self._lock:
            counts = {name: getattr(self._report, name) for name in WriteReport.__slots__}
            for name, amount in more.items():
                counts[name] += amount
            self._report = WriteReport(**counts)


def _odd_last(blocks: Iterable[ReadyBlock]) -> Iterator[ReadyBlock]:
    """The same blocks; short ones that are not whole pages come behind the others.

    In front, like the header of a file, they would move all others by a part of a page. Long raw
    blocks that all begin alike within a page can be mapped as one run (docs/design/0009).
    """
    waiting: list[ReadyBlock] = []
    waiting_bytes = 0
    for block in blocks:
        stored_bytes = block.encoded.stored.nbytes
        if stored_bytes % _PAGE_BYTES == 0 or waiting_bytes + stored_bytes > _ODD_BYTES:
            yield block
        else:
            waiting.append(block)
            waiting_bytes += stored_bytes
    yield from waiting


def _within(limit_bytes: int, cuts: Sequence[Cut]) -> Sequence[Cut]:
    """The first cuts, at least one, of which together no more is read than the limit."""
    ends = accumulate(cut.piece.raw_bytes if cut.known is None else 0 for cut in cuts)
    return cuts[: max(1, sum(end <= limit_bytes for end in ends))]


def _write_block(stage: Stage, block: ReadyBlock) -> None:
    stored = block.encoded.stored
    stage.write(stored, block.again)
    if pad := padding(stored.nbytes):
        stage.write(pad)
