"""Communication hooks that nobody named: found where they are registered, saved and resumed."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from trainer_world import Outcome, World, attempt, run_ranks
from training import RUN, Trained, as_bytes, setting, steps_of

from weightyard.trainer.run import TrainRun
from weightyard.yard import Yard


def power_sgd_steps(yard: Yard, until: int) -> Trained:
    """The hook is not in the state of the run."""
    made = setting(hidden=64)
    hook = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    assert isinstance(made.net, DistributedDataParallel)
    made.net.register_comm_hook(hook, powerSGD_hook)
    with TrainRun(yard, RUN, made.state, interval=4) as run:
        trained = Trained(run.resume())
        for loss, _ in steps_of(made, run, until):
            trained.losses[run.steps + 1] = loss
    trained.weights.update(as_bytes(made.net.state_dict()))
    return trained


def interrupted_and_whole(world: World, rank: int) -> tuple[Trained, Trained, list[str]]:
    whole_world = World(world.folder / "else", str(world.folder / "else" / "store"))
    with whole_world.yard(rank) as yard:
        whole = power_sgd_steps(yard, 7)
    with world.yard(rank) as yard:
        power_sgd_steps(yard, 5)
        resumed = power_sgd_steps(yard, 7)
        names = [one.name for one in yard.manifest(f"{RUN}@step-4").tensors]
    return resumed, whole, names


def test_a_hook_that_nobody_named_goes_on_after_a_resume(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    for resumed, whole, names in run_ranks(world, interrupted_and_whole, size=2).values():
        assert resumed.resumed == 4
        assert resumed.losses == {step: whole.losses[step] for step in range(5, 8)}
        assert resumed.weights == whole.weights
        for rank in range(2):
            assert any(one.startswith(f"ranks.{rank}.model.hook.error_dict") for one in names)


class Remembering:
    """The state of a hook of one's own."""


def hooks_of_other_kinds(world: World, rank: int) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    handler = logging.Handler()
    logging.getLogger("weightyard.trainer").addHandler(handler)
    with world.yard(rank) as yard:
        for state in (dist.group.WORLD, Remembering(), None):
            net = DistributedDataParallel(torch.nn.Linear(2, 2))
            net.register_comm_hook(state, allreduce_hook)
            lines = said.setdefault(type(state).__name__, [])
            handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[assignment,misc]
            with TrainRun(yard, RUN, {"model": net}, interval=None) as run:
                assert [part.name for part in run._parts] == ["model"]
    return said


def test_of_a_hook_that_is_not_known_a_log_line_says_that_it_is_not_saved(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    (said,) = run_ranks(world, hooks_of_other_kinds, size=1).values()
    assert said["ProcessGroup"] == said["NoneType"] == []
    (line,) = said["Remembering"]
    assert "hook.not_saved" in line
    assert "state=Remembering" in line


def resumed_with_a_hook(world: World, rank: int, has_hook: bool) -> int | None:
    with world.yard(rank) as yard:
        made = setting(hidden=64)
        if has_hook:
            assert isinstance(made.net, DistributedDataParallel)
            made.net.register_comm_hook(PowerSGDState(None), powerSGD_hook)
        with TrainRun(yard, RUN, made.state, interval=1) as run:
            resumed = run.resume()
            list(steps_of(made, run, run.steps + 1))
        return resumed


@pytest.mark.parametrize("had_hook", [False, True])
def test_a_checkpoint_of_a_training_without_the_hook_or_with_one_is_resumed(
    tmp_path: Path, had_hook: bool
) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    for has_hook, expected in ((had_hook, None), (not had_hook, 1)):
        came = run_ranks(world, partial(resumed_with_a_hook, has_hook=has_hook), size=1)
        assert came == {0: expected}


def unsent_after_a_resume(world: World, rank: int, until: int) -> tuple[int, int]:
    """How much a hook remembers after a resume, and after some steps."""
    with world.yard(rank) as yard:
        made = setting(hidden=64)
        hook = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        assert isinstance(made.net, DistributedDataParallel)
        made.net.register_comm_hook(hook, powerSGD_hook)
        with TrainRun(yard, RUN, made.state, interval=4) as run:
            run.resume()
            found = len(hook.error_dict)
            list(steps_of(made, run, until))
        return found, len(hook.error_dict)


def test_no_rank_of_another_number_takes_over_what_was_not_sent_yet(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    begun = run_ranks(world, partial(unsent_after_a_resume, until=4), size=2)
    (unsent,) = {left for _, left in begun.values()}
    assert unsent > 0
    same = run_ranks(world, partial(unsent_after_a_resume, until=4), size=2)
    assert [found for found, _ in same.values()] == [unsent, unsent]
    other = run_ranks(world, partial(unsent_after_a_resume, until=4), size=1)
    assert [found for found, _ in other.values()] == [0]


def resumed_with_another_kind(world: World, rank: int) -> Outcome:
    with world.yard(rank) as yard:
        made = setting(hidden=64)
        assert isinstance(made.net, DistributedDataParallel)
        hook = PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=6)
        made.net.register_comm_hook(hook, post_localSGD_hook)
        with TrainRun(yard, RUN, made.state, interval=1) as run:
            list(steps_of(made, run, 1))
        again = setting(hidden=64)
        assert isinstance(again.net, DistributedDataParallel)
        again.net.register_comm_hook(PowerSGDState(None), powerSGD_hook)
        with TrainRun(yard, RUN, again.state) as run:
            return attempt(run.resume)


def test_a_hook_of_another_kind_under_the_same_name_is_refused_by_its_name(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    (came,) = run_ranks(world, resumed_with_another_kind, size=1).values()
    assert came.error == "DoesNotFit"
    assert "exclude_from_loading=['model.hook']" in came.message
