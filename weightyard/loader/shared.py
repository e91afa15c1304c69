"""Loading by a group: its ranks read one copy of what they want together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from weightyard.loader import peers
from weightyard.loader.asked import Asked
from weightyard.loader.finding import unreadable
from weightyard.loader.joint import Planned, read_jointly
from weightyard.loader.load import Weights, plan
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.peers import DONE, Peers, Ranks, tell_until_done
from weightyard.loader.placing import device_of
from weightyard.records import RememberedVersion, Version
from weightyard.storage.cancel import Cancel

if TYPE_CHECKING:
    import torch

_VERSION: TypeAdapter[Version] = TypeAdapter(RememberedVersion | Version)
"""Offline, the first rank remembers a version; so the others know how old that is."""


def load_shared(
    ranks: Ranks,
    resolve: Callable[[], Version],
    origin_of: Callable[[Version, Asked], Origin],
    asked: Asked,
    device: Any,
) -> Weights:
    """Load what each rank asks for; all ranks together read one copy of the store's bytes.

    The first rank says which version a ref means. Raises RankFailed if another rank fails.
    """
    version = _resolved(ranks, resolve)
    origin = _found(ranks, lambda asked: origin_of(version, asked), asked)
    mine: list[Planned] = []
    found: dict[int, torch.Tensor] = {}

    def prepare() -> Planned:
        to = Destination(device_of(device))
        mine.append(Planned(origin, asked, to, plan(origin, asked)))
        return mine[0]

    joint = read_jointly(ranks, prepare, found.__setitem__)
    planned = mine[0]
    report = planned.origin.report(
        planned.to.device,
        ranks=ranks.size,
        received_bytes=joint.received_bytes,
        group_bytes=joint.wanted_bytes,
        group_read_bytes=joint.read_bytes,
    )
    tensors = {name: found[at] for at, one in enumerate(planned.plans) for name in one.names}
    return Weights(tensors, planned.origin, report)


def asked_together(ranks: Peers, ask: Callable[[], Asked]) -> Asked:
    """What this rank asks for, once all ranks know that their own arguments are right.

    A rank whose arguments are wrong would otherwise raise alone, and the others wait for it.
    """
    found: list[Asked] = []

    def say() -> bytes:
        found.append(ask())
        ranks.deadline = found[0].deadline  # holds for this meeting already
        return b""

    ranks.tell(say, "meeting")
    return found[0]


def _resolved(ranks: Ranks, resolve: Callable[[], Version]) -> Version:
    """The version that the first rank says a ref means."""
    found: list[Version] = []

    def first() -> bytes:
        if ranks.rank != 0:
            return b""
        found.append(resolve())
        return found[0].model_dump_json().encode()

    said = ranks.tell(first, "resolving")[0]
    return found[0] if found else told_version(said)


def _found(ranks: Ranks, find: Callable[[Asked], Origin], asked: Asked) -> Origin:
    """Where this rank's tensors come from, once every rank has found that out.

    A node that does not reach the store brings the whole version first, which takes longer than
    others wait for a silent rank. So meanwhile this rank tells them that it is there.
    """
    stop = Cancel()
    asked = replace(asked, deadline=replace(asked.deadline, cancel=stop))
    pool = ThreadPoolExecutor(1, "weightyard-load")
    finding = pool.submit(find, asked)

    def go_on() -> bytes:
        wait([finding], peers.SLICE_S)
        if not finding.done():
            return b""
        finding.result()
        return DONE

    try:
        tell_until_done(ranks, go_on, "planning")
    finally:
        stop.cancel()
        pool.shutdown()
    return finding.result()


def told_version(said: bytes) -> Version:
    """A version as another rank has it, in JSON. Raises Refused."""
    try:
        return _VERSION.validate_json(said)
    except ValidationError as why:
        raise unreadable(why) from None
