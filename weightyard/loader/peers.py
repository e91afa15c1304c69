"""Peers: the ranks of a process group that load together. They fail together too, and say why."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from weightyard.errors import RankFailed, Refused, TooLarge, Unsupported, YardError
from weightyard.format.block import MIB
from weightyard.logs import Log
from weightyard.storage.deadline import NEVER, Deadline

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_log = Log(__name__)

MEET_S = 600.0
"""How long the others are waited for at first, if the load has no shorter deadline: they may still
be busy with something else."""

WAIT_S = 120.0
"""How long from then on. What they do meanwhile, a few reads, has shorter deadlines."""

GRACE_S = 2.0
"""How much longer than the deadline, so that a rank whose time is up can say so."""

SLICE_S = 1.0
"""How long a rank goes on by itself before it tells the others that it is there: shorter than they
wait for it when they find that another one is gone."""

DONE = b"done"

ROLL_CALL_S = 3.0
"""When a rank is gone: how long after one answer the next of those left may come."""

ALONE_S = 10.0
"""How long the first answer of several may take."""

MAX_SAID_BYTES = 256 * MIB
"""No rank has more to say: what it wants of a version is a few bytes for each chunk at most."""

_HEADER = struct.Struct("<qq496s")
"""How many bytes follow; the length of the text, and the text, which says what failed."""

_POLL_S = 0.05
_calls: dict[str, itertools.count[int]] = {}


@dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes for a rank, or from it."""

    rank: int
    memory: memoryview


class Ranks(Protocol):
    """The ranks that load together. All call the same methods, in the same order."""

    rank: int
    size: int

    def tell(self, step: Callable[[], bytes], doing: str) -> list[bytes]:
        """Do something, and hear what every rank has to say of it, in the order of ranks."""

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel], doing: str) -> None:
        """Send and receive, all at once. What two ranks exchange matches in order and length."""


class Alone:
    """The only rank there is: it has nobody to tell or to ask."""

    rank, size = 0, 1

    def tell(self, step: Callable[[], bytes], doing: str) -> list[bytes]:
        return [step()]

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel], doing: str) -> None:
        pass


def tell_until_done(ranks: Ranks, go_on: Callable[[], bytes], doing: str) -> None:
    """Have each rank go on by itself, for SLICE_S at a time, until all of them say DONE."""
    while any(said != DONE for said in ranks.tell(go_on, doing)):
        pass


