"""Runs of a process alone: what is saved, resumed and kept."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_world import on_store
from training import RUN, Counter, Numbered, as_bytes, packs, setting, spoil, steps_of, train
from waiting import SOON_S

from weightyard.errors import (
    Damaged,
    DoesNotFit,
    NoSuchThing,
    NotAllowed,
    RunTakenOver,
    StoreUnavailable,
)
from weightyard.names import ModelName, Ref
from weightyard.opening import open_yard
from weightyard.records import KeepBest, Retention
from weightyard.settings import Settings
from weightyard.storage.retry import Retry, RetryingStore
from weightyard.testing.faults import Fault, FaultyStore
from weightyard.trainer.run import TrainRun
from weightyard.trainer.values import save_values
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard


class Extra(nn.Module):
    """Keeps something besides its tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "store"), settings=settings) as opened:
        yield opened


def steps_in(yard: Yard, run: str = RUN) -> list[int | None]:
    return [one.step for one in yard.versions(run)]


@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_resumed_run_equals_one_that_was_never_interrupted(
    yard: Yard, tmp_path: Path, async_mode: str, own_generator: bool
) -> None:
    options: dict[str, Any] = {"interval": 4, "own_generator": own_generator}
    begun = train(yard, 5, async_mode=async_mode, **options)
    resumed = train(yard, 22, async_mode=async_mode, **options)  # into the second epoch
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "whole"), settings=settings) as other:
        whole = train(other, 22, interval=100, own_generator=own_generator)
    assert (begun.resumed, resumed.resumed, whole.resumed) == (None, 4, None)
    assert {**begun.losses, **resumed.losses} == whole.losses
    assert {**begun.samples, **resumed.samples} == whole.samples
    assert resumed.weights == whole.weights


def test_a_store_that_fails_now_and_then_changes_nothing_of_the_training(
    yard: Yard, tmp_path: Path
) -> None:
    """Waits before another try are of random length, and must not draw on the job's numbers."""
    faulty = FaultyStore(yard.store, dict.fromkeys(range(0, 10_000, 11), Fault.BEFORE))
    patient = RetryingStore(faulty, Retry(30.0, 0.001, 0.01))
    with on_store(yard, patient) as failing:
        trained = train(failing, 8, interval=2)
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "whole"), settings=settings) as other:
        assert trained == train(other, 8, interval=2)
    assert len(faulty.calls) > 22  # some of them failed


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
@pytest.mark.parametrize(("async_mode", "is_behind"), [("async", True), ("disabled", False)])
def test_a_save_in_the_background_lets_the_training_go_first(
    yard: Yard, async_mode: str, is_behind: bool
) -> None:
    niceness: set[int] = set()
    watched = FaultyStore(
        yard.store, on_call=lambda index, name: niceness.add(os.getpriority(os.PRIO_PROCESS, 0))
    )
    with on_store(yard, watched) as seen:
        train(seen, 2, interval=2, async_mode=async_mode)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert (max(niceness) > own) == is_behind


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_numbers_that_a_loader_draws_to_find_its_place_are_not_missed_later(
    yard: Yard, tmp_path: Path
) -> None:
    def losses(yard: Yard, until: int) -> dict[int, float]:
        made = setting()
        loader = StatefulDataLoader(Numbered(), batch_size=2, sampler=made.sampler)
        came = {}
        with TrainRun(yard, RUN, {**made.state, "data": loader}, interval=4) as run:
            run.resume()
            while run.steps < until:
                for _, batch in islice(loader, until - run.steps):
                    loss = made.net(batch).square().mean()
                    loss.backward()
                    made.optimizer.step()
                    made.optimizer.zero_grad()
                    made.scheduler.step()
                    came[run.steps + 1] = loss.item()
                    run.step()
        return came

    resumed = {**losses(yard, 6), **losses(yard, 22)}
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "whole"), settings=settings) as other:
        assert resumed == losses(other, 22)


def test_making_a_run_changes_nothing_of_the_training(yard: Yard) -> None:
    made = setting()
    plain = [float(torch.rand(())) for _ in range(3)]
    made = setting()
    with TrainRun(yard, RUN, made.state, interval=None) as run:
        assert not made.optimizer.state
        assert [float(torch.rand(())) for _ in range(3)] == plain
        run.save()
        assert not made.optimizer.state
    with pytest.raises(NoSuchThing):
        yard.resolve("team/other")
    assert steps_in(yard) == [0]


