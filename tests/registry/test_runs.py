"""Runs: who may commit the next checkpoint, and what a step means."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpointing import RUN, Saving, save
from collecting import gc, rows
from pushing import BERT, push, read_back, write
from pydantic import ValidationError
from racing import LIMIT_S, race

from weightyard.errors import (
    Conflict,
    NoSuchThing,
    RanksMissing,
    Refused,
    RunTakenOver,
    UploadExpired,
)
from weightyard.names import Digest, ModelName, Ref, UploadId
from weightyard.records import Checkpoint, Publication
from weightyard.registry import binding
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore
from weightyard.transfer.publish import publish


@pytest.fixture
def one(database: Database, store: LocalStore) -> Registry:
    """A process that has a run in its first generation."""
    binding.bind(database, store)
    registry = Registry(database, store=store, who="one")
    assert registry.begin_generation(RUN).generation == 1
    return registry


@pytest.fixture
def two(database_url: str, one: Registry, store: LocalStore) -> Iterator[Registry]:
    """Another process with the same database."""
    with Registry(Database(database_url), store=store, who="two") as registry:
        yield registry


def test_a_run_is_made_by_who_takes_it_over_and_is_no_model(registry: Registry) -> None:
    with pytest.raises(NoSuchThing):
        registry.run(RUN)
    assert registry.begin_generation(RUN).generation == 1
    assert registry.begin_generation(RUN).generation == 2
    run = registry.run(RUN)
    assert (run.name, run.generation, run.latest_step) == ("team/run42", 2, None)
    assert registry.models() == []
    assert [model.name for model in registry.models(kind="run")] == ["team/run42"]
    assert registry.model(RUN).generation == 2


def test_a_run_is_taken_over_only_from_the_generation_that_is_expected(registry: Registry) -> None:
    with pytest.raises(RunTakenOver) as new:
        registry.begin_generation(RUN, expect=3)
    assert new.value.current == 0
    with pytest.raises(NoSuchThing):
        registry.run(RUN)
    assert registry.begin_generation(RUN, expect=0).generation == 1
    assert registry.begin_generation(RUN, expect=1).generation == 2
    with pytest.raises(RunTakenOver, match="at generation 2, not 1") as late:
        registry.begin_generation(RUN, expect=1)
    assert late.value.current == 2
    assert registry.run(RUN).generation == 2


def test_taking_a_run_over_again_with_the_same_key_is_the_same_taking_over(
    registry: Registry,
) -> None:
    for _ in range(2):  # the answer was lost, not the work
        assert registry.begin_generation(RUN, expect=0, key="mine").generation == 1
    with pytest.raises(RunTakenOver):
        registry.begin_generation(RUN, expect=0, key="another")
    assert registry.begin_generation(RUN, expect=1, key="another").generation == 2
    with pytest.raises(RunTakenOver) as late:
        registry.begin_generation(RUN, expect=0, key="mine")
    assert late.value.current == 2, "another has it by now"
    registry.remove_model(RUN)
    assert registry.begin_generation(RUN, key="another").generation == 3, "it was made anew"


def test_of_many_who_expect_the_same_generation_one_gets_the_next(
    one: Registry, database: Database
) -> None:
    ready = threading.Barrier(8)

    def take(expect: int) -> int | None:
        ready.wait(LIMIT_S)
        try:
            return one.begin_generation(RUN, expect=expect).generation
        except RunTakenOver:
            return None

    with ThreadPoolExecutor(8) as pool:
        for generation in range(1, 5):
            taken = list(pool.map(take, [generation] * 8, timeout=LIMIT_S))
            assert [found for found in taken if found is not None] == [generation + 1]
    assert one.run(RUN).generation == 5


def test_a_coordinator_that_was_taken_over_commits_nothing(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    old = Saving(one, store, b"old 0", b"old 1", step=20).write_all()
    assert two.begin_generation(RUN).generation == 2
    with pytest.raises(RunTakenOver) as taken:
        old.commit()
    assert taken.value.current == 2
    assert one.versions(RUN) == []
    with pytest.raises(NoSuchThing):
        one.resolve(Ref.parse("team/run42@step-20"))
    assert save(two, store, b"new", step=20).number == 1, "no number was used up"
    with pytest.raises(RunTakenOver):
        Saving(one, store, b"more", step=30, generation=1)


def test_who_takes_a_run_over_waits_for_a_commit_and_then_sees_it(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    old = Saving(one, store, b"old", step=20).write_all()
    done = race(one.database, "INSERT INTO versions", old.commit, lambda: two.begin_generation(RUN))
    assert done.second_waited
    assert done.errors == []
    assert two.run(RUN).generation == 2
    assert two.run(RUN).latest_step == 20


def test_a_commit_waits_for_who_is_taking_the_run_over_and_fails(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    old = Saving(one, store, b"old", step=20).write_all()
    done = race(two.database, "INSERT INTO outbox", lambda: two.begin_generation(RUN), old.commit)
    assert done.second_waited
    (error,) = done.errors
    assert isinstance(error, RunTakenOver)
    assert two.versions(RUN) == []


def test_of_two_coordinators_at_the_same_step_only_the_newer_publishes(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    old = Saving(one, store, b"old", step=20).write_all()
    two.begin_generation(RUN)
    new = Saving(two, store, b"new", step=20).write_all()
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(old.commit), pool.submit(new.commit)]
        errors = [result.exception(LIMIT_S) for result in results]
    assert isinstance(errors[0], RunTakenOver)
    assert errors[1] is None
    (version,) = one.versions(RUN)
    assert one.resolve(Ref.parse("team/run42@step-20")) == version
    assert read_back(one, store, version) == [b"new"]


def test_a_commit_whose_answer_was_lost_is_found_again_after_the_run_was_taken_over(
    one: Registry, two: Registry, store: LocalStore
) -> None:
    saving = Saving(one, store, b"old", step=20).write_all()
    version = saving.commit("the-key")
    two.begin_generation(RUN)
    digest, said = Digest(version.digest), saving.publication
    again = saving.upload.commit(digest, saving.manifest(), said, "the-key")
    assert again.ref == version.ref


def test_a_checkpoint_is_not_published_before_all_its_ranks_have_finished(
    one: Registry, store: LocalStore
) -> None:
    saving = Saving(one, store, b"0", b"1", b"2", step=5)
    for rank in range(3):
        saving.write(rank)
    saving.upload.finish_rank(1)
    with pytest.raises(RanksMissing, match="0, 2") as missing:
        saving.commit()
    assert missing.value.missing == (0, 2)
    assert one.versions(RUN) == []
    saving.upload.finish_rank(2)
    saving.upload.finish_rank(0)
    saving.upload.finish_rank(0)
    version = saving.commit()
    assert (version.number, version.step) == (1, 5)


def test_ranks_write_one_checkpoint_under_the_upload_they_joined(
    one: Registry, database_url: str, store: LocalStore
) -> None:
    contents = [bytes([rank]) * 70_000 for rank in range(4)]
    saving = Saving(one, store, *contents, step=7)

    def work(rank: int) -> None:
        with Registry(Database(database_url), store=store, who="one") as registry:
            joined = registry.join_upload(saving.upload.id)
            joined.heartbeat()
            saving.write(rank, joined)
            joined.finish_rank(rank)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=LIMIT_S))
    version = saving.commit()
    assert read_back(one, store, version) == contents


def test_an_upload_that_is_over_cannot_be_joined(one: Registry, store: LocalStore) -> None:
    saving = Saving(one, store, b"0", step=5)
    saving.upload.abandon()
    for upload in (saving.upload.id, UploadId.new()):
        with pytest.raises(UploadExpired):
            one.join_upload(upload)
    with pytest.raises(UploadExpired):
        saving.upload.finish_rank(0)


def test_a_rank_that_a_checkpoint_does_not_have_is_refused(
    one: Registry, store: LocalStore
) -> None:
    upload = Saving(one, store, b"0", b"1", step=5).upload
    for rank in (-1, 2, 1 << 40):
        with pytest.raises(Refused, match="ranks 0 to 1"):
            upload.finish_rank(rank)
    with pytest.raises(Refused, match="no checkpoint"):
        one.open_upload(BERT, Publication()).finish_rank(0)


def test_what_ranks_said_goes_with_their_upload(
    one: Registry, store: LocalStore, database: Database
) -> None:
    save(one, store, b"0", b"1", step=5)
    left = Saving(one, store, b"2", b"3", step=6).write_all()
    assert rows(database)["upload_ranks"] == 2
    left.upload.abandon()
    assert rows(database)["upload_ranks"] == 0
    gc(one, store)
    assert one.run(RUN).latest_step == 5


def test_a_step_means_the_newest_version_that_has_it(one: Registry, store: LocalStore) -> None:
    save(one, store, b"1", step=10)
    save(one, store, b"2", step=20)
    again = save(one, store, b"3", step=10)
    assert again.step == 10
    assert one.resolve(Ref.parse("team/run42@step-10")).number == 3
    assert one.resolve(Ref.parse("team/run42@step-20")).number == 2
    assert one.resolve(Ref.parse("team/run42")).step == 10
    run = one.run(RUN)
    assert (run.latest, run.latest_step, run.versions) == (3, 10, 3)
    one.remove(Ref.parse("team/run42@step-10"))
    assert one.resolve(Ref.parse("team/run42@step-10")).number == 1
    assert one.run(RUN).latest_step == 20
    with pytest.raises(NoSuchThing, match="step-30"):
        one.resolve(Ref.parse("team/run42@step-30"))
    push(one, store, b"plain")
    with pytest.raises(NoSuchThing):
        one.resolve(Ref.parse("team/bert@step-0"))


def test_steps_as_large_as_they_may_be_are_kept_exactly(one: Registry, store: LocalStore) -> None:
    save(one, store, b"0", step=0)
    save(one, store, b"1", step=2**53)
    assert one.resolve(Ref.parse(f"team/run42@step-{2**53}")).number == 2
    assert one.resolve(Ref.parse("team/run42@step-0")).number == 1
    for wrong in ({"step": 2**53 + 1}, {"step": -1}, {"generation": 0}, {"ranks": 0}):
        with pytest.raises(ValidationError):
            Checkpoint.model_validate({"step": 1, "generation": 1, "ranks": 1, **wrong})


def test_a_run_gets_no_plain_version_and_a_model_no_checkpoint(
    one: Registry, store: LocalStore
) -> None:
    push(one, store, b"weights")
    with pytest.raises(Conflict, match="is a run"):
        push(one, store, b"weights", model=RUN)
    with pytest.raises(Conflict, match="is a model"):
        Saving(one, store, b"0", step=1, generation=1, run=BERT)
    with pytest.raises(Conflict, match="is a model"):
        one.begin_generation(BERT)
    with pytest.raises(NoSuchThing, match="is a model"):
        one.run(BERT)
    late = ModelName("team", "late")
    upload = one.open_upload(late, Publication())
    manifest = write(upload, store, b"weights")
    one.begin_generation(late)
    with pytest.raises(Conflict, match="is a run"):
        publish(store, upload, manifest, Publication(), "key")
    assert one.versions(late) == []


def test_a_run_that_was_removed_stops_its_coordinator_and_never_goes_back(
    one: Registry, store: LocalStore
) -> None:
    saving = Saving(one, store, b"0", step=1).write_all()
    one.remove_model(RUN)
    with pytest.raises(RunTakenOver):
        saving.commit()
    with pytest.raises(RunTakenOver):
        Saving(one, store, b"0", step=1, generation=1)
    assert one.begin_generation(RUN).generation == 2


def test_who_finds_no_run_takes_over_one_that_was_removed(one: Registry) -> None:
    one.remove_model(RUN)
    with pytest.raises(RunTakenOver) as late:
        one.begin_generation(RUN, expect=1)
    assert late.value.current == 0
    assert one.begin_generation(RUN, expect=0).generation == 2
    with pytest.raises(RunTakenOver):
        one.begin_generation(RUN, expect=0)


def test_a_name_that_is_free_again_may_be_of_the_other_kind(
    one: Registry, store: LocalStore
) -> None:
    one.remove_model(RUN)
    assert push(one, store, b"weights", model=RUN).number == 1
    assert one.model(RUN).kind == "model"
    one.remove(Ref.parse("team/run42@v1"))
    one.remove_model(RUN)
    assert one.begin_generation(RUN).generation == 2
    assert save(one, store, b"0", step=1).number == 2


def test_metrics_are_numbers_that_json_has() -> None:
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="finite"):
            Publication(metrics={"loss": wrong})
