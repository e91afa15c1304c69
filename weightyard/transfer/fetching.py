"""Carrying out one run: from the replica that promises most, or the next if that one fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

from weightyard.errors import (
    BlockCorrupt,
    Cancelled,
    DataNodeFailed,
    DeadlineExceeded,
    FileMissing,
    ReplicasDamaged,
    Retryable,
    StaleLocation,
    YardError,
)
from weightyard.format.pack import Placement
from weightyard.logs import Log
from weightyard.names import BlockId, PackId
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.limit import AdaptiveLimit
from weightyard.storage.store import Location, Replica, Served, Span, Store, StorePath
from weightyard.transfer.decoding import decode_run
from weightyard.transfer.estimates import Begun
from weightyard.transfer.hedging import Race
from weightyard.transfer.learned import Learned
from weightyard.transfer.plan import BlockRead, Run, Wanted, plan_reads, standalone
from weightyard.transfer.replicas import Place, rank
from weightyard.transfer.report import OnEvent, ReadEvent, ReadEventKind

_log = Log(__name__)

_MOST_LOOKS = 3
"""How often one run's pack is located anew before a stale answer counts as a failure."""

Choose: TypeAlias = Callable[[Span], Sequence[Replica]]
"""The replicas of a span in the order in which to ask them."""

_Error = TypeVar("_Error", bound=YardError)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A run's stored bytes."""

    served: Served
    stored: Sequence[memoryview]
    """By block: raw ones are where they belong already, others in scratch memory."""
    is_hedge: bool = False
    """A second replica had them sooner."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A run that was carried out."""

    served: Served
    is_hedge: bool
    fetch_s: float
    decode_s: float


@dataclass(slots=True, eq=False)
class Job:
    """One run on its way, and what was tried for it. Used by one thread at a time."""

    run: Run
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    """Its working memory: `run.host_bytes` of it."""
    bases: list[Job] = field(default_factory=list)
    """Jobs for the bases of its deltas, carried out one after the other before it is."""
    carried: Carried | None = None
    """Set for jobs of bases: how it was carried out."""
    tried: set[str] = field(default_factory=set)
    """DataNodes that failed, or whose bytes were wrong."""
    failures: list[YardError] = field(default_factory=list)
    looks: int = 0
    """How often its pack was located anew."""
    overtaken: int = 0
    """How often another replica was quicker."""
    location: Location | None = None
    asked: str = ""
    """The DataNode being read now."""
    race: Race[Fetched] | None = None
    is_fetched: bool = False
    """Its bytes are here, and decoded or waiting to be."""
    is_hopeless: bool = False
    """No replica is left, and the store was already asked to choose any."""

    def part(self, begin: int, length: int) -> memoryview:
        return self.memory[begin : begin + length]

    def raw_scratch(self) -> memoryview:
        """Where to decode what goes to several places: at the end of its memory."""
        needed = max(read.raw_scratch_bytes for read in self.run.reads)
        return self.memory[len(self.memory) - needed :]


def without_frames(why: _Error) -> _Error:
    """Prepare an error to be kept: its traceback's frames have views of the caller's memory."""
    why.__context__ = why.__cause__ = None
    return why.with_traceback(None)


