"""Runs of several ranks: resumed alike, on another number of ranks, and ended by a signal."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from trainer_world import Outcome, World, attempt, run_ranks
from training import RUN, SAMPLES, Trained, as_bytes, packs, setting, spoil, steps_of, train
from waiting import SOON_S

from weightyard.errors import StoreUnavailable
from weightyard.trainer import state as states
from weightyard.trainer.hooks import HookState
from weightyard.trainer.rng import derive
from weightyard.trainer.run import TrainRun
from weightyard.trainer.saving import Save, Schedule
from weightyard.yard import Yard


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, str(tmp_path / "store"))


@dataclass
class Logged(logging.Handler):
    """What a run says."""

    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.INFO)

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    handler, log = Logged(), logging.getLogger("weightyard.trainer")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)


def elsewhere(world: World) -> World:
    return World(world.folder / "else", str(world.folder / "else" / "store"))


def interrupted_and_whole(world: World, rank: int) -> tuple[Trained, Trained, Trained]:
    with world.yard(rank) as yard:
        begun = train(yard, 5, interval=4, async_mode="async")
        resumed = train(yard, 12, interval=4, async_mode="async")
    with elsewhere(world).yard(rank) as yard:
        return begun, resumed, train(yard, 12, interval=None)


def test_ranks_resume_bit_for_bit_and_no_sample_is_lost_or_repeated(world: World) -> None:
    seen: list[int] = []
    for begun, resumed, whole in run_ranks(world, interrupted_and_whole, size=2).values():
        assert (begun.resumed, resumed.resumed) == (None, 4)
        assert {**begun.losses, **resumed.losses} == whole.losses
        assert resumed.weights == whole.weights
        kept = {step: begun.samples[step] for step in range(1, 5)}
        seen += [number for batch in {**kept, **resumed.samples}.values() for number in batch]
    assert len(seen) == SAMPLES + 12  # one epoch, and the beginning of the next
    assert set(seen) == set(range(SAMPLES))
    assert max(map(seen.count, seen)) == 2


def power_sgd(net: DistributedDataParallel) -> Any:
    hook = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    net.register_comm_hook(hook, powerSGD_hook)
    return hook


def local_sgd(net: DistributedDataParallel) -> Any:
    """After six steps the ranks go on each for itself."""
    hook = PostLocalSGDState(
        None, dist.group.WORLD, start_localSGD_iter=6, post_local_gradient_allreduce=False
    )
    net.register_comm_hook(hook, post_localSGD_hook)
    return hook


def hooked(
    world: World, rank: int, hook_of: Callable[[DistributedDataParallel], Any]
) -> tuple[Trained, Trained]:
    """A hook that was interrupted, and one that never was."""

    def steps(yard: Yard, until: int) -> Trained:
        made = setting()
        assert isinstance(made.net, DistributedDataParallel)
        hook = hook_of(made.net)
        with TrainRun(yard, RUN, {**made.state, "hook": hook}, interval=4) as run:
            trained = Trained(run.resume())
            for loss, _ in steps_of(made, run, until):
                trained.losses[run.steps + 1] = loss
        trained.weights.update(as_bytes(made.net.state_dict()))
        return trained

    with elsewhere(world).yard(rank) as yard:
        whole = steps(yard, 7)
    with world.yard(rank) as yard:
        steps(yard, 5)
        return steps(yard, 7), whole


@pytest.mark.parametrize("hook_of", [power_sgd, local_sgd])
def test_a_hook_goes_on_after_a_resume_as_if_it_had_not_been_interrupted(
    world: World, hook_of: Callable[[DistributedDataParallel], Any]
) -> None:
    for resumed, whole in run_ranks(world, partial(hooked, hook_of=hook_of), size=2).values():
        assert resumed.resumed == 4
        assert resumed.losses == {step: whole.losses[step] for step in range(5, 8)}
        assert resumed.weights == whole.weights


def locally_trained(world: World, rank: int) -> tuple[Trained, Trained]:
    """Post-local SGD that was interrupted, and one that never was."""

    def steps(yard: Yard, until: int) -> Trained:
        made = setting()
        assert isinstance(made.net, DistributedDataParallel)
        hook = PostLocalSGDState(
            None, dist.group.WORLD, start_localSGD_iter=2, post_local_gradient_allreduce=False
        )
        made.net.register_comm_hook(hook, post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=2)
        # One that keeps nothing: moments of ranks differ, and a checkpoint has one copy of them.
        local = torch.optim.SGD(made.net.parameters(), lr=1e-2)
        made.optimizer = PostLocalSGDOptimizer(local, averager)
        made.scheduler = StepLR(made.optimizer, 3)
        with TrainRun(yard, RUN, made.state, interval=5) as run:  # a step that averages
            trained = Trained(run.resume())
            for loss, _ in steps_of(made, run, until):
                trained.losses[run.steps + 1] = loss
        trained.weights.update(as_bytes(made.net.state_dict()))
        return trained

    with elsewhere(world).yard(rank) as yard:
        whole = steps(yard, 9)
    with world.yard(rank) as yard:
        steps(yard, 6)
        return steps(yard, 9), whole


def test_post_local_sgd_averages_after_a_resume_as_if_it_had_not_been_interrupted(
    world: World,
) -> None:
    for resumed, whole in run_ranks(world, locally_trained, size=2).values():
        assert resumed.resumed == 5
        assert resumed.losses == {step: whole.losses[step] for step in range(6, 10)}
        assert resumed.weights == whole.weights


def used_after_its_end(world: World, rank: int) -> list[Outcome]:
    made = setting()
    with world.yard(rank) as yard:
        with TrainRun(yard, RUN, made.state, interval=2) as run:
            for _ in steps_of(made, run, 3):
                pass
        return [
            attempt(one)
            for one in (lambda: run.publish("team/out"), run.save, run.step, run.resume)
        ]


def test_a_run_that_was_closed_makes_no_checkpoint_of_each_rank_alone(world: World) -> None:
    for outcomes in run_ranks(world, used_after_its_end, size=2).values():
        assert [(one.error, "is closed" in one.message) for one in outcomes] == [
            ("Refused", True)
        ] * 4
    with world.yard(0) as yard:
        assert [one.step for one in yard.versions(RUN)] == [2]


def saved_by_two(world: World, rank: int) -> Trained:
    with world.yard(rank) as yard:
        return train(yard, 4, interval=4)


def resumed_by_three(world: World, rank: int) -> tuple[Trained, list[str], float]:
    with logged() as lines, world.yard(rank) as yard:
        made = setting()
        with TrainRun(yard, RUN, made.state, interval=None, seed=9) as run:
            trained = Trained(run.resume())
            drawn = float(torch.rand(()))
            for loss, numbers in steps_of(made, run, 7):
                trained.losses[run.steps + 1] = loss
                trained.samples[run.steps + 1] = numbers
        return trained, lines, drawn


def test_on_another_number_of_ranks_numbers_are_derived_and_samples_go_on(world: World) -> None:
    before = run_ranks(world, saved_by_two, size=2)
    after = run_ranks(world, resumed_by_three, size=3)
    assert {trained.resumed for trained, _, _ in after.values()} == {4}
    drawn = [one for _, _, one in after.values()]
    expected = []
    state = torch.get_rng_state()
    for rank in range(3):
        derive(9, 4, rank)
        expected.append(float(torch.rand(())))
    torch.set_rng_state(state)
    assert drawn == expected
    for _, lines, _ in after.values():
        assert any("run.rng_derived" in line and "saved_ranks=2 ranks=3" in line for line in lines)
    everyone = [*before.values(), *(trained for trained, _, _ in after.values())]
    seen = [number for one in everyone for batch in one.samples.values() for number in batch]
    assert len(seen) == 4 * 2 * 2 + 3 * 3 * 2
    assert len(set(seen)) == len(seen)


def laid_out(net: nn.Sequential, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(net)
    if how == "tensor parallel":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


Sharded = tuple[int | None, dict[str, bytes], dict[str, bytes]]


def sharded(world: World, rank: int, how: str) -> Sharded:
    """A module and its optimizer's moments, whole: after a resume, and one step later."""
    torch.manual_seed(3)
    net = laid_out(nn.Sequential(nn.Linear(30, 48), nn.Linear(48, 7)), how)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)

    def whole() -> dict[str, bytes]:
        state = {
            f"{name}.{key}": one
            for name, parameter in net.named_parameters()
            for key, one in optimizer.state[parameter].items()
            if key != "step"
        }
        every = {**state, **net.state_dict()}
        return as_bytes(
            {
                name: one.full_tensor() if isinstance(one, DTensor) else one
                for name, one in every.items()
            }
        )

    state = {"model": net, "optim": optimizer}
    with world.yard(rank) as yard, TrainRun(yard, RUN, state, interval=1) as run:
        resumed = run.resume()
        after_resume = whole()
        net(torch.ones(4, 30)).square().mean().backward()
        optimizer.step()
        run.step()
        return resumed, after_resume, whole()