class Peers:
    """The ranks of a group, in one load.

    Ranks go by their numbers in the group; errors name them by their numbers in the world.
    """

    def __init__(self, group: Any, deadline: Deadline = NEVER, meet_s: float | None = None) -> None:
        """`meet_s`: instead of MEET_S.

        Raises Unsupported for what is no group, or none of this rank's.
        """
        import torch
        import torch.distributed as dist

        if not isinstance(group, dist.ProcessGroup):
            raise Unsupported(f"group= takes a torch.distributed group, not {type(group).__name__}")
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        kinds = [one.partition(":")[0] for one in dist.get_backend_config(group).split(",")]
        # Bytes pass a device only if the group has no backend for host memory.
        self._device = torch.device("cpu")
        if "cpu" not in kinds:
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is None:
                raise Unsupported(f"group= of {', '.join(kinds)}, and there is none of these here")
            self._device = accelerator
        self.deadline = deadline
        """Until when the others are waited for, at most."""
        self._wait_s = MEET_S if meet_s is None else meet_s
        # All ranks of a group make the same loads, so they number them alike.
        self._call = next(_calls.setdefault(group.group_name, itertools.count()))

    def tell(self, step: Callable[[], bytes], doing: str) -> list[bytes]:
        """Do something, and hear what every rank has to say of it, in the order of ranks.

        If it fails on one rank, that raises what the step raised and all others RankFailed; all can
        go on to use the group.
        """
        said, failure = b"", None
        try:
            self.deadline.left(doing)
            said = step()
            if len(said) > MAX_SAID_BYTES:
                raise TooLarge(f"{doing}: {len(said)} bytes to tell; at most {MAX_SAID_BYTES}")
        except BaseException as why:  # noqa: BLE001  raised when the others know of it
            failure = why
        headers = [_memory(_HEADER.size) for _ in range(self.size)]
        headers[self.rank][:] = _header(len(said), failure)
        self.swap(
            [Parcel(rank, headers[self.rank]) for rank in self._others],
            [Parcel(rank, headers[rank]) for rank in self._others],
            doing,
        )
        self._wait_s = WAIT_S
        if failure is not None:
            raise failure
        lengths = self._checked(headers)
        answers = [_memory(length) for length in lengths]
        answers[self.rank][:] = said
        self.swap(
            [Parcel(rank, answers[self.rank]) for rank in self._others],
            [Parcel(rank, answers[rank]) for rank in self._others],
            doing,
        )
        return [bytes(answer) for answer in answers]

    def swap(self, sends: Sequence[Parcel], receives: Sequence[Parcel], doing: str) -> None:
        """Send and receive, all at once. What two ranks exchange matches in order and length.

        Raises RankFailed, naming who did not answer; the group is then of no use any more.
        """
        import torch
        import torch.distributed as dist

        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        operations: list[dist.P2POp] = []
        for operation, parcels in ((dist.isend, sends), (dist.irecv, receives)):
            for parcel in parcels:
                if not parcel.memory.nbytes:
                    continue
                host = torch.from_numpy(np.frombuffer(parcel.memory, np.uint8))
                there = host.to(self._device)  # itself, where that is the host
                if operation is dist.irecv:
                    arriving.append((host, there))
                operations.append(
                    dist.P2POp(operation, there, group=self._group, group_peer=parcel.rank)
                )
        if not operations:
            return
        waited_for: int | None = None
        try:
            for peer, work in self._begun(operations):
                waited_for = peer
                work.wait(self._patience)
        except RuntimeError as why:
            self._blame(waited_for, doing, why)
        for host, there in arriving:
            if there is not host:
                host.copy_(there)

    def _begun(self, operations: list[dist.P2POp]) -> Iterator[tuple[int | None, Any]]:
        """Begin operations; gives for each its peer and its work. Raises RuntimeError at the end.

        One that fails at once, with a rank that is gone, must not keep the others from being begun:
        the ranks that are left would wait for this one, and not notice who is gone.
        """
        import torch.distributed as dist

        if self._device.type != "cpu":  # there they must be begun together
            works = dist.batch_isend_irecv(operations)
            is_each = len(works) == len(operations)
            for one, work in zip_longest(operations if is_each else [], works):
                yield None if one is None else one.group_peer, work
            return
        begun: list[tuple[int, Any]] = []
        failed: RuntimeError | None = None
        for one in operations:
            side = "group_dst" if one.op is dist.isend else "group_src"
            try:
                work = one.op(one.tensor, group=one.group, **{side: one.group_peer})
            except RuntimeError as why:
                failed = failed or why
            else:
                begun.append((one.group_peer, work))
        if failed is not None:
            raise failed
        yield from begun

    @property
    def _patience(self) -> timedelta:
        """A rank whose time is up still has to hear it from, or say it to, the others."""
        left_s = max(0.0, self.deadline.at - time.monotonic())
        return timedelta(seconds=min(self._wait_s, left_s + GRACE_S))

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _checked(self, headers: Sequence[memoryview]) -> list[int]:
        lengths = []
        for rank, header in enumerate(headers):
            length, text_bytes, text = _HEADER.unpack(header)
            if text_bytes:
                said = text[: max(0, text_bytes)].decode(errors="replace")
                raise RankFailed([self._name(rank)], said)
            if not 0 <= length <= MAX_SAID_BYTES:
                raise Refused(f"rank {self._name(rank)} has {length} bytes to say: too many")
            lengths.append(length)
        return lengths

    def _blame(self, waited_for: int | None, doing: str, why: RuntimeError) -> NoReturn:
        """One connection that breaks breaks others, so who is gone is found by a roll call."""
        missing = self._missing()
        if not missing and waited_for is not None:
            missing = [waited_for]
        names = [self._name(rank) for rank in missing]
        _log.warning("group.broken", missing=names, doing=doing, reason=str(why)[:200])
        reason = f"did not answer while {doing}; the group is broken: {str(why)[:200]}"
        raise RankFailed(names, reason) from why

    def _missing(self) -> list[int]:
        """The ranks that do not answer in the store by which the group was made."""
        keys = [f"weightyard/{self._call}/{rank}" for rank in range(self.size)]
        here = {self.rank}
        try:
            store = self._group.get_group_store()
            store.set(keys[self.rank], "here")
            # That all others are gone is less likely than that they are slow to notice.
            until = time.monotonic() + (ROLL_CALL_S if self.size == 2 else ALONE_S)
            while len(here) < self.size and time.monotonic() < until:
                came = {one for one in self._others if store.check([keys[one]])} - here
                if came:
                    here |= came
                    until = time.monotonic() + ROLL_CALL_S
                time.sleep(_POLL_S)
        except RuntimeError as why:
            # The rank that keeps the store may have left before us, or be the one that is gone.
            _log.warning("group.no_store", reason=str(why)[:200])
            if len(here) == 1:
                return []
        return [rank for rank in self._others if rank not in here]

    def _name(self, rank: int) -> int:
        import torch.distributed as dist

        return dist.get_global_rank(self._group, rank)


def _memory(length: int) -> memoryview:
    return np.empty(length, np.uint8).data


def _header(length: int, failure: BaseException | None) -> bytes:
    text = b""
    if failure is not None:
        kind = failure.code if isinstance(failure, YardError) else type(failure).__name__
        text = f"{kind}: {failure}".encode(errors="replace")[:496]
    return _HEADER.pack(length, len(text), text)
