"""Joint reading: each rank of a group reads its share, and they exchange what they read."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from weightyard.format.block import ALIGNMENT
from weightyard.format.dtypes import DType
from weightyard.loader import peers
from weightyard.loader.arriving import Arriving
from weightyard.loader.asked import Asked
from weightyard.loader.batches import Batch, Part
from weightyard.loader.budget import READS_AT_ONCE
from weightyard.loader.filling import Filled
from weightyard.loader.finding import find, told
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.peers import DONE, Parcel, Ranks, tell_until_done
from weightyard.loader.placing import Placer
from weightyard.loader.plan import Fetch, TensorPlan
from weightyard.loader.sharing import (
    ROUND_BYTES,
    Portion,
    Split,
    decode_wants,
    encode_wants,
    offsets,
    split_reads,
    wants_of,
)
from weightyard.loader.stored import Reading, StoreOrigin, converted_for, placer_for
from weightyard.loader.straight import straight_parts
from weightyard.transfer.plan import GAP_BYTES, RUN_BYTES

if TYPE_CHECKING:
    import torch

_AHEAD = 4
"""How many rounds a rank reads ahead of exchanging or placing them."""

_AHEAD_WITHIN = 2
"""The same where the host's memory is bounded; `Budget.round_bytes` relies on it."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Planned:
    """What a rank is going to make."""

    origin: Origin
    asked: Asked
    to: Destination
    plans: Sequence[TensorPlan]
    passing: frozenset[int] = frozenset()
    """Tensors, by number, that the caller copies from as soon as they are whole, and then drops:
    so only few of them are in memory at a time."""

    @property
    def is_straight(self) -> bool:
        """Whether bytes of tensors that are not converted are received right in the tensors.

        On a device they are not, nor where whole blocks are read to prove a part of them: there
        bytes are copied, through bounded memory.
        """
        return self.to.device.type == "cpu" and self.asked.verify == "fast"

    @property
    def copied(self) -> frozenset[int]:
        """Tensors, by number, that are filled by copies in memory. Raises Unsupported."""
        return self.passing | converted_for(self.plans, self.asked, self.to)


@dataclass(frozen=True, slots=True)
class Joint:
    """What was read, by this rank and by all of them."""

    received_bytes: int
    """Raw bytes that other ranks read for this one."""
    wanted_bytes: int
    """What all ranks together wanted, counted once if it is the same."""
    read_bytes: int
    """Raw bytes that all ranks together read for it."""
    needed_bytes: int
    """Stored bytes that somebody had to read for it, in whole chunks, bases of deltas counted."""
    stored_bytes: int
    """Stored bytes that all ranks together read."""


Take = Callable[[int, "torch.Tensor"], None]
"""Is given a tensor, by its number among those planned, when it is whole."""


class _Wish(msgspec.Struct):
    """What a rank says of what it wants."""

    wants: bytes
    asked: bytes
    """A digest of what is asked for: ranks that ask for the same have the same."""
    raw_bytes: int
    verify: str
    round_bytes: int | None
    """How much it has memory to exchange at a time; None: any amount."""


def read_jointly(ranks: Ranks, prepare: Callable[[], Planned], take: Take) -> Joint:
    """Make what each rank plans; all ranks together read one copy of the store's bytes.

    Raises what preparing and reading raise, and RankFailed if another rank fails.
    """
    mine: list[tuple[Planned, frozenset[int]]] = []

    def wish() -> bytes:
        planned = prepare()
        mine.append((planned, planned.copied))
        # A node that has the version's files reads those, and needs nothing from the store.
        needed = planned.plans if isinstance(planned.origin, StoreOrigin) else ()
        regions = repr([(one.names, one.region) for one in needed]).encode()
        said = _Wish(
            wants=encode_wants(wants_of(needed)),
            asked=hashlib.blake2s(regions).digest(),
            raw_bytes=sum(one.bytes for one in needed),
            verify=planned.asked.verify,
            round_bytes=planned.asked.budget.round_bytes,
        )
        return msgspec.msgpack.encode(said)

    wishes = [told(said, _Wish) for said in ranks.tell(wish, "planning")]
    planned, copied = mine[0]
    # A rank that wants proof gets it only if those that read for it prove what they read.
    is_full = any(one.verify == "full" for one in wishes)
    planned = replace(planned, asked=replace(planned.asked, verify="full" if is_full else "fast"))
    blocks = planned.origin.manifest.blocks
    wants = [decode_wants(one.wants, blocks, whole=is_full) for one in wishes]
    found = find(ranks, planned.origin, wants, planned.asked.deadline)
    bounds = [one.round_bytes for one in wishes if one.round_bytes is not None]
    round_bytes = min([ROUND_BYTES, *bounds])
    split = split_reads(
        wants, blocks, found.lying, found.places, whole=is_full, round_bytes=round_bytes
    )
    received_bytes = _carry_out(ranks, planned, copied, split, take)
    read = ranks.tell(lambda: msgspec.msgpack.encode(planned.origin.tally.stored_bytes), "counting")
    alike = {one.asked: one.raw_bytes for one in wishes}
    return Joint(
        received_bytes=received_bytes,
        wanted_bytes=min(split.bytes, sum(alike.values())),
        read_bytes=split.bytes,
        needed_bytes=found.stored_bytes,
        stored_bytes=sum(told(said, int) for said in read),
    )