def test_a_run_goes_on_with_other_shards_and_in_another_layout(world: World) -> None:
    saved: dict[str, bytes] = {}
    layouts = [("fsdp2", 2), ("fsdp2", 3), ("ddp", 2), ("tensor parallel", 3), ("fsdp2", 2)]
    for number, (how, size) in enumerate(layouts):
        came = run_ranks(world, partial(sharded, how=how), size=size)
        for resumed, state, later in came.values():
            assert resumed == (number or None)
            assert not number or state == saved
            assert later == came[0][2] != saved
        saved = came[0][2]
        assert len(saved) == 4 + 2 * 4


def refused_on_one(world: World, rank: int) -> Outcome:
    with world.yard(rank) as yard:
        state = setting().state
        if rank == 1:
            state["extra"] = object()
        return attempt(lambda: TrainRun(yard, RUN, state))


def test_what_one_rank_cannot_save_is_refused_on_all(world: World) -> None:
    came = run_ranks(world, refused_on_one, size=2)
    assert (came[0].error, came[1].error) == ("RankFailed", "Refused")
    assert "extra" in came[0].message


def passed_over(world: World, rank: int) -> tuple[Trained, Trained]:
    before: set[Path] = set()

    def note(step: int, run: TrainRun) -> None:
        before.update(packs(yard) if step == 3 else ())

    with world.yard(rank) as yard:
        whole = train(yard, 4, interval=2, on_step=note)
        dist.barrier()
        if rank == 0:
            largest = max(packs(yard) - before, key=lambda pack: pack.stat().st_size)
            spoil(largest)
        dist.barrier()
        return whole, train(yard, 4, interval=None)


