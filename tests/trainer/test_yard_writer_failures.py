"""Saves that fail: all ranks are told, nothing is visible, and the next save works."""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reading_world import dcp_load
from sqlalchemy import select
from trainer_world import RUN, Outcome, World, attempt, run_ranks
from training import as_bytes, setting, steps_of

from weightyard.errors import BadSetting, RunTakenOver, StoreUnavailable, Unsupported
from weightyard.names import ModelName
from weightyard.registry import schema
from weightyard.registry.schema import UploadState
from weightyard.testing.faults import FaultyStore
from weightyard.trainer.reader import YardReader
from weightyard.trainer.run import TrainRun
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAME = ModelName.parse(RUN)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, str(tmp_path / "store"))


@pytest.fixture
def yard(world: World) -> Iterator[Yard]:
    with world.yard(0) as opened:
        yield opened


def save(writer: YardWriter, step: Any, state: dict[str, Any] | None = None) -> None:
    """A save of one process."""
    state = {"w": torch.arange(200.0 * 200)} if state is None else state
    dcp.save(state, checkpoint_id=step, storage_writer=writer, no_dist=True)


def upload_states(yard: Yard) -> list[str]:
    """Those of the run; the registry may have some for its own files."""
    uploads = schema.uploads
    wanted = select(uploads.c.state).where(uploads.c.project == NAME.project).order_by(uploads.c.id)
    return yard.registry.database.read(lambda tx: list(tx.execute(wanted).scalars()))


def shares(rank: int) -> dict[str, torch.Tensor]:
    return {f"w{rank}": torch.full((300, 300), float(rank)), "both": torch.arange(50_000)}


def fail_on_one(world: World, rank: int) -> list[Outcome]:
    """Rank 1 cannot write its first checkpoint."""
    has_failed = []

    def fail_once(index: int, name: str) -> None:
        if rank == 1 and name == "publish" and not has_failed:
            has_failed.append(True)
            raise StoreUnavailable("the disk is gone")

    with world.yard(rank) as opened:
        store = FaultyStore(opened.store, on_call=fail_once)
        yard = Yard(store, opened.catalogue, block_bytes=opened.block_bytes)
        with YardWriter(yard, RUN) as writer:
            return [
                attempt(
                    lambda step=step: dcp.save(  # type: ignore[misc]
                        shares(rank), checkpoint_id=step, storage_writer=writer
                    )
                )
                for step in (1, 2)
            ]


def test_one_rank_that_fails_fails_all_and_the_upload_is_abandoned(world: World) -> None:
    found = run_ranks(world, fail_on_one, size=3)
    for first, second in found.values():
        assert first.error == "CheckpointException"
        assert first.failures[1] == "StoreUnavailable"
        assert second.error == ""
    with world.yard(99) as yard:
        assert [one.step for one in yard.versions(RUN)] == [2]
        assert upload_states(yard) == [UploadState.EXPIRED, UploadState.COMMITTED]
        loaded = yard.load(f"{RUN}@step-2")
        assert all(torch.equal(loaded[f"w{rank}"], shares(rank)[f"w{rank}"]) for rank in range(3))


def save_out_of_step(world: World, rank: int) -> Outcome:
    with world.yard(rank) as yard, YardWriter(yard, RUN) as writer:
        return attempt(
            lambda: dcp.save(shares(rank), checkpoint_id=7 + rank, storage_writer=writer)
        )


def test_ranks_at_different_steps_make_no_checkpoint(world: World) -> None:
    for refused in run_ranks(world, save_out_of_step, size=2).values():
        assert refused.failures == {1: "Refused"}
        assert "saves step-8" in refused.message
        assert "step-7" in refused.message
    with world.yard(99) as yard:
        assert yard.versions(RUN) == []
        assert upload_states(yard) == [UploadState.EXPIRED]


