"""The reader: fetches what a plan says, checks it, decodes it into the caller's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Buffer

from weightyard.errors import BadSetting, PackInvalid, Retryable, UnknownFormat
from weightyard.format.block import MIB
from weightyard.format.pack import TAIL_BYTES, Placement, read_footer, read_trailer
from weightyard.logs import Log
from weightyard.names import BlockId, PackId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel, ended_by
from weightyard.storage.deadline import Deadline
from weightyard.storage.limit import AdaptiveLimit
from weightyard.storage.store import Location, Read, Replica, Store
from weightyard.transfer.catalogue import Placements
from weightyard.transfer.cores import cores
from weightyard.transfer.fetching import Choose, Fetcher
from weightyard.transfer.learned import LEAST_FETCHES, Learned, learned_of
from weightyard.transfer.memory import HostMemory, SpareMemory
from weightyard.transfer.pipeline import Lost, Pipeline
from weightyard.transfer.plan import (
    GAP_BYTES,
    HOST_BYTES,
    LEAST_HOST_BYTES,
    Wanted,
    plan_reads,
    standalone,
)
from weightyard.transfer.report import OnEvent, ReadEvent, ReadEventKind, ReadReport

__all__ = ["Choose", "ReadReport", "Reader", "ReadsBlocks", "pack_index", "read_pack_index"]

_log = Log(__name__)

MAX_HOST_BYTES = 256 * MIB
_LEAST_MAX_HOST_BYTES = 8 * MIB
_RUN_SHARE = 4
"""A run may use this part of the budget, so that several are under way."""


class ReadsBlocks(Protocol):
    """What a Reader does, and anything else that can read blocks. Thread-safe."""

    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], None] | None = None, /
    ) -> ReadReport:
        """Fill every buffer, or raise."""
        ...


class Reader:
    """Reads blocks of one store, in parallel. Thread-safe.

    The nearest replica is asked, among equally near ones the least busy. If one fails, or its bytes
    fail their checksums, the next one is asked; if one is slow, it is raced against the next. Only
    when none is left does the read fail, with the last one's error. A pack that is gone is looked
    up once more: it may have been rewritten meanwhile.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Placements,
        *,
        threads: int | None = None,
        choose: Choose | None = None,
        timeout_s: float = 30.0,
        max_host_bytes: int = MAX_HOST_BYTES,
        decoders: int | None = None,
        gap_bytes: int = GAP_BYTES,
        on_event: OnEvent | None = None,
        settings: Settings | None = None,
        learned: Learned | None = None,
        spare: SpareMemory | None = None,
    ) -> None:
        """`threads`: the most fetches at once; by default 2 to 64, as the network rewards.

        `choose` orders replicas instead of distance and estimates. `timeout_s` is for each request.
        `max_host_bytes` bounds the memory that each read uses besides the destination; it is kept
        for the next read. `decoders`: the most threads that decode for one read, each with scratch
        memory of its own besides; by default one for each core. `gap_bytes`: gaps up to this length
        are read and thrown away rather than asking twice. `on_event` is called in the thread that
        reads. `learned`: what to know of the cluster, instead of what this process has learned so
        far. `spare`: memory that other readers use, too. Raises BadSetting.
        """
        if max_host_bytes < _LEAST_MAX_HOST_BYTES:
            raise BadSetting(
                f"max_host_bytes is {max_host_bytes}: reading needs {_LEAST_MAX_HOST_BYTES}"
            )
        self._store = store
        self._catalogue = catalogue
        self._learned = learned or learned_of(store)
        self._limit = self._learned.limit
        if threads is not None:
            self._limit = AdaptiveLimit(
                first=threads, lowest=min(threads, LEAST_FETCHES), highest=threads
            )
        self._choose = choose
        self._timeout_s = timeout_s
        self._max_host_bytes = max_host_bytes
        self._most_decoders = decoders
        self._gap_bytes = gap_bytes
        self._spare = spare or SpareMemory()
        self._on_event = on_event
        self._rack = (settings or Settings()).location

    def read(
        self,
        wanted: Iterable[Wanted],
        progress: Callable[[int], None] | None = None,
        *,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> ReadReport:
        """Fill every buffer. Raises FileMissing, BlockCorrupt, StoreUnavailable.

        `progress` is told of raw bytes done, in this thread. `timeout_s` bounds the whole read
        (DeadlineExceeded), `cancel` ends it from another thread (Cancelled). After an error the
        buffers' content is undefined; no thread writes to them any more. The only threads left, for
        a moment, are those still waiting to hear where a pack lies.
        """
        began = time.monotonic()
        stop = Cancel()
        call = _Call(ReadReport(), stop, Deadline.after(timeout_s, stop), progress)
        with ended_by(cancel, stop.cancel, "reading"):
            lost = self._carry_out(call, list(wanted))
            if lost:
                packs = self._note_lost(call, lost)
                again = [want for run, _ in lost for read in run.reads for want in read.wanted]
                lost = self._carry_out(call, again, avoid=packs)
            if lost:
                raise lost[0][1]
        call.report.wall_s = time.monotonic() - began
        return call.report

    def _carry_out(
        self, call: _Call, wanted: Sequence[Wanted], avoid: frozenset[PackId] = frozenset()
    ) -> list[Lost]:
        """Look up, plan and read. Returns the runs that were not where the catalogue said."""
        began = time.monotonic()
        placements = self._look_up((want.block for want in wanted), call.deadline)
        share = max(LEAST_HOST_BYTES, self._max_host_bytes // _RUN_SHARE)
        runs = plan_reads(
            wanted,
            placements,
            host_bytes=min(HOST_BYTES, share),
            avoid=avoid,
            gap_bytes=self._gap_bytes,
        )
        needed = (
            read.encoding.base
            for run in runs
            for read in run.reads
            if read.encoding.base is not None
        )
        bases = self._look_up(needed, call.deadline)
        base_packs = dict.fromkeys(
            placement.pack for found in bases.values() for placement in standalone(found)
        )
        call.report.plan_s += time.monotonic() - began
        if not runs:
            return []
        pipeline = Pipeline(
            self._store,
            self._learned,
            self._limit,
            stop=call.stop,
            deadline=call.deadline,
            memory=HostMemory(self._max_host_bytes, self._spare),
            decoders=min(cores(), self._most_decoders or cores()),
            report=call.report,
            progress=call.progress,
            on_event=self._on_event,
        )
        fetcher = Fetcher(
            self._store,
            bases,
            self._learned,
            self._limit,
            decoders=pipeline.decoders,
            stop=call.stop,
            deadline=call.deadline,
            say=pipeline.say,
            rack=self._rack,
            choose=self._choose,
            timeout_s=self._timeout_s,
        )
        lost = pipeline.run(fetcher, runs, base_packs)
        for done, sign in ((runs, 1), ([run for run, _ in lost], -1)):
            call.report.raw_bytes += sign * sum(run.raw_bytes for run in done)
            call.report.decoded_bytes += sign * sum(run.decoded_bytes for run in done)
        return lost

    def _look_up(
        self, blocks: Iterable[BlockId], deadline: Deadline
    ) -> dict[BlockId, Sequence[Placement]]:
        if not (asked := list(dict.fromkeys(blocks))):
            return {}
        left_s = deadline.left("asking where blocks lie")
        return dict(self._catalogue.placements(asked, within_s=left_s))

    def _note_lost(self, call: _Call, lost: Sequence[Lost]) -> frozenset[PackId]:
        """Tell of packs that are gone or damaged; returns them."""
        packs = {run.pack: why for run, why in lost}
        call.report.looked_up_again += len(packs)
        for pack, why in packs.items():
            _log.warning("read.looked_up_again", pack=pack, reason=why)
            if self._on_event is not None:
                self._on_event(ReadEvent(ReadEventKind.LOOKED_UP_AGAIN, pack.hex, reason=str(why)))
        return frozenset(packs)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of read."""

    report: ReadReport
    stop: Cancel
    deadline: Deadline
    progress: Callable[[int], None] | None


def read_pack_index(store: Store, pack: PackId) -> tuple[Placement, ...]:
    """What a pack says it holds, from any replica whose index is right.

    Raises FileMissing, PackInvalid, UnknownFormat.
    """
    location = store.locate(layout.pack(pack))
    try:
        return _index_of(store, pack, location)
    except (PackInvalid, UnknownFormat) as why:
        for replica in location.spans[0].replicas if len(location.spans) == 1 else ():
            with suppress(PackInvalid, UnknownFormat, Retryable):
                found = _index_of(store, pack, location, replica)
                good = replica.datanode
                _log.warning("read.index_elsewhere", pack=pack, datanode=good, reason=why)
                return found
        raise


def _index_of(
    store: Store, pack: PackId, location: Location, replica: Replica | None = None
) -> tuple[Placement, ...]:
    def read(offset: int, length: int) -> memoryview:
        into = memoryview(bytearray(length))
        store.read(location, [Read(offset, into)], replica=replica)
        return into

    return pack_index(pack, location.length, read)


def pack_index(
    pack: PackId, pack_bytes: int, read: Callable[[int, int], Buffer]
) -> tuple[Placement, ...]:
    """The same for a pack wherever it is; `read` takes an offset and a length."""
    tail_bytes = min(TAIL_BYTES, pack_bytes)
    tail = read(pack_bytes - tail_bytes, tail_bytes)
    span = read_trailer(tail, pack_bytes)
    footer = span.within(tail, pack_bytes)
    return read_footer(read(span.offset, span.length) if footer is None else footer, span, pack)
