"""Job: the ranks that train together, or a process alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from weightyard.closing import Closing
from weightyard.errors import RankFailed
from weightyard.loader.peers import DONE, SLICE_S, Alone, Peers, Ranks, tell_until_done
from weightyard.storage.deadline import Deadline

_Told = TypeVar("_Told")


class Job(Closing):
    """All ranks of the default group, which all make this and call it in the same order.

    It has groups of its own, over gloo: what is saved in the background must not meet the
    collectives of the training. Where there is no default group the process is alone.
    """

    def __init__(self) -> None:
        self.rank, self.ranks = 0, 1
        self.group: dist.ProcessGroup | None = None
        """For saving and loading checkpoints."""
        self.patience_s = 0.0
        """How long ranks wait for each other: one may still build or compile what it trains."""
        self._wishes: _Wishes | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
            patience = _patience()
            self.patience_s = patience.total_seconds()
            self.group = _new_group(patience)
            self._wishes = _Wishes(_new_group(patience))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, step: Callable[[], _Told], doing: str) -> _Told:
        """The result of the first rank's step, a value of JSON, told to all.

        Raises what it raises; on the others, RankFailed.
        """

        def told() -> bytes:
            return json.dumps(step()).encode() if self.is_first else b""

        answer: _Told = json.loads(self._others().tell(told, doing)[0])
        return answer

    def all(self, step: Callable[[], _Told], doing: str) -> list[_Told]:
        """The results of every rank's step, values of JSON, told to all. Raises as `each`."""
        told = self._others().tell(lambda: json.dumps(step()).encode(), doing)
        return [json.loads(one) for one in told]

    def each(self, step: Callable[[], _Told], doing: str) -> _Told:
        """The result of this rank's step, once all have done theirs.

        Raises what it raises, and RankFailed if another rank's failed: no rank goes on alone.
        """
        answers: list[_Told] = []

        def done() -> bytes:
            answers.append(step())
            return b""

        self._others().tell(done, doing)
        return answers[0]

    def at_length(self, step: Callable[[], _Told], doing: str) -> _Told:
        """As `each`, for a step that may take longer than ranks wait for a silent one."""
        if self.group is None:
            return step()
        with ThreadPoolExecutor(1, "weightyard-step") as beside:
            begun = beside.submit(step)

            def go_on() -> bytes:
                wait([begun], SLICE_S)
                if not begun.done():
                    return b""
                begun.result()  # raises its error
                return DONE

            tell_until_done(self._others(), go_on, doing)
        return begun.result()

    def together(self, step: Callable[[], _Told], doing: str) -> _Told:
        """As `each`, but exchanges only one number: cheap enough for every save, and says less."""
        failure: BaseException | None = None
        answers: list[_Told] = []
        try:
            answers.append(step())
        except Exception as why:  # noqa: BLE001  raised when the others know of it
            failure = why
        if self.group is not None:
            failed = torch.tensor([failure is not None], dtype=torch.int32)
            try:
                dist.all_reduce(failed, dist.ReduceOp.MAX, self.group)
            except RuntimeError as why:
                raise RankFailed([], f"{doing}: some rank did not answer: {why}") from why
            if failure is None and failed.item():
                raise RankFailed([], f"{doing}: another rank failed, which says why")
        if failure is not None:
            raise failure
        return answers[0]

    def any_wish(self, *wishes: int) -> list[int]:
        """For each wish, the greatest value of any rank at the last step; alone: the wishes now.

        0 wishes nothing. All ranks get the same answer at the same step, and none waits for
        another: the wishes of a step travel while the next one is computed. Raises RankFailed.
        """
        return list(wishes) if self._wishes is None else self._wishes.exchanged(wishes)

    def _others(self) -> Ranks:
        if self.group is None:
            return Alone()
        return Peers(self.group, Deadline.after(None), self.patience_s)

    def close(self) -> None:
        if self._wishes is not None:
            self._wishes.close()
            dist.destroy_process_group(self.group)
            self.group = self._wishes = None


def _new_group(patience: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=patience)
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


def _patience() -> timedelta:
    """How long ranks wait for each other: as long as in the training, if that was given more time.

    torch's new groups do not take that over, and the first rank may evaluate for an hour between
    two steps.
    """
    training = dist.group.WORLD
    assert training is not None
    options = [
        getattr(training._get_backend(one), "options", None) for one in training._device_types
    ]
    given: list[timedelta] = [one._timeout for one in options if one is not None]
    return max([default_pg_timeout, *given])


class _Wishes(Closing):
    """One small collective for each step, begun in it and ended in the next."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._travelling: tuple[torch.Tensor, dist.Work] | None = None

    def exchanged(self, wishes: tuple[int, ...]) -> list[int]:
        try:
            heard = self._heard()
            # What all ranks are granted in this step is not wished once more in it.
            still = [0 if heard and heard[at] else wish for at, wish in enumerate(wishes)]
            wished = torch.tensor(still, dtype=torch.int32)
            work = dist.all_reduce(wished, dist.ReduceOp.MAX, self._group, async_op=True)
        except RuntimeError as why:
            raise RankFailed([], f"some rank did not answer in a step: {why}") from why
        assert work is not None
        self._travelling = (wished, work)
        return [0] * len(wishes) if heard is None else heard

    def _heard(self) -> list[int] | None:
        if self._travelling is None:
            return None
        wished, work = self._travelling
        self._travelling = None
        work.wait()
        return [int(wish) for wish in wished]

    def close(self) -> None:
        dist.destroy_process_group(self._group)
