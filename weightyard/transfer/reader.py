"""The reader: fetches what a plan says, checks it, decodes it into the caller's memory."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from weightyard import codec
from weightyard.errors import BlockCorrupt, Retryable, StaleLocation, YardError
from weightyard.format.pack import TAIL_BYTES, Placement, read_footer, read_trailer
from weightyard.logs import Log
from weightyard.names import BlockId, PackId
from weightyard.storage import layout
from weightyard.storage.store import Location, Read, ReadPath, Replica, Served, Span, Store
from weightyard.transfer.catalogue import Placements
from weightyard.transfer.plan import BlockRead, Run, Wanted, plan_reads
from weightyard.transfer.together import run_together

_log = Log(__name__)

Choose: TypeAlias = Callable[[Span], Sequence[Replica]]
"""The replicas of a span in the order in which to ask them."""


@dataclass(slots=True)
class ReadReport:
    """What reading did."""

    raw_bytes: int = 0
    stored_bytes: int = 0
    requests: int = 0
    by_path: Counter[ReadPath] = field(default_factory=Counter)
    """Stored bytes by the way they came."""
    by_datanode: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    """What went wrong on the way and was got from elsewhere."""

    def __iadd__(self, other: ReadReport) -> ReadReport:
        self.raw_bytes += other.raw_bytes
        self.stored_bytes += other.stored_bytes
        self.requests += other.requests
        self.by_path += other.by_path
        self.by_datanode += other.by_datanode
        self.failed += other.failed
        return self


class Reader:
    """Reads blocks of one store, in parallel. Thread-safe.

    A replica that fails, or whose bytes fail their checksums, is passed over for the next one;
    only when none is left does the read fail, with what the last one said.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Placements,
        *,
        threads: int | None = None,
        choose: Choose = lambda span: span.replicas,
        timeout_s: float = 30.0,
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._threads = threads or max(4, 2 * (os.cpu_count() or 2))
        self._choose = choose
        self._timeout_s = timeout_s

    def read(
        self, wanted: Iterable[Wanted], progress: Callable[[int], None] | None = None
    ) -> ReadReport:
        """Fill every buffer. Raises FileMissing, BlockCorrupt, StoreUnavailable.

        `progress` is told of raw bytes done. After an error the buffers' content is undefined.
        """
        wanted = list(wanted)
        placements = dict(self._catalogue.placements(list({want.block for want in wanted})))
        runs = plan_reads(wanted, placements)
        bases = {read.encoding.base for run in runs for read in run.reads}
        placements |= self._catalogue.placements([base for base in bases if base is not None])
        fetching = _Fetching(self._store, placements, self._choose, self._timeout_s)
        fetch = partial(_fetch, fetching, progress) if progress else fetching.fetch
        # Packs are located ahead of their reads, so that no read waits for the NameNode.
        packs = dict.fromkeys(run.pack for run in runs)
        run_together(
            self._threads,
            "weightyard-read",
            [
                *(partial(fetching.locate, pack) for pack in packs),
                *(partial(fetch, run) for run in runs),
            ],
        )
        fetching.report.raw_bytes = sum(want.into.nbytes for want in wanted)
        return fetching.report


def _fetch(fetching: _Fetching, progress: Callable[[int], None], run: Run) -> None:
    fetching.fetch(run)
    progress(sum(want.into.nbytes for read in run.reads for want in read.wanted))