def be_killed(world: World, rank: int, victim: int) -> Outcome:
    def end(index: int, name: str) -> None:
        if rank == victim and name == "publish":
            os.kill(os.getpid(), signal.SIGKILL)

    with world.yard(rank) as opened:
        store = FaultyStore(opened.store, on_call=end)
        yard = Yard(store, opened.catalogue, block_bytes=opened.block_bytes)
        writer = YardWriter(yard, RUN)
        return attempt(lambda: dcp.save(shares(rank), checkpoint_id=1, storage_writer=writer))


def save_shares(world: World, rank: int) -> int | None:
    with world.yard(rank) as yard, YardWriter(yard, RUN) as writer:
        dcp.save(shares(rank), checkpoint_id=1, storage_writer=writer)
        return writer.generation


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_writes_leaves_nothing_visible(world: World, victim: int) -> None:
    found = run_ranks(world, partial(be_killed, victim=victim), size=2, dead=[victim])
    assert found[1 - victim].error
    with world.yard(99) as yard:
        assert yard.versions(RUN) == []
        assert yard.catalogue.run(NAME).generation == 1
    assert run_ranks(world, save_shares, size=2) == {0: 2, 1: 2}
    with world.yard(99) as yard:
        assert [one.step for one in yard.versions(RUN)] == [1]


def test_a_coordinator_of_before_a_takeover_cannot_save(yard: Yard) -> None:
    with YardWriter(yard, RUN) as old:
        save(old, 1)
    with YardWriter(yard, RUN, generation=old.generation) as old, YardWriter(yard, RUN) as new:
        save(new, 2)
        refused = attempt(lambda: save(old, 3))
        assert refused.failures == {0: "RunTakenOver"}
        save(new, 4)
        assert (old.generation, new.generation) == (1, 2)
    assert [one.step for one in yard.versions(RUN)] == [4, 2, 1]


def test_a_coordinator_that_had_not_saved_before_a_takeover_does_not_take_the_run_back(
    yard: Yard,
) -> None:
    with YardWriter(yard, RUN) as old:
        with YardWriter(yard, RUN) as new:
            save(new, 2)
            assert attempt(lambda: save(old, 1)).failures == {0: "RunTakenOver"}
            save(new, 4)
        with YardWriter(yard, RUN) as newer:
            save(newer, 5)
            assert newer.generation == 2
    assert [one.step for one in yard.versions(RUN)] == [5, 4, 2]


def test_a_takeover_during_the_last_write_prevents_the_commit(yard: Yard) -> None:
    """The older coordinator has written everything, its manifest too."""

    def take_over(index: int, name: str) -> None:
        # State and manifest are published at once; this is asked by both, and true for one.
        if name == "publish" and store.calls[:index].count("publish") == 2:
            yard.catalogue.begin_generation(NAME)

    store = FaultyStore(yard.store, on_call=take_over)
    other = Yard(store, yard.catalogue, block_bytes=yard.block_bytes)
    with YardWriter(other, RUN) as writer:
        with pytest.raises(dcp.CheckpointException) as failed:
            save(writer, 1)
        ((why, _),) = failed.value.failures.values()
        assert isinstance(why, RunTakenOver)
        assert why.current == 2
    assert store.calls.count("publish") == 3  # state, tensors, manifest
    assert yard.versions(RUN) == []
    assert upload_states(yard) == [UploadState.EXPIRED]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (-1, "InvalidName"),
        ("step-01", "InvalidName"),
        ("latest", "InvalidName"),
        (f"{RUN}@v3", "InvalidName"),
        ("team/other@step-1", "InvalidName"),
        (None, "BadSetting"),
    ],
)
def test_a_checkpoint_id_that_is_no_step_of_the_run_is_refused(
    yard: Yard, step: Any, error: str
) -> None:
    with YardWriter(yard, RUN) as writer:
        assert attempt(lambda: save(writer, step)).failures == {0: error}
    assert upload_states(yard) == []