class Fetcher:
    """Carries out the runs of one read, from any number of threads."""

    def __init__(
        self,
        store: Store,
        placements: Mapping[BlockId, Sequence[Placement]],
        learned: Learned,
        limit: AdaptiveLimit,
        *,
        decoders: Executor,
        stop: Cancel,
        deadline: Deadline,
        say: OnEvent,
        rack: str | None = None,
        choose: Choose | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """`placements`: of bases; `stop` and `deadline`: of the whole read, `timeout_s` of each
        request; `say`: is told of events, from any thread."""
        self._decoders = decoders
        self._store = store
        self._placements = placements
        self._learned = learned
        self._limit = limit
        self._stop = stop
        self._deadline = deadline
        self._say = say
        self._rack = rack
        self._choose = choose
        self._timeout_s = timeout_s

    def place(self, replicas: Sequence[Replica]) -> Place:
        return self._learned.whereabouts.place(replicas, self._rack)

    def locate(self, run: Run) -> Location:
        """Where a run's pack lies; asks the store if it is not known. Raises as `Store.locate`."""
        path = layout.pack(run.pack)
        return self._learned.locations.get(path) or self._ask_where(path)

    def carry_out(self, job: Job) -> Carried:
        """Fill the buffers of a run, from whichever replica has its bytes right.

        Raises what the last replica said if none has, FileMissing, ReplicasDamaged, Cancelled.
        """
        bases = self._fetch_bases(job)
        began = time.monotonic()
        while True:
            job.is_fetched = False
            fetched = self._fetch(job)
            job.is_fetched = True
            fetch_s = time.monotonic() - began
            try:
                # Not in this thread: codecs keep scratch memory for each, and many threads fetch.
                decode_s = self._decoders.submit(
                    decode_run, job.run, fetched.stored, bases, job.raw_scratch()
                ).result()
            except BlockCorrupt as why:
                self._reject(job, fetched, why)
            else:
                return Carried(fetched.served, fetched.is_hedge, fetch_s, decode_s)

    def _fetch(self, job: Job) -> Fetched:
        """The stored bytes of a run, not checked yet."""
        if job.location is None:
            job.location = self.locate(job.run)
        while True:
            if job.is_hopeless:
                raise job.failures[-1]
            _require_whole(job.run, job.location)
            try:
                # Waiting for a place has no limit of its own: reads that hold places end by theirs,
                # and the wait ends with the whole read.
                with self._limit.transfer(job.run.length, cancel=self._stop):
                    fetched = self._ask(job, job.location)
            except StaleLocation as why:
                self._note(job, why, is_failure=job.looks >= _MOST_LOOKS)
                job.looks += 1
                self._tell(ReadEventKind.LOCATED_AGAIN, job, job.asked, why)
                job.location = self._ask_where(job.location.path)
            except Retryable as why:
                self._note(job, why)
            else:
                return fetched

    def _ask_where(self, path: StorePath) -> Location:
        """Ask the store where a pack lies, for no longer than the read goes on.

        Asking cannot be cancelled, but writes nowhere: a read that ends leaves it to its thread.
        """
        doing = f"asking where {path} lies"
        left_s = self._deadline.left(doing)
        answer: Future[Location] = Future()
        ask = partial(
            self._learned.locations.ask,
            self._store,
            path,
            None if math.isinf(left_s) else left_s,
        )
        threading.Thread(
            target=_answer, args=(answer, ask), name="weightyard-locate", daemon=True
        ).start()
        is_over = threading.Event()
        answer.add_done_callback(lambda _: is_over.set())
        with self._stop.ending(is_over.set, doing):
            while not answer.done():
                is_over.wait(min(self._deadline.left(doing), threading.TIMEOUT_MAX))
        return answer.result()

    def _reject(self, job: Job, fetched: Fetched, why: BlockCorrupt) -> None:
        """The fetched bytes are wrong: do not ask that replica for them again."""
        served = fetched.served.replica
        if served is not None:
            job.asked = served.datanode
            self._learned.locations.distrust(layout.pack(job.run.pack), served.datanode)
        self._note(job, why)

    def chase(self, job: Job, race: Race[Fetched], memory: memoryview) -> None:
        """Ask the next replica for what another thread is waiting for. Never raises.

        `memory` is as long as the run, and used by nobody else until this returns.
        """
        answer: Fetched | None = None
        begun: Begun | None = None
        replica: Replica | None = None
        try:
            location = job.location
            if location is None:
                return
            span, candidates = self._candidates(job, location, but=job.asked)
            if span is None or not candidates:
                return
            replica, begun = self._begin(span, candidates)
            self._tell(ReadEventKind.HEDGED, job, replica.datanode, f"{job.asked} is slow")
            reads, stored = job.run.lay_out_apart(memory)
            served = self._store.read(
                location,
                reads,
                replica=replica,
                timeout_s=self._timeout_s,
                cancel=race.second,
            )
            answer = Fetched(served, stored, is_hedge=True)
            self._serve(job, begun, served)
        except Cancelled:
            self._release(begun)
        except YardError as why:
            self._blame(begun, why)
            if replica is not None:
                self._tell(ReadEventKind.REPLICA_FAILED, job, replica.datanode, why)
                job.tried.add(replica.datanode)
        finally:
            race.second_ended(answer)

    def _ask(self, job: Job, location: Location) -> Fetched:
        """Ask the best replica left or, if none is, any; if that takes long, another one too."""
        span, candidates = self._candidates(job, location)
        may_chase = len(candidates) > 1
        patience_s = self._learned.pace.patience_s(job.run.length) if may_chase else None
        race: Race[Fetched] = Race(patience_s)
        # Around all of it: `stop` must also end the wait for the second when the first has failed.
        with self._stop.ending(race.end, f"reading pack {job.run.pack}"):
            return self._read_first(job, location, race, span, candidates)

    def _read_first(
        self,
        job: Job,
        location: Location,
        race: Race[Fetched],
        span: Span | None,
        candidates: Sequence[Replica],
    ) -> Fetched:
        """Do the first read of a race. Returns its bytes, or those of a second that was sooner."""
        run = job.run
        replica, begun = self._begin(span, candidates) if span and candidates else (None, None)
        job.is_hopeless = replica is None
        job.asked = replica.datanode if replica is not None else ""
        reads, stored = run.lay_out(job.memory)
        self._learned.hedges.count_read()
        try:
            job.race = race
            served = self._store.read(
                location,
                reads,
                replica=replica,
                timeout_s=self._timeout_s,
                cancel=race.first,
            )
        except Cancelled:
            answer = race.first_failed(0)
            if answer is None:
                self._release(begun)
                raise
            # Overtaken by a read that began later: its bytes are used, and it is left alone.
            overtaken = DataNodeFailed(job.asked, "was slower than another replica")
            self._blame(begun, overtaken)
            job.failures.append(overtaken)
            job.overtaken += 1
            self._learned.pace.add(run.length, time.monotonic() - race.began_at)
            return answer
        except YardError as why:
            self._blame(begun, why)
            answer = race.first_failed(self._timeout_s)
            if answer is None or not isinstance(why, Retryable):
                raise
            self._note(job, why)
            return answer
        except BaseException:
            self._release(begun)
            race.first_failed(0)
            raise
        finally:
            job.race = None
        race.first_served()
        self._serve(job, begun, served)
        return Fetched(served, stored)

    def _candidates(
        self, job: Job, location: Location, but: str = ""
    ) -> tuple[Span | None, list[Replica]]:
        """The replicas that hold all of a run and were not tried; a pack normally has one span."""
        run = job.run
        for span in location.spans:
            if span.offset <= run.start and run.start + run.length <= span.offset + span.length:
                return span, [
                    replica
                    for replica in span.replicas
                    if replica.datanode not in job.tried and replica.datanode != but
                ]
        return None, []

    def _begin(self, span: Span, candidates: Sequence[Replica]) -> tuple[Replica, Begun]:
        estimates = self._learned.estimates
        if self._choose is None:
            place = self.place(span.replicas)
            return estimates.begin_first(
                candidates, lambda outlooks: rank(candidates, place, outlooks)
            )
        chosen = [replica for replica in self._choose(span) if replica in candidates]
        return estimates.begin_first(candidates, lambda outlooks: chosen or candidates)

    def _serve(self, job: Job, begun: Begun | None, served: Served) -> None:
        """A read went well: learn from it, where the store let the replica be chosen."""
        if begun is None or served.replica is None:
            self._release(begun)
            return
        self._learned.pace.add(job.run.length, time.monotonic() - begun.at)
        if self._learned.estimates.served(begun, job.run.length):
            self._tell(ReadEventKind.RECOVERED, job, begun.datanode, "it serves again")

    def _blame(self, begun: Begun | None, why: YardError) -> None:
        if begun is None:
            return
        if isinstance(why, DataNodeFailed | DeadlineExceeded):
            self._learned.estimates.failed(begun)
        else:
            self._learned.estimates.ended(begun)

    def _release(self, begun: Begun | None) -> None:
        if begun is not None:
            self._learned.estimates.ended(begun)

    def _note(self, job: Job, why: YardError, *, is_failure: bool = True) -> None:
        """Remember what the replica asked last did wrong."""
        job.failures.append(without_frames(why))
        if is_failure:
            job.tried.add(job.asked)
            self._tell(ReadEventKind.REPLICA_FAILED, job, job.asked, why)

    def _tell(self, kind: ReadEventKind, job: Job, datanode: str, reason: object) -> None:
        pack = job.run.pack.hex
        log = _log.warning if kind is ReadEventKind.REPLICA_FAILED else _log.info
        log(f"read.{kind.replace('-', '_')}", pack=pack, datanode=datanode or "any", reason=reason)
        self._say(ReadEvent(kind, pack, datanode or None, str(reason)))

    def _fetch_bases(self, job: Job) -> list[memoryview | None]:
        """The same chunks of each delta's base, which always has a standalone placement."""
        reads = job.run.reads
        if all(read.encoding.base is None for read in reads):
            return [None] * len(reads)
        at = job.run.scratch_bytes
        scratch_at = at + sum(read.base_bytes for read in reads)
        bases: list[memoryview | None] = []
        for read in reads:
            if read.encoding.base is None:
                bases.append(None)
                continue
            into = job.part(at, read.raw_bytes)
            at += read.base_bytes
            self._fetch_base(job, read, into, job.part(scratch_at, read.base_scratch_bytes))
            bases.append(into)
        return bases

    def _fetch_base(self, job: Job, read: BlockRead, into: memoryview, scratch: memoryview) -> None:
        """A base is read as all else is: hedged, from the next replica if one fails, and from
        another pack that has it if one is gone or damaged."""
        base = read.encoding.base
        if base is None:
            return
        wanted = [Wanted(base, read.raw_start, into)]
        placements = standalone(self._placements.get(base, ()))
        lost: set[PackId] = set()
        while True:
            runs = plan_reads(wanted, {base: placements}, avoid=lost)
            try:
                for run in runs:
                    part = Job(run, scratch)
                    job.bases.append(part)
                    part.carried = self.carry_out(part)
            except (FileMissing, BlockCorrupt, ReplicasDamaged) as why:
                lost |= {run.pack for run in runs}
                if all(placement.pack in lost for placement in placements):
                    raise
                _log.warning("read.base_elsewhere", block=base, reason=why)
            else:
                return


def _answer(answer: Future[Location], ask: Callable[[], Location]) -> None:
    try:
        answer.set_result(ask())
    except BaseException as why:  # noqa: BLE001  whoever waits for it raises it
        answer.set_exception(why)


def _require_whole(run: Run, location: Location) -> None:
    """Raises FileMissing if a pack ends before a run in it does."""
    end = run.start + run.length
    if location.length < end:
        raise FileMissing(
            f"{location.path} has {location.length} bytes; by its index it has {end} or more"
        )
