"""Runs whose catalogue is a service on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from service_world import LIMIT_S, make_world, served
from trainer_world import World, run_ranks
from training import RUN, Trained, as_bytes, setting, steps_of

from weightyard.client.catalogue import HttpCatalogue
from weightyard.trainer.run import TrainRun

BERT = "team/bert"


def train(world: World, rank: int, until: int) -> tuple[Trained, Any]:
    """Resume, train to a step, save that and publish it."""
    made = setting()
    with world.yard(rank) as yard:
        assert isinstance(yard.catalogue, HttpCatalogue)
        with TrainRun(yard, RUN, made.state, interval=2, async_mode="async") as run:
            trained = Trained(run.resume())
            for loss, numbers in steps_of(made, run, until):
                trained.losses[run.steps + 1] = loss
                trained.samples[run.steps + 1] = numbers
            version = run.publish(BERT, alias="candidate")
    trained.weights.update(as_bytes(made.net.state_dict()))
    return trained, version and version.new_bytes


def test_ranks_save_resume_and_publish_through_a_service(
    tmp_path: Path, postgres: Callable[[], str]
) -> None:
    (tmp_path / "service").mkdir()
    with make_world(tmp_path / "service", postgres()) as service, served(service.app) as url:
        settings = {"token": service.secrets["writer"], "deadline_s": LIMIT_S}
        world = World(tmp_path, url, settings)
        begun = run_ranks(world, partial(train, until=3), size=2)
        resumed = run_ranks(world, partial(train, until=5), size=2)
        with world.yard(99) as yard:
            assert [one.step for one in yard.versions(RUN)] == [5, 4, 3, 2]
            assert [one.number for one in yard.versions(BERT)] == [2, 1]
            published = as_bytes(yard.load(f"{BERT}@candidate", verify="full"))
    for rank, (trained, new_bytes) in resumed.items():
        assert (begun[rank][0].resumed, trained.resumed) == (None, 3)
        assert new_bytes == (0 if rank == 0 else None)
        assert published == trained.weights != begun[rank][0].weights
    seen = [
        number
        for came in (begun, resumed)
        for trained, _ in came.values()
        for batch in trained.samples.values()
        for number in batch
    ]
    assert len(set(seen)) == len(seen) == 2 * 2 * 5
