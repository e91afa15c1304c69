"""The pipeline of a read: packs are located, runs fetched and decoded, many at the same time.

The caller's thread decides; the others only do what they are told, and post the results to it.
So nothing here needs a lock, and the caller's hooks are called in its own thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from weightyard.errors import BlockCorrupt, FileMissing, ReplicasDamaged, YardError
from weightyard.names import PackId
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.limit import AdaptiveLimit
from weightyard.storage.store import Location, Store
from weightyard.transfer.fetching import Carried, Fetched, Fetcher, Job, without_frames
from weightyard.transfer.hedging import Race
from weightyard.transfer.learned import MOST_FETCHES, Learned
from weightyard.transfer.memory import HostMemory
from weightyard.transfer.plan import Run
from weightyard.transfer.report import MOST_FAILURES, OnEvent, ReadEvent, ReadReport

_LOCATORS = 8
_TICK_S = 0.1
_LOCATOR_GRACE_S = 1.0

Lost = tuple[Run, YardError]
"""A run whose bytes are not where they were thought to be, and the error that showed it."""


def how_many_more(limit: int, decoders: int, under_way: int, fetched: int) -> int:
    """How many runs to begin beside those under way, of which some are fetched already. Pure.

    As many as the network rewards, and always one more than can decode at once, so that the network
    is not idle meanwhile; none while fetched ones wait for a decoder, since they would only take
    fresh memory.
    """
    if fetched > decoders:
        return 0
    return max(0, max(limit, decoders + 1) - under_way)


class Pipeline:
    """Carries out the runs of a plan. For one use, in one thread."""

    def __init__(
        self,
        store: Store,
        learned: Learned,
        limit: AdaptiveLimit,
        *,
        stop: Cancel,
        deadline: Deadline,
        memory: HostMemory,
        decoders: int,
        report: ReadReport,
        progress: Callable[[int], None] | None,
        on_event: OnEvent | None,
    ) -> None:
        """`stop`: ends every read under way; `deadline` ends with it, or when its time is up.

        `decoders`: how many threads decode.
        """
        self._store = store
        self._learned = learned
        self._limit = limit
        self._stop = stop
        self._deadline = deadline
        self._memory = memory
        self._report = report
        self._progress = progress
        self._on_event = on_event
        self._decoding = decoders
        self.decoders = ThreadPoolExecutor(decoders, "weightyard-decode")
        self._words: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: deque[Job] = deque()
        self._waiting: dict[PackId, list[Job]] = {}
        self._fetching: set[Job] = set()
        self._chased: dict[Job, memoryview] = {}
        self._settling: set[Job] = set()
        self._left = 0
        self._done_bytes = 0
        self._lost: list[Lost] = []

    def say(self, event: ReadEvent) -> None:
        """Tell the caller of an event, from any thread."""
        if self._on_event is not None:
            self._words.put(partial(self._on_event, event))

    def run(self, fetcher: Fetcher, runs: Sequence[Run], also: Iterable[PackId] = ()) -> list[Lost]:
        """Fill the buffers of all runs but those it returns, whose packs are gone or damaged.

        `also`: packs that will be needed besides those of the runs. When it returns or raises, no
        thread writes to any buffer any more. Raises what the first run to fail raised,
        DeadlineExceeded, Cancelled.
        """
        self._fetcher = fetcher
        self._fetchers = ThreadPoolExecutor(2 * MOST_FETCHES, "weightyard-fetch")
        locators: list[threading.Thread] = []
        is_done = False
        try:
            locators += self._begin(runs, also)
            while self._left:
                self._deadline.left(f"reading: {self._done_bytes} bytes are done")
                self._admit()
                self._chase()
                self._listen()
            is_done = True
        finally:
            if not is_done:
                self._stop.cancel()
            # Reads under way end at once when they are cancelled; until they have ended they may
            # write into the caller's memory, so they are waited for.
            self._fetchers.shutdown(wait=True, cancel_futures=True)
            self.decoders.shutdown(wait=True)
            # Locating cannot be cancelled, but writes nowhere: its threads end by themselves.
            ends_at = time.monotonic() + _LOCATOR_GRACE_S
            for locator in locators:
                locator.join(max(0.0, ends_at - time.monotonic()))
            most = max(self._report.most_host_bytes, self._memory.most_bytes)
            self._report.most_host_bytes = most
            self._memory.close()
            self._let_go()
        return self._lost

    def _let_go(self) -> None:
        """Drop what has views of the caller's memory: results nobody took, which may be errors, and
        the fetcher. That refers to this pipeline: as a cycle, neither would be freed at once."""
        with suppress(queue.Empty):
            while True:
                self._words.get_nowait()
        del self._fetcher

    def _begin(self, runs: Sequence[Run], also: Iterable[PackId]) -> list[threading.Thread]:
        """Sort runs by whether their pack's location is known; ask for the others' at once."""
        unknown: deque[PackId] = deque()
        for run in runs:
            job = Job(run, location=self._learned.locations.get(layout.pack(run.pack)))
            self._left += 1
            if job.location is not None:
                self._ready.append(job)
                continue
            if run.pack not in self._waiting:
                unknown.append(run.pack)
            self._waiting.setdefault(run.pack, []).append(job)
        for pack in also:
            if pack not in self._waiting and not self._learned.locations.get(layout.pack(pack)):
                unknown.append(pack)
        locators = [
            threading.Thread(
                target=self._locate, args=(unknown,), name="weightyard-locate", daemon=True
            )
            for _ in range(min(_LOCATORS, len(unknown)))
        ]
        for locator in locators:
            locator.start()
        return locators

    def _locate(self, packs: deque[PackId]) -> None:
        """In a thread of its own: ask where packs lie until none is left."""
        while not self._stop.is_cancelled:
            try:
                pack = packs.popleft()
            except IndexError:
                return
            began = time.monotonic()
            try:
                found = self._learned.locations.ask(self._store, layout.pack(pack))
            except BaseException as why:  # noqa: BLE001  the caller's thread raises it
                self._words.put(partial(self._not_located, pack, why))
            else:
                self._words.put(partial(self._located, pack, found, time.monotonic() - began))

    def _located(self, pack: PackId, location: Location, took_s: float) -> None:
        self._report.locate_s += took_s
        for job in self._waiting.pop(pack, ()):
            job.location = location
            self._ready.append(job)

    def _not_located(self, pack: PackId, why: BaseException) -> None:
        jobs = self._waiting.pop(pack, [])
        if not isinstance(why, FileMissing):
            raise why
        for job in jobs:
            self._lose(job, why)

    def _admit(self) -> None:
        """Begin runs: as many as `how_many_more` says and the memory holds."""
        fetched = sum(job.is_fetched for job in self._fetching)
        more = how_many_more(self._limit.limit, self._decoding, len(self._fetching), fetched)
        for _ in range(min(more, len(self._ready))):
            job = self._ready[0]
            if not job.memory:
                needed = job.run.host_bytes
                if not self._memory.fits(needed):
                    return
                job.memory = self._memory.take(needed)
            self._ready.popleft()
            self._fetching.add(job)
            carry_out = partial(self._fetcher.carry_out, job)
            self._fetchers.submit(self._post, carry_out, self._carried_out, job)

    def _chase(self) -> None:
        """Hedge the reads that take longer than others of their size."""
        now = time.monotonic()
        for job, race, due_at in self._due():
            if now < due_at:
                continue
            length = job.run.length
            if not self._memory.fits(length) or not self._learned.hedges.take():
                return
            if not race.begin_second():
                continue
            self._report.hedged += 1
            memory = self._chased[job] = self._memory.take(length)
            chase = partial(self._fetcher.chase, job, race, memory)
            self._fetchers.submit(self._post, chase, self._chase_ended, job)

    def _due(self) -> Iterator[tuple[Job, Race[Fetched], float]]:
        """The reads under way that may be hedged, also those of bases, and from when on."""
        for job in self._fetching:
            for one in (job, *job.bases):
                race = one.race
                if race is not None and race.due_at is not None and one not in self._chased:
                    yield one, race, race.due_at

    def _listen(self) -> None:
        """Wait for a posted result until something else is due at the latest, and act on it."""
        now = time.monotonic()
        wake_at = min(now + _TICK_S, self._deadline.at)
        for _, _, due_at in self._due():
            wake_at = min(wake_at, max(due_at, now + _TICK_S / 10))
        try:
            word = self._words.get(timeout=max(0.0, wake_at - now))
        except queue.Empty:
            return
        word()

    def _post(
        self,
        work: Callable[[], object],
        then: Callable[[Job, object, BaseException | None], None],
        job: Job,
    ) -> None:
        """In another thread: do some work, and post its result."""
        try:
            result = work()
        except BaseException as why:  # noqa: BLE001  the caller's thread raises it
            self._words.put(partial(then, job, None, why))
        else:
            self._words.put(partial(then, job, result, None))

    def _carried_out(self, job: Job, carried: object, failed: BaseException | None) -> None:
        self._fetching.discard(job)
        if failed is not None:
            self._fail(job, failed)
        elif isinstance(carried, Carried):
            self._count(job, carried)
            self._finish(job)
            self._done_bytes += job.run.raw_bytes
            if self._progress is not None:
                self._progress(job.run.raw_bytes)

    def _fail(self, job: Job, why: BaseException) -> None:
        if not isinstance(why, FileMissing | BlockCorrupt | ReplicasDamaged):
            raise why
        self._lose(job, why)

    def _lose(self, job: Job, why: FileMissing | BlockCorrupt | ReplicasDamaged) -> None:
        self._learned.locations.drop(layout.pack(job.run.pack))
        self._lost.append((job.run, without_frames(why)))
        self._finish(job)

    def _finish(self, job: Job) -> None:
        self._left -= 1
        self._memory.give(job.memory)
        job.memory = memoryview(b"")
        for one in (job, *job.bases):
            self._settle(one)

    def _chase_ended(self, job: Job, _: object, failed: BaseException | None) -> None:
        if failed is not None:
            raise failed
        self._settle(job)

    def _settle(self, job: Job) -> None:
        """Called when a chase and when its job has ended: only then is the chase's memory free."""
        if job not in self._chased:
            return
        if job in self._settling:
            self._settling.remove(job)
            self._memory.give(self._chased.pop(job))
        else:
            self._settling.add(job)

    def _count(self, job: Job, carried: Carried) -> None:
        for base in job.bases:
            if base.carried is not None:
                self._count(base, base.carried)
        report, run, served = self._report, job.run, carried.served
        report.fetch_s += carried.fetch_s
        report.decode_s += carried.decode_s
        report.requests += 1
        report.stored_bytes += run.length
        report.by_path[served.path] += run.length
        if served.replica is not None:
            report.by_datanode[served.replica.datanode] += run.length
            report.by_host[served.replica.host] += run.length
            distance = self._fetcher.place((served.replica,)).distance(served.replica)
            report.by_distance[distance] += run.length
        report.hedges_won += carried.is_hedge
        report.failed_over += len(job.failures) - job.looks - job.overtaken
        report.located_again += job.looks
        room = MOST_FAILURES - len(report.failed)
        report.failed += map(str, job.failures[:room])