def test_an_optimizer_that_had_not_stepped_has_no_state_after_a_resume(yard: Yard) -> None:
    made = setting()
    with TrainRun(yard, RUN, made.state) as run:
        run.save()
    again = setting()
    with TrainRun(yard, RUN, again.state) as run:
        assert run.resume() == 0
        assert not any(again.optimizer.state.values())
        losses = [loss for loss, _ in steps_of(again, run, 3)]
    never = setting()
    with TrainRun(yard, "team/other", never.state) as run:
        assert [loss for loss, _ in steps_of(never, run, 3)] == losses


def test_parameters_without_state_of_the_optimizer_stay_without(yard: Yard) -> None:
    def made() -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(1)
        net = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
        return net, torch.optim.Adam(net.parameters())

    net, optimizer = made()
    with TrainRun(yard, RUN, {"model": net, "optim": optimizer}) as run:
        net["used"](torch.ones(4)).sum().backward()
        optimizer.step()
        run.step()
        run.save()
    again, fresh = made()
    with TrainRun(yard, RUN, {"model": again, "optim": fresh}) as run:
        run.resume()
    assert {int(one["step"]) for one in fresh.state.values() if one} == {1}
    assert not fresh.state[again["idle"].weight]
    before = optimizer.state[net["used"].weight]["exp_avg"]
    assert torch.equal(fresh.state[again["used"].weight]["exp_avg"], before)