def test_ids_of_steps_are_valid_and_paths_are_not() -> None:
    valid = YardWriter.validate_checkpoint_id
    assert [valid(one) for one in (7, "step-7", Path("step-7"), f"{RUN}@step-7")] == [True] * 4
    assert [valid(one) for one in ("/tmp/7", "hdfs://a/b", f"{RUN}@prod")] == [False] * 3


def test_a_save_without_an_id_does_not_take_the_one_before(yard: Yard) -> None:
    with YardWriter(yard, RUN) as writer:
        save(writer, 1)
        assert attempt(lambda: save(writer, None)).failures == {0: "BadSetting"}
    assert [one.step for one in yard.versions(RUN)] == [1]


def test_a_value_that_cannot_be_saved_is_named_before_a_byte_is_written(yard: Yard) -> None:
    with YardWriter(yard, RUN) as writer:
        refused = attempt(lambda: save(writer, 1, {"w": torch.zeros(100_000), "s": {"a": {1}}}))
    assert refused.failures == {0: "Refused"}
    assert "s.a: a builtins.set cannot be saved" in refused.message
    assert writer.report.blocks == 0
    assert upload_states(yard) == [UploadState.EXPIRED]


def test_metrics_that_are_no_numbers_are_refused_before_anything_is_opened(yard: Yard) -> None:
    with pytest.raises(BadSetting, match=r"metrics\.loss"):
        YardWriter(yard, RUN, metrics={"loss": math.nan})
    with YardWriter(yard, RUN) as writer:
        writer.metrics = {"loss": math.nan}  # of a later step
        refused = attempt(lambda: save(writer, 1))
    assert refused.failures == {0: "BadSetting"}
    assert "metrics.loss" in refused.message
    assert upload_states(yard) == []


def test_a_writer_that_would_leave_its_process_says_what_to_use(yard: Yard) -> None:
    with YardWriter(yard, RUN) as writer, pytest.raises(Unsupported, match="THREAD"):
        copy.copy(writer)


def refuse_pickles(patched: pytest.MonkeyPatch) -> None:
    """From now on whoever pickles or unpickles, by whatever name, fails."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("this is a pickle")

    for module in ("pickle", "_pickle", "torch.serialization.pickle"):
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            patched.setattr(f"{module}.{name}", refuse)
    for name in ("_Pickler", "_Unpickler"):
        patched.setattr(f"pickle.{name}", refuse)
    for name in ("save", "load"):
        patched.setattr(torch, name, refuse)


def test_nothing_is_pickled_or_unpickled(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fresh = setting(), setting()
    refuse_pickles(monkeypatch)
    with YardWriter(yard, RUN) as writer:
        save(writer, 1, {"w": torch.ones(9), "sched": {"lr": 0.5}})
    state = {"w": torch.zeros(9), "sched": {"lr": 0.0}}
    dcp_load(state, YardReader(yard, f"{RUN}@step-1"))
    assert state["w"].sum() == 9
    assert state["sched"] == {"lr": 0.5}
    with TrainRun(yard, "team/whole", made.state, interval=1, async_mode="async") as run:
        for _ in steps_of(made, run, 2):
            pass
        run.publish("team/bert")
    with TrainRun(yard, "team/whole", fresh.state) as run:
        assert run.resume() == 2
    assert as_bytes(fresh.net.state_dict()) == as_bytes(made.net.state_dict())
    assert as_bytes(yard.load("team/bert")) == as_bytes(made.net.state_dict())


class Away:
    """A yard behind a service, whose store this host does not reach."""

    @property
    def store(self) -> Any:
        raise StoreUnavailable("hdfs://nn/yard cannot be used from here (no route)")


def test_who_does_not_reach_the_store_is_told_what_to_do() -> None:
    with pytest.raises(
        StoreUnavailable, match=r"no route.*each rank writes .* Run where the store"
    ):
        YardWriter(Away(), RUN)  # type: ignore[arg-type]
