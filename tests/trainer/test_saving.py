"""When checkpoints are due, and saves beside the training."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training import RUN
from waiting import SOON_S, eventually

from weightyard.errors import BadSetting, StoreUnavailable
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.trainer.job import Job
from weightyard.trainer.saving import Leaving, Save, Saver, Schedule, quiet_alone
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard


def test_a_checkpoint_is_due_by_steps_by_time_or_both() -> None:
    now = [0.0]
    schedule = Schedule(3, 10.0, lambda: now[0])
    assert [step for step in range(1, 8) if schedule.is_due_by_step(step)] == [3, 6]
    now[0] = 9.0
    assert not schedule.is_due_by_time()
    now[0] = 10.0
    assert schedule.is_due_by_time()
    schedule.saved()
    assert not schedule.is_due_by_time()
    never = Schedule(None, None)
    assert not never.is_due_by_step(0)
    assert not never.is_due_by_time()


@pytest.mark.parametrize("given", [(0, None), (None, 0.0), (-1, None)])
def test_an_interval_of_nothing_is_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(BadSetting, match="interval"):
        Schedule(*given)


def test_a_signal_is_noted_and_a_later_one_does_what_it_did_before() -> None:
    now = [100.0]
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        leaving = Leaving([signal.SIGUSR1], lambda: now[0])
        assert not leaving.is_asked
        os.kill(os.getpid(), signal.SIGUSR1)
        assert leaving.is_asked
        now[0] += 4.9  # by another of those who end the job, at the same time
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not heard
        now[0] += 0.2
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        with pytest.raises(SystemExit) as left:
            leaving.leave()
        assert left.value.code == 128 + signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_named_twice_does_in_the_end_what_it_did_before() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Leaving([signal.SIGUSR1, signal.SIGUSR1]):
        assert signal.getsignal(signal.SIGUSR1) is not before
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "store"), settings=settings) as opened:
        yield opened


class Gate(YardWriter):
    """Lets a save go on when it is told to, or fails it."""

    def __init__(self, yard: Yard) -> None:
        super().__init__(yard, RUN)
        self.entered, self.opened = threading.Event(), threading.Event()
        self.opened.set()
        self.error: Exception | None = None
        self.under_way = self.most_under_way = 0
        self.memory: list[int] = []

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.memory += [
            planner.resolve_data(item).data_ptr() for item in plan.items if item.tensor_data
        ]
        self.entered.set()
        assert self.opened.wait(SOON_S)
        self.under_way -= 1
        if self.error is not None:
            raise self.error
        return super().write_data(plan, planner)


Made = tuple[Gate, Saver, list[int]]


@pytest.fixture
def background(yard: Yard) -> Iterator[Callable[[], Made]]:
    with Gate(yard) as gate:

        def make() -> Made:
            committed: list[int] = []
            saver = Saver(gate, Job(), lambda: committed.append(1), in_background=True)
            return gate, saver, committed

        yield make
        gate.opened.set()


def test_what_is_saved_in_the_background_is_what_was_there_when_it_began(
    yard: Yard, background: Callable[[], Made]
) -> None:
    gate, saver, committed = background()
    weight = torch.ones(20_000)
    gate.opened.clear()
    with saver:
        saver.save(Save(1, {"weight": weight}, {"loss": 0.5}))
        assert gate.entered.wait(SOON_S)
        weight.add_(1)
        gate.opened.set()
    assert committed == [1]
    assert torch.equal(yard.load(f"{RUN}@step-1")["weight"], torch.ones(20_000))
    assert yard.resolve(f"{RUN}@step-1").metrics == {"loss": 0.5}


def test_one_save_is_under_way_and_all_use_the_same_memory(
    background: Callable[[], Made],
) -> None:
    gate, saver, committed = background()
    weight = torch.ones(20_000)
    with saver:
        for step in range(1, 4):
            weight.add_(1)
            saver.save(Save(step, {"weight": weight}, {}))
    assert gate.most_under_way == 1
    assert committed == [1, 1, 1]
    assert len(set(gate.memory)) == 1
    assert weight.data_ptr() not in gate.memory


def test_what_fails_in_the_background_is_raised_once_by_the_next_look(
    yard: Yard, background: Callable[[], Made]
) -> None:
    gate, saver, committed = background()
    gate.opened.clear()
    gate.error = StoreUnavailable("gone")
    with saver:
        saver.save(Save(1, {"weight": torch.ones(3)}, {}))
        saver.check(saver.failed)  # it goes on: nothing to raise yet
        gate.opened.set()
        with pytest.raises(StoreUnavailable, match="gone"):
            eventually(lambda: saver.check(saver.failed))
        assert saver.step is None
        saver.check(saver.failed)
        gate.error = None
        saver.save(Save(2, {"weight": torch.ones(3)}, {}))
    assert committed == [1]
    assert [one.step for one in yard.versions(RUN)] == [2]


def test_closing_ends_the_save_under_way_and_raises_what_it_failed_of(
    background: Callable[[], Made],
) -> None:
    gate, saver, committed = background()
    gate.error = StoreUnavailable("gone")
    saver.save(Save(1, {"weight": torch.ones(3)}, {}))
    with pytest.raises(StoreUnavailable, match="gone"):
        saver.close()
    assert not committed


def test_torchs_warning_to_a_process_alone_is_silenced_by_one_filter_for_good() -> None:
    with warnings.catch_warnings():
        quiet_alone()
        filters = list(warnings.filters)
        quiet_alone()
        assert warnings.filters == filters
        warnings.simplefilter("error", append=True)
        warnings.warn("torch.distributed is disabled, unavailable or …", stacklevel=1)
