"""Finding: where the blocks lie that a group wants, asked once for all its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from weightyard.errors import Damaged, Refused, RegistryUnavailable, Retryable
from weightyard.format.block import Encoding
from weightyard.format.pack import Placement
from weightyard.loader.origin import Origin
from weightyard.loader.peers import Ranks
from weightyard.loader.sharing import PackReplicas, Wants, wanted_by_any
from weightyard.loader.stored import StoreOrigin
from weightyard.names import BlockId, PackId
from weightyard.storage import layout
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs import located
from weightyard.storage.store import Location, Replica
from weightyard.transfer.learned import learned_of
from weightyard.transfer.plan import standalone
from weightyard.transfer.replicas import Place
from weightyard.transfer.together import run_together

_LOCATING = 8
"""Packs asked for at once."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Found:
    """Where things are, the same on all ranks."""

    lying: Mapping[int, PackReplicas]
    """By the number of a block, as far as it was found: reading will report what is missing."""
    places: Sequence[Place]
    """Of the ranks."""
    stored_bytes: int
    """Stored bytes that have to be read for all of it, bases of deltas counted."""


class _Looked(msgspec.Struct):
    """What a rank found out of some blocks."""

    packs: dict[int, str]
    """By the number of a block."""
    bases: list[str]
    """Packs that are read too, for the bases of deltas."""
    stored_bytes: int


def find(ranks: Ranks, origin: Origin, wants: Sequence[Wants], deadline: Deadline) -> Found:
    """Look up what any rank wants: each rank asks for some, and tells the others.

    So the catalogue is asked once for a block and the NameNode once for a pack, however many ranks
    read it. What the NameNode said has block tokens in it, and goes only to ranks of the group.
    """
    together = wanted_by_any(wants)
    numbers = sorted(together)
    some = {number: together[number] for number in _share(numbers, ranks)}
    looked = [
        told(said, _Looked)
        for said in ranks.tell(
            lambda: msgspec.msgpack.encode(_look_up(origin, some, deadline)), "locating"
        )
    ]
    packs = sorted({pack for one in looked for pack in (*one.packs.values(), *one.bases)})
    mine = _share(packs, ranks)
    replicas: dict[str, tuple[Replica, ...]] = {}
    for said in ranks.tell(lambda: _locate(origin, mine), "locating"):
        for location in _told_locations(said):
            if isinstance(origin, StoreOrigin):
                learned_of(origin.store).locations.keep(location.path, location)
            first = [one for span in location.spans[:1] for one in span.replicas]
            replicas[location.path.text] = tuple(first)
    everywhere = [replica for held in replicas.values() for replica in held]
    places = ranks.tell(lambda: msgspec.msgpack.encode(_place(origin, everywhere)), "locating")
    return Found(
        {
            block: PackReplicas(pack, replicas.get(layout.pack(PackId(pack)).text, ()))
            for one in looked
            for block, pack in one.packs.items()
        },
        [told(said, Place) for said in places],
        sum(one.stored_bytes for one in looked),
    )


def told(said: bytes, kind: type[_T]) -> _T:
    """Decode what another rank said. Raises Refused."""
    try:
        return msgspec.msgpack.decode(said, type=kind)
    except (msgspec.DecodeError, RecursionError) as why:
        raise unreadable(why) from None


def unreadable(why: Exception) -> Refused:
    return Refused(f"another rank says what cannot be read: is its weightyard the same? {why}")


def _share(all_of_it: Sequence[_T], ranks: Ranks) -> Sequence[_T]:
    """This rank's share: neighbours, which most likely lie in the same packs."""
    count = len(all_of_it)
    return all_of_it[count * ranks.rank // ranks.size : count * (ranks.rank + 1) // ranks.size]


def _look_up(origin: Origin, wanted: Wants, deadline: Deadline) -> _Looked:
    looked = _Looked({}, [], 0)
    if not isinstance(origin, StoreOrigin) or not wanted:
        return looked
    numbers = {origin.manifest.blocks[number].id: number for number in wanted}
    doing = "asking where blocks lie"
    within_s = deadline.left(doing)
    best = _best(origin.catalogue.placements(list(numbers), within_s=within_s))
    needed = {one.encoding.base for one in best.values() if one.encoding.base is not None}
    within_s = deadline.left(doing)
    found = origin.catalogue.placements(sorted(needed), within_s=within_s) if needed else {}
    bases = _best({block: standalone(places) for block, places in found.items()})
    for block, placement in best.items():
        number = numbers[block]
        looked.packs[number] = placement.pack.hex
        looked.stored_bytes += _stored_bytes(placement.encoding, wanted[number])
        base = bases.get(placement.encoding.base) if placement.encoding.base else None
        if base is not None:
            looked.stored_bytes += _stored_bytes(base.encoding, wanted[number])
    looked.bases = sorted({base.pack.hex for base in bases.values()})
    return looked


def _best(placements: Mapping[BlockId, Sequence[Placement]]) -> dict[BlockId, Placement]:
    """For each block the placement that a reader takes."""
    return {
        block: min(standalone(places) or places, key=lambda one: one.encoding.stored_bytes)
        for block, places in placements.items()
        if places
    }


def _stored_bytes(encoding: Encoding, runs: Iterable[tuple[int, int]]) -> int:
    return sum(encoding.chunk_span(first, end)[1] for first, end in runs)


def _locate(origin: Origin, packs: Sequence[str]) -> bytes:
    found: list[Location] = []
    if isinstance(origin, StoreOrigin):
        store, locations = origin.store, learned_of(origin.store).locations

        def locate(pack: str) -> None:
            path = layout.pack(PackId(pack))
            with suppress(Retryable, Damaged):
                found.append(locations.get(path) or locations.ask(store, path))

        run_together(_LOCATING, "weightyard-locate", [partial(locate, one) for one in packs])
    return located.to_json("0", found)


def _told_locations(said: bytes) -> Iterable[Location]:
    try:
        return located.from_json(said).locations.values()
    except RegistryUnavailable as why:
        raise unreadable(why) from None


def _place(origin: Origin, replicas: Iterable[Replica]) -> Place:
    if not isinstance(origin, StoreOrigin):
        return Place()
    said = origin.settings.location if origin.settings is not None else None
    return learned_of(origin.store).whereabouts.place(replicas, said)
