"""Saving: when a checkpoint is due, and the one save that may be under way beside the training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from weightyard.closing import Closing
from weightyard.errors import BadSetting, RankFailed, YardError
from weightyard.logs import Log
from weightyard.trainer.job import Job
from weightyard.trainer.packing import Items
from weightyard.trainer.planner import ITEMS, PlannerOfItems
from weightyard.trainer.staging import Staging
from weightyard.trainer.writer import YardWriter
from weightyard.transfer.options import require_whole

_log = Log(__name__)

_BEHIND = 5
"""Niceness of a save in the background: of a core that training wants too it gets a quarter."""


class Schedule:
    """When a checkpoint is due: every so many steps, every so many seconds, or both.

    By steps all ranks know it; by time only the first rank says it, since clocks differ.
    """

    def __init__(
        self,
        interval: int | None,
        interval_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises BadSetting."""
        if interval is not None:
            require_whole("interval", interval, 1)
        if interval_s is not None and not (isinstance(interval_s, int | float) and interval_s > 0):
            raise BadSetting(f"interval_s={interval_s!r:.80}: a number over 0, or None")
        self._interval, self._interval_s = interval, interval_s
        self._clock = clock
        self._began = clock()

    def is_due_by_step(self, step: int) -> bool:
        return self._interval is not None and step % self._interval == 0

    def is_due_by_time(self) -> bool:
        return self._interval_s is not None and self._clock() - self._began >= self._interval_s

    def saved(self) -> None:
        """The time begins anew."""
        self._began = self._clock()


_SAME_WISH_S = 5.0
"""A signal this soon after the first is the same request: systemd sends one to every process of a
job, and torchrun hands its own on to the ranks."""


class Leaving(Closing):
    """Whether this process was asked to end by a signal. One that comes later ends it at once."""

    def __init__(
        self, signals: Sequence[signal.Signals], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises BadSetting for what cannot be handled, such as SIGKILL."""
        self.number: int | None = None
        """The signal's."""
        self._clock = clock
        self._asked_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():  # Python allows it no other
            return
        try:
            for one in signals:
                before = signal.signal(one, self._noted)
                self._before.setdefault(one, before)  # if one is named twice, what was there first
        except (TypeError, ValueError, OSError) as why:
            self.close()
            raise BadSetting(
                f"signals={signals!r:.80}: a list of those that can be handled ({why})"
            ) from None

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._asked_at = number, self._clock()
        elif self._clock() - self._asked_at > _SAME_WISH_S:
            self.close()
            signal.raise_signal(number)

    @property
    def is_asked(self) -> bool:
        return self.number is not None

    def leave(self) -> NoReturn:
        """End the process with a signal's exit code, so that its launcher may start it again."""
        raise SystemExit(128 + (self.number or signal.SIGTERM))

    def close(self) -> None:
        """Let signals do what they did before."""
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint to be made."""

    step: int
    items: Items
    metrics: Mapping[str, float]


class Saver(Closing):
    """Makes checkpoints, one at a time; in the background if asked to.

    A save in the background first copies this rank's state to host memory, always the same: so no
    more than one is under way. All ranks call `save` and `wait` in the same order.
    """

    def __init__(
        self,
        writer: YardWriter,
        job: Job,
        committed: Callable[[], None],
        *,
        in_background: bool,
    ) -> None:
        """`committed` is called by the first rank after each commit, in the thread of the save."""
        self._writer = writer
        self._job = job
        self._committed = committed
        self._planner = PlannerOfItems()
        self._staging: Staging | None = None
        self._thread: ThreadPoolExecutor | None = None
        if in_background:
            self._staging = Staging()
            self._thread = ThreadPoolExecutor(1, "weightyard-save", initializer=_step_behind)
        self._under_way: Future[None] | None = None
        self._begun = 0  # saves in the background; all ranks count alike
        self._raised = 0  # the last of them whose failure was raised
        self.step: int | None = None
        """The step of the last checkpoint, which may be under way; None if it failed."""

    @property
    def failed(self) -> int:
        """The last save in the background that failed on this rank, counted from 1; 0: none."""
        ended = self._under_way if self._under_way is not None and self._under_way.done() else None
        return self._begun if ended is not None and ended.exception() else self._raised

    def save(self, save: Save) -> None:
        """Make a checkpoint; in the background: begin it, when the one before has ended.

        Raises what saving raises, also the one before; RankFailed where another rank failed.
        """
        self.wait()
        self.step = None
        if self._staging is None or self._thread is None:
            self._write(save)
        else:
            self._begun += 1
            copied = Save(save.step, self._staging.copied(save.items), save.metrics)
            self._under_way = self._thread.submit(self._write, copied)
        self.step = save.step

    def check(self, failed: int) -> None:
        """Raise the error of a save in the background, once; `failed`: the last on any rank.

        Raises RankFailed if it did not fail on this rank.
        """
        if failed > self._raised:
            self.wait()
            self._raised, self.step = failed, None
            raise RankFailed([], "the save of another rank failed, which says why")

    def wait(self) -> None:
        """Wait until nothing is under way. Raises the save's error, once."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            try:
                under_way.result()
            except BaseException:
                self._raised, self.step = self._begun, None
                raise

    def close(self) -> None:
        """Let the save under way end first. Raises its error."""
        try:
            self.wait()
        finally:
            if self._thread is not None and self._staging is not None:
                self._thread.shutdown()
                self._staging.close()
            self._thread = self._staging = None

    def _write(self, save: Save) -> None:
        began = time.monotonic()
        self._writer.metrics = dict(save.metrics)
        if self._job.group is None:
            quiet_alone()
        try:
            with plain_errors():
                save_checkpoint(
                    {ITEMS: save.items},
                    checkpoint_id=f"step-{save.step}",
                    storage_writer=self._writer,
                    planner=self._planner,
                    process_group=self._job.group,
                    no_dist=self._job.group is None,
                )
        finally:
            self._planner.forget()
        if self._job.is_first:
            _log.info("run.saved", step=save.step, seconds=round(time.monotonic() - began, 3))
            self._committed()


def _step_behind() -> None:
    """Let training go first where cores are scarce: this thread, and those it will start.

    Only Linux has a niceness of each thread; elsewhere it would be that of the process.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _BEHIND)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the error that torch's CheckpointException wraps: the same on all ranks."""
    try:
        yield
    except CheckpointException as why:
        failures = sorted(why.failures.items())
        known = [error for _, (error, _) in failures if isinstance(error, YardError)]
        for error in sorted(known, key=lambda error: isinstance(error, RankFailed)):
            raise error from why  # rather one that says what happened
        reason = "; ".join(f"{type(error).__name__}: {error}" for _, (error, _) in failures[:3])
        raise RankFailed([rank for rank, _ in failures], reason) from why


def quiet_alone() -> None:
    """Have torch not warn a single process that it is alone.

    For good: all threads share the warning filters, and putting them back as they were would undo
    what another thread changed meanwhile.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