def _carry_out(
    ranks: Ranks, planned: Planned, copied: frozenset[int], split: Split, take: Take
) -> int:
    """Read and exchange, round by round. What can fail runs in `tell`: all ranks hear of it."""
    has_files = not isinstance(planned.origin, StoreOrigin)
    making: _Making = (
        _Mapping(planned, take) if has_files else _Sharing(planned, copied, split, ranks.rank, take)
    )
    try:
        for portions in split.rounds:
            ranks.tell(making.read, "reading")
            with planned.origin.tally.stage("exchange"):
                making.exchange(ranks, portions)
        tell_until_done(ranks, making.go_on, "reading")
    finally:
        making.close()
    planned.origin.tally.moved("exchange", making.received_bytes)
    return making.received_bytes


class _Making:
    """This rank's tensors in the making.

    Call order: read → exchange, for each round; then go_on, until all ranks are done. Last of all
    close.
    """

    def __init__(self, planned: Planned, take: Take) -> None:
        self._planned = planned
        self._take = take
        self.received_bytes = 0

    def read(self) -> bytes:
        """Place what came in the last round, and get this rank's portions of the next one."""
        return b""

    def exchange(self, ranks: Ranks, portions: Sequence[Portion]) -> None:
        """Give others what this rank read for them, take what they read for it."""

    def go_on(self) -> bytes:
        """Do for a while what needs no other rank. Returns DONE when nothing is left."""
        return DONE

    def close(self) -> None:
        """End what is under way. Idempotent."""


class _Mapping(_Making):
    """On a node that has the version's files: nothing is read, and nothing is asked of others."""

    def __init__(self, planned: Planned, take: Take) -> None:
        super().__init__(planned, take)
        self._numbers = {one.names: number for number, one in enumerate(planned.plans)}
        self._tensors = planned.origin.tensors(planned.plans, planned.asked, planned.to)

    def go_on(self) -> bytes:
        until = time.monotonic() + peers.SLICE_S
        for one, tensor in self._tensors:
            self._take(self._numbers[one.names], tensor)
            if time.monotonic() > until:
                return b""
        return DONE