def test_all_ranks_pass_over_a_checkpoint_that_one_of_them_cannot_read(world: World) -> None:
    for whole, resumed in run_ranks(world, passed_over, size=2).values():
        assert resumed.resumed == 2
        assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}
        assert resumed.weights == whole.weights


class Remembering:
    """Each rank has a state of its own of it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __iter__(self) -> Iterator[str]:
        return iter(self.text)

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text = state["text"]


def too_large_together(world: World, rank: int) -> Outcome:
    states.MAX_STATE_BYTES = 60_000  # in this process, which ends with the test
    with world.yard(rank) as yard:
        state = {"model": nn.Linear(2, 2), "seen": Remembering("x" * 40_000)}
        return attempt(lambda: TrainRun(yard, RUN, state).close())


def test_what_the_ranks_keep_together_is_bounded_when_the_run_is_made(world: World) -> None:
    assert run_ranks(world, too_large_together, size=1)[0].error == ""
    for came in run_ranks(world, too_large_together, size=2).values():
        assert came.error == "TooLarge"
        assert "2 ranks" in came.message
        assert "at most 60000" in came.message


def zero_redundancy(world: World, rank: int) -> Outcome:
    net = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with world.yard(rank) as yard:
        return attempt(lambda: TrainRun(yard, RUN, {"model": net, "optim": optimizer}))


def test_an_optimizer_whose_state_only_one_rank_can_have_is_refused(world: World) -> None:
    (came,) = run_ranks(world, zero_redundancy, size=1).values()
    assert came.error == "Refused"
    assert "optim: a ZeroRedundancyOptimizer" in came.message
    assert "fully_shard" in came.message


def made_on_one_only(world: World, rank: int) -> Outcome:
    odd = {"no_such_option": 1} if rank == 1 else {}
    with world.yard(rank) as yard:
        return attempt(lambda: TrainRun(yard, RUN, {"model": nn.Linear(2, 2)}, **odd).close())


def test_a_run_that_one_rank_cannot_make_no_rank_makes(world: World) -> None:
    came = run_ranks(world, made_on_one_only, size=2)
    assert came[0].error == "RankFailed"
    assert "no_such_option" in came[1].message


class Odd(torch.optim.SGD):
    """Has a state in its first step that cannot be saved."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = {1, 2}


def odd_on_one(world: World, rank: int, interval: int | None) -> dict[int, Outcome]:
    net = nn.Linear(2, 2)
    optimizer = (Odd if rank == 1 else torch.optim.SGD)(net.parameters())
    came: dict[int, Outcome] = {}
    state = {"model": net, "optim": optimizer}
    with world.yard(rank) as yard, TrainRun(yard, RUN, state, interval=interval) as run:
        while not any(one.error for one in came.values()):
            optimizer.step()
            came[len(came) + 1] = attempt(run.step)
    return came


@pytest.mark.parametrize(("interval", "step"), [(None, 2), (1, 1)])
def test_what_the_optimizer_of_one_rank_keeps_and_cannot_save_ends_the_same_step_on_all(
    world: World, interval: int | None, step: int
) -> None:
    came = run_ranks(world, partial(odd_on_one, interval=interval), size=2)
    assert [list(one)[-1] for one in came.values()] == [step, step]
    assert (came[0][step].error, came[1][step].error) == ("RankFailed", "Refused")
    assert "odd" in came[1][step].message


