"""Locations for a crowd: the NameNode is asked once for a pack, however many readers start.

An answer holds block tokens, so it is kept for less than their life, in memory, and never logged.
"""

from __future__ import annotations

import asyncio
import gzip
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from weightyard.errors import FileMissing, TooLarge
from weightyard.format.block import MIB
from weightyard.storage.hdfs import located
from weightyard.storage.hdfs.wire import BlockAccess
from weightyard.storage.store import Location, Store, StorePath
from weightyard.transfer.learned import learned_of
from weightyard.transfer.locations import Locations

LIFE_S = 150.0
"""How long an answer is kept at most. Even with locations in it that were known before, it is used
for far less than a block token's life, which is ten hours unless a cluster is set otherwise."""

MOST_ANSWERS = 256
MOST_BYTES = 64 * MIB
"""How many bytes all answers kept may have, compressed."""

_MADE_AT_ONCE = 2
_LOCATED_AT_ONCE = 8
_LEAST_REST_S, _LONGEST_REST_S = 2.0, 20.0
_REST = 4.0
"""How long the NameNode is left alone after an answer: so many times as long as that one took."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Where files lie, as it is sent."""

    stamp: str
    compressed: bytes
    until: float
    """On the clock of time.monotonic."""
    rests_until: float
    """It is not made anew before that."""


Making = Callable[[bool], Awaitable[Answer]]
"""Makes an answer; with True, the NameNode is asked even for what is known."""


class Answers:
    """Answers kept for a while. Used from the event loop only.

    A caller that finds no answer has one made; callers that come meanwhile wait for the same one. A
    caller for whom an answer is stale, which it names by its stamp, gets another one. That is not
    made more often than the NameNode can bear: a crowd that asks for it together shares one, and a
    caller that comes too soon waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, Answer] = OrderedDict()
        self._bytes = 0
        self._being_made: dict[Hashable, asyncio.Task[Answer]] = {}
        self._turn = asyncio.Semaphore(_MADE_AT_ONCE)

    async def get(self, key: Hashable, make: Making, *, stale: str | None = None) -> Answer:
        """The answer for a key. Raises what `make` raises."""
        known = self._known.get(key)
        if known is not None and known.stamp != stale and self._clock() < known.until:
            self._known.move_to_end(key)
            return known
        task = self._being_made.get(key)
        if task is None:
            is_forced = known is not None and known.stamp == stale
            task = asyncio.create_task(self._make(key, make, known if is_forced else None))
            self._being_made[key] = task
            task.add_done_callback(lambda done: self._made(key, done))
        # Shielded: the others still want it when the caller that began it goes away.
        return await asyncio.shield(task)

    async def _make(self, key: Hashable, make: Making, stale: Answer | None) -> Answer:
        if stale is not None:
            await asyncio.sleep(max(0.0, stale.rests_until - self._clock()))
        async with self._turn:
            answer = await make(stale is not None)
        self._forget(key)
        if len(answer.compressed) <= MOST_BYTES // 4:
            self._known[key] = answer
            self._bytes += len(answer.compressed)
        while len(self._known) > MOST_ANSWERS or self._bytes > MOST_BYTES:
            self._forget(next(iter(self._known)))
        return answer

    def _made(self, key: Hashable, task: asyncio.Task[Answer]) -> None:
        self._being_made.pop(key, None)
        if not task.cancelled():
            task.exception()  # callers get it; if none waits any more, asyncio must not warn of it

    def _forget(self, key: Hashable) -> None:
        if (old := self._known.pop(key, None)) is not None:
            self._bytes -= len(old.compressed)


def make_answer(store: Store, paths: Sequence[StorePath], is_forced: bool) -> Answer:
    """Find out where files lie; only those not asked for lately are asked for, unless `is_forced`.

    Files that are gone are left out.

    Raises TooLarge, StoreUnavailable.
    """
    if len(paths) > located.MAX_FILES:
        raise TooLarge(
            f"{len(paths)} packs are over {located.MAX_FILES} for one answer: read this version "
            "with WEIGHTYARD_VIA=store"
        )
    known = learned_of(store).locations
    began = time.monotonic()

    def find(path: StorePath) -> Location | None:
        with suppress(FileMissing):
            return (None if is_forced else _recent(known, path)) or known.ask(store, path)
        return None

    with ThreadPoolExecutor(_LOCATED_AT_ONCE, "weightyard-locate") as threads:
        found = [location for location in threads.map(find, paths) if location is not None]
    stamp = secrets.token_hex(8)
    compressed = gzip.compress(located.to_json(stamp, found), 5, mtime=0)
    now = time.monotonic()
    rest_s = min(max(_REST * (now - began), _LEAST_REST_S), _LONGEST_REST_S)
    return Answer(stamp, compressed, now + min(LIFE_S, _life_s(found) / 2), now + rest_s)


def _recent(known: Locations, path: StorePath) -> Location | None:
    location = known.get(path)
    return location if location is not None and _life_s([location]) > 2 * LIFE_S else None


def _life_s(locations: Iterable[Location]) -> float:
    """How long all block tokens in the locations can still be used."""
    ends = [
        span.access.token.expires_s
        for location in locations
        for span in location.spans
        if isinstance(span.access, BlockAccess)
    ]
    now = time.time()
    return min((end - now for end in ends if end is not None), default=float("inf"))
