"""Loading by a group: each rank reads its share, and they exchange what they read."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from pydantic import TypeAdapter, ValidationError

from weightyard.errors import Damaged, Refused, Retryable
from weightyard.format.dtypes import DType
from weightyard.loader.arriving import Arriving
from weightyard.loader.asked import Asked
from weightyard.loader.filling import Filled
from weightyard.loader.load import Weights, plan
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.peers import Parcel, Peers
from weightyard.loader.placing import Placer, device_of
from weightyard.loader.plan import Fetch, TensorPlan
from weightyard.loader.sharing import (
    Lying,
    Portion,
    Split,
    Wants,
    decode_wants,
    encode_wants,
    offsets,
    shared_blocks,
    split_reads,
    wants_of,
)
from weightyard.loader.stored import Reading, StoreOrigin, placer_for
from weightyard.names import PackId
from weightyard.records import RememberedVersion, Version
from weightyard.storage import layout
from weightyard.storage.store import Replica
from weightyard.transfer.learned import learned_of
from weightyard.transfer.plan import standalone
from weightyard.transfer.replicas import Place
from weightyard.transfer.together import run_together

if TYPE_CHECKING:
    import torch

_AHEAD = 4
"""Rounds a rank reads before they are exchanged."""

_LOCATING = 8
"""Packs asked for at once."""

_VERSION: TypeAdapter[Version] = TypeAdapter(RememberedVersion | Version)
"""Offline, the first rank remembers a version; so the others know how old that is."""

_T = TypeVar("_T")


class _Wish(msgspec.Struct):
    """What a rank says of what it wants."""

    wants: bytes
    asked: bytes
    """The same if it is the same that is asked for."""
    raw_bytes: int
    verify: str


class _Found(msgspec.Struct):
    """What a rank found out of where blocks lie."""

    blocks: dict[int, str]
    packs: dict[str, list[Replica]]


@dataclass(frozen=True, slots=True)
class _Planned:
    """What this rank is going to make."""

    origin: Origin
    asked: Asked
    to: Destination
    plans: Sequence[TensorPlan]


def load_shared(
    peers: Peers,
    resolve: Callable[[], Version],
    origin_of: Callable[[Version], Origin],
    asked: Asked,
    device: Any,
) -> Weights:
    """What each rank asks for; of the store's bytes all ranks together read one copy.

    The first rank says which version a ref means. Raises RankFailed if another rank fails.
    """
    version = _resolved(peers, resolve)
    mine: list[_Planned] = []

    def prepare() -> bytes:
        origin = origin_of(version)
        to = Destination(device_of(device))
        made = _Planned(origin, asked, to, plan(origin, asked))
        mine.append(made)
        # What this node has the files of it reads from those.
        needed = made.plans if isinstance(origin, StoreOrigin) else ()
        regions = repr([(one.names, one.region) for one in needed]).encode()
        wish = _Wish(
            wants=encode_wants(wants_of(needed)),
            asked=hashlib.blake2s(regions).digest(),
            raw_bytes=sum(one.bytes for one in needed),
            verify=asked.verify,
        )
        return msgspec.msgpack.encode(wish)

    wishes = [_decoded(said, _Wish) for said in peers.tell(prepare, "planning")]
    planned = mine[0]
    # A rank that wants proof gets it only if those that read for it prove what they read.
    is_full = any(wish.verify == "full" for wish in wishes)
    planned = replace(planned, asked=replace(asked, verify="full" if is_full else "fast"))
    blocks = planned.origin.manifest.blocks
    wants = [decode_wants(wish.wants, blocks, whole=is_full) for wish in wishes]
    split = _split(peers, planned.origin, wants, whole=is_full)
    made = _carry_out(peers, planned, split)
    alike = {wish.asked: wish.raw_bytes for wish in wishes}
    report = planned.origin.report(
        planned.to.device,
        ranks=peers.size,
        received_bytes=made.received_bytes,
        group_bytes=min(split.bytes, sum(alike.values())),
        group_read_bytes=split.bytes,
    )
    return Weights(made.tensors, planned.origin, report)


def _resolved(peers: Peers, resolve: Callable[[], Version]) -> Version:
    found: list[Version] = []

    def first() -> bytes:
        if peers.rank != 0:
            return b""
        found.append(resolve())
        return found[0].model_dump_json().encode()

    said = peers.tell(first, "resolving")[0]
    try:
        return found[0] if found else _VERSION.validate_json(said)
    except ValidationError as why:
        raise _unreadable(why) from None


def _split(peers: Peers, origin: Origin, wants: Sequence[Wants], *, whole: bool) -> Split:
    """Who reads what. Each rank looks up some of the blocks that several want."""
    shared = shared_blocks(wants)
    lying: dict[int, Lying] = {}
    places = [Place()] * peers.size
    if shared:
        some = [int(block) for block in np.array_split(shared, peers.size)[peers.rank]]
        found = [
            _decoded(said, _Found)
            for said in peers.tell(lambda: _look_up(origin, some), "locating")
        ]
        packs = {pack: tuple(held) for one in found for pack, held in one.packs.items()}
        for one in found:
            lying |= {block: Lying(pack, packs.get(pack, ())) for block, pack in one.blocks.items()}
        replicas = [replica for held in packs.values() for replica in held]
        told = peers.tell(lambda: msgspec.msgpack.encode(_place(origin, replicas)), "locating")
        places = [_decoded(said, Place) for said in told]
    return split_reads(wants, origin.manifest.blocks, lying, places, whole=whole)


def _look_up(origin: Origin, numbers: Sequence[int]) -> bytes:
    """Where blocks lie, as far as that is to be had: reading will tell of what is not."""
    found = _Found({}, {})
    if not isinstance(origin, StoreOrigin):
        return msgspec.msgpack.encode(found)
    ids = {origin.manifest.blocks[number].id: number for number in numbers}
    packs: set[PackId] = set()
    for block, places in origin.catalogue.placements(list(ids)).items():
        best = min(standalone(places) or places, key=lambda one: one.encoding.stored_bytes)
        found.blocks[ids[block]] = best.pack.hex
        packs.add(best.pack)
    locations = learned_of(origin.store).locations

    def locate(pack: PackId) -> None:
        path = layout.pack(pack)
        with suppress(Retryable, Damaged):
            location = locations.get(path) or locations.ask(origin.store, path)
            found.packs[pack.hex] = [one for span in location.spans[:1] for one in span.replicas]

    run_together(_LOCATING, "weightyard-locate", [partial(locate, one) for one in sorted(packs)])
    return msgspec.msgpack.encode(found)


def _place(origin: Origin, replicas: Iterable[Replica]) -> Place:
    if not isinstance(origin, StoreOrigin):
        return Place()
    told = origin.settings.location if origin.settings is not None else None
    return learned_of(origin.store).whereabouts.place(replicas, told)


def _carry_out(peers: Peers, planned: _Planned, split: Split) -> _Making:
    """Read and exchange, round by round. What can fail is done where all ranks hear of it."""
    has_files = not isinstance(planned.origin, StoreOrigin)
    making = _Mapping(planned) if has_files else _Sharing(planned, split, peers.rank)
    try:
        for portions in split.rounds:
            peers.tell(making.read, "reading")
            with planned.origin.tally.stage("exchange"):
                making.exchange(peers, portions)
        peers.tell(making.finish, "placing")
    finally:
        making.close()
    return making


class _Making:
    """This rank's tensors in the making.

    Call order: read → exchange, for each round; then finish. Last of all close.
    """

    def __init__(self, planned: _Planned) -> None:
        self._planned = planned
        self._found: dict[tuple[str, ...], torch.Tensor] = {}
        self.received_bytes = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._found[one.names] for one in self._planned.plans for name in one.names}

    def read(self) -> bytes:
        """Have this rank's portions of the next round; what came in the last one is placed."""
        return b""

    def exchange(self, peers: Peers, portions: Sequence[Portion]) -> None:
        """Give others what this rank read for them, take what they read for it."""

    def finish(self) -> bytes:
        """Make what is not made yet."""
        return b""

    def close(self) -> None:
        """End what is under way. Idempotent."""


