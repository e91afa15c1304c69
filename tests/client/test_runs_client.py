"""Runs through the client: as by the registry itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpointing import RUN, Saving, save
from cutting import Cutting
from pushing import read_back
from service_world import LIMIT_S, World, push, served

from weightyard.client.catalogue import HttpCatalogue
from weightyard.errors import (
    Conflict,
    NoSuchThing,
    NotAllowed,
    RanksMissing,
    Refused,
    RunTakenOver,
    UploadExpired,
)
from weightyard.names import ModelName, Ref, UploadId
from weightyard.records import KeepBest, Retention
from weightyard.transfer.catalogue import Catalogue

BERT = ModelName("team", "bert")


@pytest.fixture
def client(world: World, url: str) -> Iterator[HttpCatalogue]:
    with HttpCatalogue(url, world.secrets["writer"], deadline_s=LIMIT_S) as made:
        yield made


def test_ranks_on_other_hosts_write_one_checkpoint(any_world: World) -> None:
    world = any_world
    contents = [bytes([rank]) * 70_000 for rank in range(3)]
    with served(world.app) as url, HttpCatalogue(url, world.secrets["writer"]) as client:
        assert client.begin_generation(RUN).generation == 1
        saving = Saving(client, world.store, *contents, step=1200)

        def work(rank: int) -> None:
            with HttpCatalogue(url, world.secrets["writer"]) as mine:
                joined = mine.join_upload(saving.upload.id)
                saving.write(rank, joined)
                joined.finish_rank(rank)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3), timeout=LIMIT_S))
        version = saving.commit()
        assert (version.ref, version.step) == ("team/run42@v1", 1200)
        found = client.resolve(Ref.parse("team/run42@step-1200"))
        assert read_back(client, world.store, found) == contents
        run = client.run(RUN)
        assert (run.generation, run.latest, run.latest_step) == (1, 1, 1200)
        assert world.registry.run(RUN) == run


def test_errors_of_runs_are_those_of_the_registry(world: World, client: HttpCatalogue) -> None:
    catalogues: list[Catalogue] = [world.registry, client]
    for one in catalogues:
        with pytest.raises(NoSuchThing):
            one.run(ModelName("team", "none"))
        with pytest.raises(UploadExpired):
            one.join_upload(UploadId.new())
        generation = one.begin_generation(RUN).generation
        with pytest.raises(RunTakenOver) as taken:
            one.begin_generation(RUN, expect=generation + 7)
        assert taken.value.current == generation
        saving = Saving(one, world.store, b"0", b"1", step=5)
        saving.write(0)
        saving.write(1)
        saving.upload.finish_rank(0)
        with pytest.raises(RanksMissing) as missing:
            saving.commit()
        assert missing.value.missing == (1,)
        with pytest.raises(Refused, match="ranks 0 to 1"):
            saving.upload.finish_rank(2)
        saving.upload.finish_rank(1)
        world.registry.begin_generation(RUN)
        with pytest.raises(RunTakenOver) as over:
            saving.commit()
        assert over.value.current == generation + 1
        with pytest.raises(Conflict, match="is a run"):
            push(one, world.store, "team/run42", b"plain")
    assert world.registry.versions(RUN) == []


def test_a_writer_rules_over_the_checkpoints_of_runs_only(
    world: World, client: HttpCatalogue
) -> None:
    client.begin_generation(RUN)
    for step in (1, 2, 3, 4):
        save(client, world.store, b"%d" % step, step=step, metrics={"loss": 4.0 - step % 3})
    rules = Retention(keep_last=1, keep_every=3, keep_best=KeepBest(metric="loss"))
    client.set_retention(RUN, rules)
    assert client.model(RUN).retention == rules
    assert client.apply_retention(RUN) == ["team/run42@v1"]
    client.set_retention(RUN, None)
    assert client.model(RUN).retention is None
    assert client.apply_retention(RUN) == []
    push(client, world.store, "team/bert", b"one")
    with pytest.raises(NotAllowed):
        client.set_retention(BERT, Retention(keep_last=1))
    with pytest.raises(NotAllowed):
        client.apply_retention(BERT)
    assert [model.name for model in client.models(kind="run")] == ["team/run42"]


@pytest.mark.parametrize("expect", [None, 0])
def test_a_run_whose_taking_over_lost_its_answer_is_taken_over_once(
    world: World, cutting: Cutting, expect: int | None
) -> None:
    cutting.cut_after_bytes = [0]
    with HttpCatalogue(cutting.url, world.secrets["writer"], deadline_s=LIMIT_S) as client:
        run = client.begin_generation(RUN, expect=expect)
    assert run.generation == world.registry.run(RUN).generation == 1


def test_a_key_takes_a_run_over_for_its_own_caller_only(world: World, url: str) -> None:
    for generation, name in enumerate(("writer", "boss"), 1):
        with HttpCatalogue(url, world.secrets[name]) as client:
            for _ in range(2):
                taken = client.begin_generation(RUN, key="same")
                assert taken.generation == generation
