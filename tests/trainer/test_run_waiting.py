"""Ranks that wait for one of them: for what it publishes, and for a step."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainer_world import Outcome, World, attempt, run_ranks
from training import RUN

from weightyard.loader import peers
from weightyard.trainer.job import Job
from weightyard.trainer.run import TrainRun


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, str(tmp_path / "store"))


def published_wrongly(world: World, rank: int) -> tuple[Outcome, Outcome]:
    with world.yard(rank) as yard, TrainRun(yard, RUN, {"model": nn.Linear(2, 2)}) as run:
        run.step()
        wrongly = attempt(lambda: run.publish("team/tiny", model="no_such_module"))
        return wrongly, attempt(lambda: run.publish("team/tiny"))


def test_a_version_that_the_first_rank_cannot_publish_is_an_error_on_all(world: World) -> None:
    came = run_ranks(world, published_wrongly, size=2)
    assert [wrongly.error for wrongly, _ in came.values()] == ["BadSetting", "RankFailed"]
    assert "no_such_module" in came[1][0].message
    assert (came[0][1].value.number, came[1][1]) == (1, Outcome())  # they go on together


def published_slowly(world: World, rank: int) -> Outcome:
    peers.MEET_S = peers.WAIT_S = 2.5

    def slow(name: str) -> str:
        time.sleep(3)
        return name

    with world.yard(rank) as yard, TrainRun(yard, RUN, {"model": nn.Linear(2, 2)}) as run:
        run.job.patience_s = 2.5
        return attempt(lambda: run.publish("team/tiny", rename=slow))


def test_ranks_wait_for_the_first_one_however_long_it_publishes(world: World) -> None:
    came = run_ranks(world, published_slowly, size=2)
    assert (came[0].value.number, came[1]) == (1, Outcome())


def resumed_late(world: World, rank: int) -> Outcome:
    peers.MEET_S = 1.0
    with world.yard(rank) as yard, TrainRun(yard, RUN, {"model": nn.Linear(2, 2)}) as run:
        time.sleep(3 * rank)  # its module is compiled first
        return attempt(run.resume)


def test_ranks_wait_for_one_that_resumes_late_as_long_as_the_training_does(world: World) -> None:
    assert run_ranks(world, resumed_late, size=2) == {0: Outcome(), 1: Outcome()}


def time_to_wait(world: World, rank: int, given: timedelta) -> list[timedelta]:
    dist.init_process_group("gloo", timeout=given)
    with Job() as job:
        assert job.group is not None
        assert job._wishes is not None
        groups = [job.group, job._wishes._group]
        return [one._get_backend(torch.device("cpu")).options._timeout for one in groups]


@pytest.mark.parametrize(("given", "granted"), [(120, 120), (1, 30)])
def test_a_run_waits_for_a_rank_as_long_as_the_training_does_and_not_shorter_than_torch(
    world: World, given: int, granted: int
) -> None:
    job = partial(time_to_wait, given=timedelta(minutes=given))
    (came,) = run_ranks(world, job, size=1, is_grouped=False).values()
    assert came == [timedelta(minutes=granted)] * 2