class _Mapping(_Making):
    """On a node that has the version's files: nothing is read, and nothing is asked of others."""

    def finish(self) -> bytes:
        planned = self._planned
        for one, tensor in planned.origin.tensors(planned.plans, planned.asked, planned.to):
            self._found[one.names] = tensor
        return b""


class _Sharing(_Making):
    """Out of the store, together with others."""

    def __init__(self, planned: _Planned, split: Split, rank: int) -> None:
        super().__init__(planned)
        self._rank = rank
        self._upcoming = iter(split.rounds)
        self._extents = [extent for one in split.read_by(rank) for extent in one.extents]
        self._running: deque[Future[list[memoryview]]] = deque()
        self._own: list[memoryview] = []
        self._arrived: list[tuple[Portion, memoryview]] = []
        self._pool = ThreadPoolExecutor(_AHEAD, "weightyard-load")
        self._reading: Reading | None = None
        self._placer: Placer | None = None

    def read(self) -> bytes:
        reading, arriving = self._begun()
        while len(self._running) < _AHEAD and (portions := next(self._upcoming, None)):
            own = [portion for portion in portions if portion.reader == self._rank]
            self._running.append(self._pool.submit(_read, reading, own))
        self._place(arriving)
        self._own = reading.wait(self._running.popleft())
        return b""

    def exchange(self, peers: Peers, portions: Sequence[Portion]) -> None:
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
        peers.swap(sends, receives, "exchanging")

    def finish(self) -> bytes:
        _, arriving = self._begun()
        self._place(arriving)
        for number in arriving.empty():
            self._deliver(number)
        return b""

    def close(self) -> None:
        if self._reading is not None:
            self._reading.stop.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._placer is not None:
            self._placer.close()

    def _begun(self) -> tuple[Reading, Arriving]:
        """Made when all ranks would hear that it failed."""
        planned, origin = self._planned, self._planned.origin
        if self._reading is None:
            assert isinstance(origin, StoreOrigin)
            quiet = replace(planned.asked, progress=None)
            self._reading = Reading(origin, quiet, self._extents)
            self._placer = placer_for(planned.plans, planned.asked, planned.to, origin.tally)
            self._arriving = Arriving(planned.plans, self._placer, planned.asked.progress)
        return self._reading, self._arriving

    def _place(self, arriving: Arriving) -> None:
        arrived, self._arrived = self._arrived, []
        pieces = [
            (extent, memory[at : at + extent.length])
            for portion, memory in arrived
            for extent, at in zip(portion.extents, offsets(portion), strict=True)
        ]
        with self._planned.origin.tally.stage("place"):
            done = arriving.take(pieces)
        for number in done:
            self._deliver(number)

    def _deliver(self, number: int) -> None:
        assert self._placer is not None
        plan = self._planned.plans[number]
        self._planned.origin.tally.delivered(len(plan.names), plan.bytes)
        self._found[plan.names] = self._placer.finish(number)


def _read(reading: Reading, portions: Sequence[Portion]) -> list[memoryview]:
    memories = [np.empty(portion.length, np.uint8).data for portion in portions]
    targets = [
        Filled(Fetch(portion.extents, portion.length, 0), DType.U8, memory)
        for portion, memory in zip(portions, memories, strict=True)
    ]
    if targets:
        reading.fill(targets)
    return memories


def _decoded(said: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(said, type=kind)
    except (msgspec.DecodeError, RecursionError) as why:
        raise _unreadable(why) from None


def _unreadable(why: Exception) -> Refused:
    return Refused(f"another rank says what cannot be read: is its weightyard the same? {why}")