def test_an_optimizer_that_takes_no_dense_gradients_is_resumed(yard: Yard) -> None:
    def made() -> tuple[nn.Embedding, torch.optim.Optimizer]:
        torch.manual_seed(1)
        table = nn.Embedding(50, 8, sparse=True)
        return table, torch.optim.SparseAdam(list(table.parameters()))

    def step(table: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
        table(torch.tensor([3, 7])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    table, optimizer = made()
    with TrainRun(yard, RUN, {"model": table, "optim": optimizer}) as run:
        step(table, optimizer)
        run.step()
        run.save()
        step(table, optimizer)
    again, fresh = made()
    with TrainRun(yard, RUN, {"model": again, "optim": fresh}) as run:
        run.resume()
    step(again, fresh)
    assert as_bytes(again.state_dict()) == as_bytes(table.state_dict())


def test_a_step_and_parts_can_be_chosen_for_a_resume(yard: Yard) -> None:
    train(yard, 6, interval=2)
    made = setting()
    before = as_bytes(made.net.state_dict())
    excluded = ["model", "rng"]
    with TrainRun(yard, RUN, made.state, load_step=4, exclude_from_loading=excluded) as run:
        assert run.resume() == 4
    assert as_bytes(made.net.state_dict()) == before
    assert made.scheduler.last_epoch == 4
    with (
        TrainRun(yard, RUN, setting().state, load_step=5) as run,
        pytest.raises(NoSuchThing, match="step-5"),
    ):
        run.resume()


def test_what_a_resume_left_as_it_was_is_what_is_saved_and_published(yard: Yard) -> None:
    train(yard, 2, interval=2)
    made = setting()
    with torch.no_grad():
        made.net.out.weight.fill_(7.0)
    with TrainRun(yard, RUN, made.state, exclude_from_loading=["model"]) as run:
        assert run.resume() == 2
        run.publish("team/out")
    assert as_bytes(yard.load("team/out")) == as_bytes(made.net.state_dict())
    assert steps_in(yard) == [2, 2]
    with TrainRun(yard, RUN, setting().state) as run:
        run.resume()
        run.save()
    assert steps_in(yard) == [2, 2]  # what was loaded whole has its checkpoint


def test_after_a_step_back_the_newest_checkpoint_counts_not_the_highest_step(yard: Yard) -> None:
    train(yard, 6, interval=2)
    assert train(yard, 3, interval=3, load_step=2).resumed == 2
    assert train(yard, 4, interval=None).resumed == 3


def test_a_run_that_was_removed_begins_anew(yard: Yard) -> None:
    train(yard, 2, interval=2)
    yard.delete(f"{RUN}@step-2")
    yard.registry.remove_model(ModelName.parse(RUN))
    assert train(yard, 3, interval=3).resumed is None
    assert train(yard, 4, interval=None).resumed == 3


def test_a_job_that_names_no_rules_leaves_those_of_its_run(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    train(yard, 2, interval=2)
    rules = Retention(keep_last=2, ttl_s=0)
    yard.set_retention(RUN, rules)
    with caplog.at_level(logging.INFO, "weightyard"):
        train(yard, 8, interval=2)
    assert yard.catalogue.model(ModelName.parse(RUN)).retention == rules
    assert "run.rules_stay" in caplog.text
    assert steps_in(yard) == [8, 6, 4, 2]  # it lets none go by itself
    yard.catalogue.apply_retention(ModelName.parse(RUN))
    assert steps_in(yard) == [8, 6]


def test_a_job_that_names_rules_sets_those_of_its_run(yard: Yard) -> None:
    train(yard, 4, interval=2, keep_latest_k=1)
    assert steps_in(yard) == [4]
    train(yard, 8, interval=2, keep_latest_k=2)
    assert steps_in(yard) == [8, 6]


def test_a_checkpoint_that_lacks_something_says_what_to_do(yard: Yard) -> None:
    train(yard, 2, interval=2)
    state = {**setting().state, "extra": Counter()}
    with (
        TrainRun(yard, RUN, state) as run,
        pytest.raises(DoesNotFit, match=r"extra.*exclude_from_loading=\['extra'\]"),
    ):
        run.resume()
    other = {"model": nn.Linear(16, 1200)}
    with TrainRun(yard, RUN, other) as run, pytest.raises(DoesNotFit, match=r"model\.weight"):
        run.resume()


def test_a_tensor_of_another_dtype_than_the_saved_one_says_what_to_do_about_it(yard: Yard) -> None:
    train(yard, 2, interval=2)
    made = setting()
    made.net.bfloat16()
    advice = r"model\.wide\.weight .*float32 .*bfloat16 here.*before the TrainRun.*\['model'\]"
    with TrainRun(yard, RUN, made.state) as run, pytest.raises(DoesNotFit, match=advice):
        run.resume()


def test_a_tensor_where_an_object_was_saved_is_named(yard: Yard) -> None:
    with TrainRun(yard, RUN, {"extra": Extra(3)}) as run:
        run.step()
        run.save()
    with (
        TrainRun(yard, RUN, {"extra": Extra(torch.ones(3))}) as run,
        pytest.raises(DoesNotFit, match=r"extra\._extra_state"),
    ):
        run.resume()


def test_another_kind_of_generator_is_said_of_the_newest_checkpoint(yard: Yard) -> None:
    train(yard, 2, interval=1)
    before = np.random.get_bit_generator()
    made = setting()
    np.random.set_bit_generator(np.random.PCG64(4))
    try:
        with (
            TrainRun(yard, RUN, made.state) as run,
            pytest.raises(DoesNotFit, match=r"rng\.numpy.*MT19937.*PCG64.*\['rng'\]"),
        ):
            run.resume()
        with TrainRun(yard, RUN, made.state, exclude_from_loading=["rng"]) as run:
            assert run.resume() == 2
    finally:
        np.random.set_bit_generator(before)


def test_a_damaged_checkpoint_is_passed_over(yard: Yard) -> None:
    train(yard, 4, interval=2)
    newest = yard.resolve(RUN)
    yard.registry.database.write(
        lambda tx: tx.exec_driver_sql(
            "UPDATE versions SET damaged_ms = 1 WHERE number = ?", (newest.number,)
        )
    )
    assert train(yard, 3, interval=None).resumed == 2


@pytest.mark.parametrize("spoiled", [spoil, Path.unlink])
def test_a_resume_goes_on_from_the_newest_checkpoint_that_can_be_read(
    yard: Yard, caplog: pytest.LogCaptureFixture, spoiled: Callable[[Path], None]
) -> None:
    before: set[Path] = set()

    def note(step: int, run: TrainRun) -> None:
        before.update(packs(yard) if step == 3 else ())

    whole = train(yard, 4, interval=2, on_step=note)
    for pack in packs(yard) - before:
        spoiled(pack)
    with (
        TrainRun(yard, RUN, setting().state, load_step=4) as run,
        pytest.raises(Damaged),
    ):
        run.resume()  # what was asked for is not replaced
    resumed = train(yard, 4, interval=None)
    assert resumed.resumed == 2
    assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}
    assert resumed.weights == whole.weights
    assert "run.checkpoint_damaged" in caplog.text
    for pack in before:
        spoiled(pack)
    with TrainRun(yard, RUN, setting().state) as run, pytest.raises(Damaged, match="newest 2 "):
        run.resume()


def test_checkpoints_are_let_go_by_number_by_step_and_by_metric(yard: Yard) -> None:
    made = setting()
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 6.0, 6: 7.0, 7: 8.0}
    best = KeepBest(metric="loss", mode="min", count=1)
    keep: dict[str, Any] = {"keep_latest_k": 2, "keep_every": 3, "keep_best": best}
    with TrainRun(yard, RUN, made.state, interval=1, **keep) as run:
        for step in range(1, 8):
            run.step({"loss": losses[step], "odd": float("nan")})
    assert steps_in(yard) == [7, 6, 3, 2]
    assert yard.resolve(RUN).metrics == {"loss": 8.0}


def test_a_checkpoint_is_made_though_others_cannot_be_let_go(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: object) -> None:
        raise NotAllowed("this token may not remove")

    with TrainRun(yard, RUN, {"extra": Counter()}, interval=1, keep_latest_k=1) as run:
        with monkeypatch.context() as patched:
            patched.setattr(yard.catalogue, "apply_retention", refuse)
            run.step()
            run.step()
        assert steps_in(yard) == [2, 1]
        assert "this token may not remove" in caplog.text
        run.step()
    assert steps_in(yard) == [3]


def test_metrics_that_are_no_finite_numbers_are_left_out(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"none": None, "text": "low", "many": torch.ones(3), "inf": float("inf"), "big": 10**400}
    with TrainRun(yard, RUN, {"extra": Counter()}, interval=1) as run:
        run.step({**odd, "loss": torch.tensor(0.5), "count": 3})
        assert run.steps == 1
    assert yard.resolve(RUN).metrics == {"loss": 0.5, "count": 3.0}
    assert ",".join(odd) in caplog.text


class Asked(torch.Tensor):
    """Counts how often its value is asked for, for which a device would have to be waited for."""

    times = 0

    def __float__(self) -> float:
        type(self).times += 1
        return float(self.as_subclass(torch.Tensor))


def test_a_metric_is_read_when_a_checkpoint_is_made_as_it_was_in_its_step(yard: Yard) -> None:
    mean = torch.tensor(0.0).as_subclass(Asked)
    with TrainRun(yard, RUN, {"extra": Counter()}, interval=None) as run:
        for _ in range(3):
            mean += 1.0
            run.step({"mean": mean})
        assert Asked.times == 0
        mean.zero_()
        run.save()
    assert Asked.times == 1
    assert yard.resolve(RUN).metrics == {"mean": 3.0}


@pytest.mark.parametrize("times", [1, 2])
def test_after_a_signal_the_step_is_saved_and_the_process_leaves(yard: Yard, times: int) -> None:
    """Also if it is sent twice: systemd and torchrun each send theirs."""

    def ask(step: int, run: TrainRun) -> None:
        for _ in range(times if step == 3 else 0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)  # where nobody listens it ends the process

    before = signal.signal(signal.SIGTERM, hear)
    try:
        with pytest.raises(SystemExit) as left:
            train(yard, 6, interval=None, on_step=ask, async_mode="async")
        assert signal.getsignal(signal.SIGTERM) is hear
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not heard
    assert left.value.code == 128 + signal.SIGTERM
    assert steps_in(yard) == [3]


def test_saves_come_by_time(yard: Yard) -> None:
    trained = train(yard, 3, interval=None, interval_s=1e-6)
    assert trained.resumed is None
    assert steps_in(yard) == [3, 2, 1]


def test_a_save_that_fails_in_the_background_ends_the_next_step(yard: Yard) -> None:
    reached: list[int] = []

    def fail(*args: object, **kwargs: object) -> None:
        raise StoreUnavailable("no room today")

    def watch(step: int, run: TrainRun) -> None:
        reached.append(step)
        if step == 1:
            run._writer.write_data = fail  # type: ignore[method-assign]
        elif step == 3:  # no save is due at this one, and that of the one before has ended
            run._saver._under_way.exception(SOON_S)  # type: ignore[union-attr]

    with pytest.raises(StoreUnavailable, match="no room today"):
        train(yard, 9, interval=2, on_step=watch, async_mode="async")
    assert reached == [1, 2, 3]
    assert steps_in(yard) == []


def test_a_job_whose_run_was_taken_over_saves_no_more(yard: Yard) -> None:
    old, new = setting(), setting()
    with TrainRun(yard, RUN, old.state) as first:
        first.resume()
        first.step()
        first.save()
        with TrainRun(yard, RUN, new.state) as second:
            assert second.resume() == 1
            first.step()
            with pytest.raises(RunTakenOver):
                first.save()
            second.step()
            second.save()
    assert steps_in(yard) == [2, 1]
    assert yard.catalogue.run(Ref.parse(RUN).model).generation == 2


def test_of_jobs_that_take_a_run_over_at_once_one_succeeds(yard: Yard) -> None:
    """Both have seen the same generation when they ask for the next one."""
    jobs = 3
    met = threading.Barrier(jobs)

    class Slow:
        def __init__(self) -> None:
            self._catalogue = yard.catalogue

        def __getattr__(self, name: str) -> Any:
            return getattr(self._catalogue, name)

        def run(self, name: Any) -> Any:
            try:
                return self._catalogue.run(name)
            finally:
                met.wait(SOON_S)

    train(yard, 1, interval=1)
    plain, yard.catalogue = yard.catalogue, Slow()  # type: ignore[assignment]
    runs = [TrainRun(yard, RUN, {"extra": Counter()}) for _ in range(jobs)]

    def resume(run: TrainRun) -> str:
        try:
            run._begin()
        except RunTakenOver:
            return "taken over"
        return "began"

    with ThreadPoolExecutor(jobs) as threads:
        came = list(threads.map(resume, runs))
    yard.catalogue = plain
    for run in runs:
        run.close()
    assert sorted(came) == ["began", "taken over", "taken over"]
    assert yard.catalogue.run(Ref.parse(RUN).model).generation == 2


def test_objects_come_back_as_they_were(yard: Yard) -> None:
    state = {3: {}, "t": (torch.arange(4), None), "big": 1 << 80, "x": float("inf")}
    counter = Counter(state)
    with TrainRun(yard, RUN, {"extra": counter}) as run:
        run.save()
    fresh = Counter()
    with TrainRun(yard, RUN, {"extra": fresh}) as run:
        run.resume()
    assert torch.equal(fresh.state["t"][0], torch.arange(4))
    assert {key: fresh.state[key] for key in (3, "big", "x")} == {
        key: state[key] for key in (3, "big", "x")
    }


@pytest.mark.parametrize("state", [torch.arange(3), (torch.arange(3),), None, ({}, [])])
def test_a_state_that_is_no_dict_comes_back(yard: Yard, state: Any) -> None:
    class Alone(Counter):
        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    alone = Alone()
    alone.state = state
    with TrainRun(yard, RUN, {"alone": alone}) as run:
        run.save()
    again = Alone()
    with TrainRun(yard, RUN, {"alone": again}) as run:
        run.resume()
    assert repr(again.state) == repr(state)


def test_a_checkpoint_that_holds_no_run_is_refused(yard: Yard) -> None:
    import torch.distributed.checkpoint as dcp

    from weightyard.trainer.saving import quiet_alone

    with TrainRun(yard, RUN, {"extra": Counter()}) as run:
        quiet_alone()
        with YardWriter(yard, RUN) as writer:
            items = {"step": "many", "extra": ({"state": 1}, [])}
            dcp.save(items, checkpoint_id=3, storage_writer=writer, no_dist=True)
        with pytest.raises(Damaged, match="its step is 'many'"):
            run.resume()


def test_a_checkpoint_of_something_else_than_a_run_is_refused_as_such(yard: Yard) -> None:
    with YardWriter(yard, RUN) as writer:
        save_values(writer, 3, {"extra": {"state": 1}})
    with (
        TrainRun(yard, RUN, {"extra": Counter()}, exclude_from_loading=["rng"]) as run,
        pytest.raises(NoSuchThing, match="something else than a TrainRun"),
    ):
        run.resume()