class _Sharing(_Making):
    """Out of the store, together with others."""

    def __init__(
        self, planned: Planned, copied: frozenset[int], split: Split, rank: int, take: Take
    ) -> None:
        super().__init__(planned, take)
        self._rank = rank
        most_bytes = planned.asked.budget.round_bytes
        self._ahead = _AHEAD if most_bytes is None else _AHEAD_WITHIN
        read_bytes = RUN_BYTES if most_bytes is None else min(RUN_BYTES, most_bytes)
        # Each thread that reads takes as much memory as a batch may.
        threads = _AHEAD + 1 if most_bytes is None else READS_AT_ONCE
        # What lies between this rank's portions is read by other ranks.
        self._gap_bytes = ALIGNMENT if len(split.own) > 1 else GAP_BYTES
        self._straight: list[Part] = []
        own: Sequence[Portion] = split.own[rank]
        if planned.is_straight:
            self._straight, own = straight_parts(planned.plans, own, copied)
        rounds = ([one for one in some if one.reader == rank] for some in split.rounds)
        self._upcoming = chain(rounds, _grouped(own, read_bytes))
        self._extents = [
            extent
            for one in chain(own, (one for some in split.rounds for one in some))
            if one.reader == rank
            for extent in one.extents
        ]
        self._running: deque[tuple[Sequence[Portion], Future[list[memoryview]]]] = deque()
        self._own: list[memoryview] = []
        self._arrived: list[tuple[Portion, memoryview]] = []
        self._pool = ThreadPoolExecutor(threads, "weightyard-load")
        self._readings: list[Reading] = []
        self._placer: Placer | None = None
        self._filling: Future[None] | None = None
        self._is_done = False

    def read(self) -> bytes:
        self._begin()
        self._read_ahead()
        self._place()
        self._own = self._readings[0].wait(self._running.popleft()[1])
        return b""

    def exchange(self, ranks: Ranks, portions: Sequence[Portion]) -> None:
        own = iter(self._own)
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        for portion in portions:
            if portion.reader == self._rank:
                memory = next(own)
                sends += [Parcel(rank, memory) for rank in portion.wanting if rank != self._rank]
            elif self._rank in portion.wanting:
                memory = np.empty(portion.length, np.uint8).data
                receives.append(Parcel(portion.reader, memory))
                self.received_bytes += portion.length
            else:
                continue
            self._arrived.append((portion, memory))
        ranks.swap(sends, receives, "exchanging")

    def go_on(self) -> bytes:
        if self._is_done:
            return DONE
        self._begin()
        until = time.monotonic() + peers.SLICE_S
        self._read_ahead()
        self._place()
        while self._running:
            portions, future = self._running[0]
            if not self._is_there(future, until):
                return b""
            self._arrived += zip(portions, future.result(), strict=True)
            self._running.popleft()
            self._read_ahead()
            self._place()
        if self._filling is not None:
            if not self._is_there(self._filling, until):
                return b""
            self._filling.result()
            self._deliver(self._arriving.count(self._straight))
        self._deliver(self._arriving.empty())
        self._is_done = True
        return DONE

    def close(self) -> None:
        for reading in self._readings:
            reading.stop.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._placer is not None:
            self._placer.close()

    def _begin(self) -> None:
        """Make what may fail, not before all ranks would hear of a failure."""
        if self._readings:
            return
        planned, origin = self._planned, self._planned.origin
        assert isinstance(origin, StoreOrigin)
        quiet = replace(planned.asked, progress=None)  # what arrives counts when it is placed
        self._readings.append(Reading(origin, quiet, self._extents, self._gap_bytes))
        self._placer = placer_for(
            planned.plans, planned.asked, planned.to, origin.tally, by_group=True
        )
        self._arriving = Arriving(planned.plans, self._placer, planned.asked.progress)
        if self._straight:
            extents = (extent for part in self._straight for extent in part.fetch.extents)
            self._readings.append(Reading(origin, planned.asked, extents, self._gap_bytes))
            self._arriving.begin(part.tensor for part in self._straight)
            batch = Batch(tuple(self._straight), (), 0)
            self._filling = self._pool.submit(self._placer.fill, batch, self._readings[1].fill)

    def _read_ahead(self) -> None:
        while len(self._running) < self._ahead and (own := next(self._upcoming, None)) is not None:
            self._running.append((own, self._pool.submit(_read, self._readings[0], own)))

    def _is_there(self, future: Future[_T], until: float) -> bool:
        """Wait for the result of a thread, but not for long. Raises DeadlineExceeded."""
        left_s = self._planned.asked.deadline.left("loading")
        try:
            future.exception(max(0.0, min(left_s, until - time.monotonic())))
        except FutureTimeout:
            self._planned.asked.deadline.left("loading")
            return False
        return True

    def _place(self) -> None:
        arrived, self._arrived = self._arrived, []
        pieces = [
            (extent, memory[at : at + extent.length])
            for portion, memory in arrived
            for extent, at in zip(portion.extents, offsets(portion), strict=True)
        ]
        with self._planned.origin.tally.stage("place"):
            done = self._arriving.take(pieces)
        self._deliver(done)

    def _deliver(self, numbers: Iterable[int]) -> None:
        assert self._placer is not None
        for number in numbers:
            plan = self._planned.plans[number]
            self._planned.origin.tally.delivered(len(plan.names), plan.bytes)
            self._take(number, self._placer.finish(number))


def _grouped(portions: Iterable[Portion], most_bytes: int) -> Iterator[list[Portion]]:
    """Portions to be read at once, so many bytes and at least one."""
    group: list[Portion] = []
    used = 0
    for portion in portions:
        if group and used + portion.length > most_bytes:
            yield group
            group, used = [], 0
        group.append(portion)
        used += portion.length
    if group:
        yield group


def _read(reading: Reading, portions: Sequence[Portion]) -> list[memoryview]:
    memories = [np.empty(portion.length, np.uint8).data for portion in portions]
    targets = [
        Filled(Fetch(portion.extents, portion.length, 0), DType.U8, memory)
        for portion, memory in zip(portions, memories, strict=True)
    ]
    if targets:
        reading.fill(targets)
    return memories