def one_is_asked_to_leave(world: World, rank: int) -> tuple[Outcome, list[int | None]]:
    def ask(step: int, run: TrainRun) -> None:
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def leave() -> str:
        try:
            train(yard, 9, interval=None, on_step=ask)
        except SystemExit as left:
            return f"left with {left.code}"
        return "stayed"

    with world.yard(rank) as yard:
        left = attempt(leave)
        dist.barrier()
        return left, [one.step for one in yard.versions(RUN)]


def test_when_one_rank_gets_a_signal_all_save_the_same_step_and_leave(world: World) -> None:
    for left, steps in run_ranks(world, one_is_asked_to_leave, size=2).values():
        assert left.value == f"left with {128 + signal.SIGTERM}"
        assert steps == [3]  # it is heard of one step later


def save_failed_on_one(world: World, rank: int) -> tuple[dict[int, Outcome], list[int | None]]:
    """The save of step 2 fails on rank 0, whatever becomes of it on rank 1."""

    def fail(save: Save) -> None:
        if rank == 0:
            raise StoreUnavailable("no room today")

    came: dict[int, Outcome] = {}
    made = setting()
    with (
        world.yard(rank) as yard,
        TrainRun(yard, RUN, made.state, interval=None, async_mode="async") as run,
    ):
        for step in range(1, 8):
            came[step] = attempt(run.step)
            if step == 2:
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(run._saver, "_write", fail)
                    run.save()
                    assert run._saver._under_way is not None
                    run._saver._under_way.exception(SOON_S)  # before the next step
            elif step == 4:
                run.save(wait=True)
        return came, [one.step for one in yard.versions(RUN)]


def test_a_save_that_failed_on_one_rank_is_raised_once_by_all_at_the_same_step(
    world: World,
) -> None:
    found = run_ranks(world, save_failed_on_one, size=2)
    for rank, error in ((0, "StoreUnavailable"), (1, "RankFailed")):
        came, steps = found[rank]
        assert {step: one.error for step, one in came.items() if one.error} == {4: error}
        assert steps == [4]  # after it they go on together
    assert "save of another rank failed" in found[1][0][4].message


def saved_by_time(world: World, rank: int) -> list[int | None]:
    now = [0.0]
    with world.yard(rank) as yard, TrainRun(yard, RUN, setting().state, interval=None) as run:
        run._schedule = Schedule(None, 10.0, lambda: now[0])
        for step in range(1, 7):
            now[0] += 11.0 if step == 2 else 1.0
            run.step()
        return [one.step for one in yard.versions(RUN)]


def test_what_is_due_by_time_is_saved_once_by_all_ranks(world: World) -> None:
    for steps in run_ranks(world, saved_by_time, size=2).values():
        assert steps == [3]


def does_not_fit_on_one(world: World, rank: int) -> Outcome:
    with world.yard(rank) as yard:
        train(yard, 1, interval=1)
        state = setting().state
        if rank == 1:
            state["extra"] = StepLR(state["optim"], 1)
        with TrainRun(yard, RUN, state) as run:
            return attempt(run.resume)


def test_what_does_not_fit_on_one_rank_ends_the_resume_of_all(world: World) -> None:
    came = run_ranks(world, does_not_fit_on_one, size=2)
    assert (came[0].error, came[1].error) == ("RankFailed", "DoesNotFit")
    assert "extra" in came[0].message


class Unwilling:
    """Takes its state over on the first rank only."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("another rank had better not go on")


def not_taken_over_on_one(world: World, rank: int, load_step: int | None) -> Outcome:
    state = {"extra": Unwilling()}
    with world.yard(rank) as yard:
        with TrainRun(yard, RUN, state) as run:
            run.save()
        with TrainRun(yard, RUN, state, load_step=load_step) as run:
            return attempt(run.resume)


@pytest.mark.parametrize("load_step", [None, 0])
def test_what_one_rank_does_not_take_over_ends_the_resume_of_all(
    world: World, load_step: int | None
) -> None:
    came = run_ranks(world, partial(not_taken_over_on_one, load_step=load_step), size=2)
    assert (came[0].error, came[1].error) == ("RankFailed", "ValueError")
    assert "had better not" in came[0].message


def test_unsent_gradients_are_dropped_where_nobody_owns_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = PowerSGDState(None, start_powerSGD_iter=2)
    hook.error_dict[0] = torch.ones(3)
    hook.iter = 5
    state = HookState(hook, []).state_dict()
    fresh = PowerSGDState(None, start_powerSGD_iter=2)
    HookState(fresh, []).load_state_dict({**state, "order": [0]})
    assert (fresh.iter, list(fresh.error_dict)) == (5, [0])
    HookState(fresh, []).forget_unsent()
    assert not fresh.error_dict
    assert "another number of ranks" in caplog.text
    hook.error_dict[0] = torch.ones(3)
    HookState(fresh, []).load_state_dict(state)  # without DDP there is no order
    assert not fresh.error_dict
    assert "how the buckets were arranged" in caplog.text