class _Fetching:
    """One call of read: fetches its runs, from any number of threads."""

    def __init__(
        self,
        store: Store,
        placements: Mapping[BlockId, Sequence[Placement]],
        choose: Choose,
        timeout_s: float,
    ) -> None:
        self.report = ReadReport()
        self._store = store
        self._placements = placements
        self._choose = choose
        self._timeout_s = timeout_s
        self._scratch = _Scratch()
        self._lock = threading.Lock()
        self._locations: dict[PackId, Location] = {}

    def locate(self, pack: PackId) -> Location:
        """Where a pack lies, asked for once."""
        if (known := self._locations.get(pack)) is None:
            known = self._locations[pack] = self._store.locate(layout.pack(pack))
        return known

    def fetch(self, run: Run) -> None:
        """Fill the buffers of one run, from whichever replica has its bytes right."""
        bases = [self._base(read) for read in run.reads]
        location = self.locate(run.pack)
        failures: list[YardError] = []
        for replica in (*self._replicas(location, run), None):
            try:
                reads, stored = self._lay_out(run)
                served = self._store.read(
                    location, reads, replica=replica, timeout_s=self._timeout_s
                )
                for read, data, base in zip(run.reads, stored, bases, strict=True):
                    self._decode(read, data, base)
            except StaleLocation as why:
                failures.append(why)
                location = self._store.locate(location.path)
            except (Retryable, BlockCorrupt) as why:
                failures.append(why)
                datanode = replica.datanode if replica is not None else "any"
                _log.warning("pack.replica_failed", pack=run.pack, datanode=datanode, reason=why)
            else:
                self._count(run, served, failures)
                return
        raise failures[-1]

    def _replicas(self, location: Location, run: Run) -> Sequence[Replica]:
        """Those that hold all of a run, in the order chosen; a pack normally has one span."""
        for span in location.spans:
            if span.offset <= run.start and run.start + run.length <= span.offset + span.length:
                return self._choose(span)
        return ()

    def _lay_out(self, run: Run) -> tuple[list[Read], list[memoryview]]:
        """Buffers for a run: raw blocks go straight to their place, the rest into scratch."""
        reads: list[Read] = []
        stored: list[memoryview] = []
        scratch = self._scratch.stored(run.length)
        at = run.start
        for read in run.reads:
            if read.start > at:  # a gap, or the padding of a block received in place
                reads.append(Read(at, scratch[at - run.start : read.start - run.start]))
            if (into := read.in_place) is None:
                begin = read.start - run.start
                into = scratch[begin : begin + read.stored_bytes]
            reads.append(Read(read.start, into))
            stored.append(into)
            at = read.start + into.nbytes
        return reads, stored

    def _decode(self, read: BlockRead, stored: memoryview, base: memoryview | None) -> None:
        chunks = {"first_chunk": read.first_chunk, "last_chunk": read.last_chunk}
        if read.in_place is not None:
            codec.verify(read.encoding, stored, **chunks)
        elif (whole := read.whole) is not None:
            codec.decode(read.encoding, stored, whole, base=base, **chunks)
        else:
            out = self._scratch.raw(read.raw_bytes)
            codec.decode(read.encoding, stored, out, base=base, **chunks)
            for want in read.wanted:
                begin = want.offset - read.raw_start
                want.into[:] = out[begin : begin + want.into.nbytes]

    def _base(self, read: BlockRead) -> memoryview | None:
        """The same chunks of a delta's base, which always has a standalone placement."""
        base = read.encoding.base
        if base is None:
            return None
        standalone = [
            placement
            for placement in self._placements.get(base, ())
            if placement.encoding.base is None
        ]
        out = np.empty(read.raw_bytes, np.uint8).data
        for run in plan_reads([Wanted(base, read.raw_start, out)], {base: standalone}):
            self.fetch(run)
        return out

    def _count(self, run: Run, served: Served, failures: Sequence[YardError]) -> None:
        with self._lock:
            report = self.report
            report.requests += 1
            report.stored_bytes += run.length
            report.by_path[served.path] += run.length
            if served.replica is not None:
                report.by_datanode[served.replica.datanode] += run.length
            report.failed += map(str, failures)


class _Scratch(threading.local):
    """Memory of one thread, used again for every run: touching fresh pages costs a copy."""

    def __init__(self) -> None:
        self._stored = np.empty(0, np.uint8)
        self._raw = np.empty(0, np.uint8)

    def stored(self, length: int) -> memoryview:
        if self._stored.size < length:
            self._stored = np.empty(length, np.uint8)
        return self._stored.data[:length]

    def raw(self, length: int) -> memoryview:
        if self._raw.size < length:
            self._raw = np.empty(length, np.uint8)
        return self._raw.data[:length]


def read_pack_index(store: Store, pack: PackId) -> tuple[Placement, ...]:
    """What a pack says it holds. Raises FileMissing, PackInvalid, UnknownFormat."""
    location = store.locate(layout.pack(pack))
    tail = bytearray(min(TAIL_BYTES, location.length))
    store.read(location, [Read(location.length - len(tail), memoryview(tail))])
    span = read_trailer(tail, location.length)
    footer = span.within(tail, location.length)
    if footer is None:
        footer = memoryview(bytearray(span.length))
        store.read(location, [Read(span.offset, footer)])
    return read_footer(footer, span, pack)
