"""Two jobs of one run at the same time: one of them has it, and the other is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select
from torch import nn
from trainer_world import Outcome, World, attempt, run_ranks
from training import RUN, as_bytes
from waiting import eventually

from weightyard.names import ModelName
from weightyard.registry import schema
from weightyard.registry.schema import UploadState
from weightyard.trainer.run import TrainRun
from weightyard.yard import Yard

STEP = 3
ROUNDS = 4


@pytest.fixture
def world(tmp_path: Path) -> World:
    with World(tmp_path, str(tmp_path / "store")).yard(99):
        pass
    return World(tmp_path, str(tmp_path / "store"))


class Gate:
    """Where two processes wait for each other, so that both go on at once."""

    def __init__(self, world: World, job: int) -> None:
        self._folder, self._job = world.folder, job

    def say(self, what: str) -> None:
        (self._folder / f"{what}-{self._job}").touch()

    def wait(self, what: str) -> None:
        """Until the other one has said it."""
        eventually((self._folder / f"{what}-{1 - self._job}").exists)

    def meet(self, what: str) -> None:
        self.say(what)
        self.wait(what)


class _Before:
    """Calls something before some method of what it stands for."""

    def __init__(self, real: Any, method: str, call: Callable[[], None]) -> None:
        self._real, self._method, self._call = real, method, call

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name == "open_upload":
            return lambda *given: _Before(found(*given), self._method, self._call)
        if name != self._method:
            return found

        def called(*given: Any, **more: Any) -> Any:
            self._call()
            return found(*given, **more)

        return called


def before(yard: Yard, method: str, call: Callable[[], None]) -> Yard:
    catalogue: Any = _Before(yard.catalogue, method, call)
    return Yard(yard.store, catalogue, block_bytes=yard.block_bytes)


def weights_of(job: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((200, 200), float(job)), "bias": torch.full((200,), job + 0.5)}


def net_of(job: int) -> nn.Module:
    net = nn.Linear(200, 200)
    net.load_state_dict(weights_of(job))
    return net


def both_commit(world: World, job: int) -> Outcome:
    """The second takes the run over while the first trains; both are about to commit at once."""
    gate = Gate(world, job)
    with world.yard(job) as opened:
        yard = before(opened, "commit", lambda: gate.meet("commit"))
        if job == 1:
            gate.wait("begun")
        with TrainRun(yard, RUN, {"model": net_of(job)}, interval=STEP) as run:
            run.resume()
            gate.say("begun")

            def steps() -> int | None:
                for _ in range(STEP):
                    run.step()
                return run.generation

            came = attempt(steps)
        assert yard._settling.wait()
        return came


def upload_states(yard: Yard) -> list[str]:
    uploads = schema.uploads
    project = ModelName.parse(RUN).project
    wanted = select(uploads.c.state).where(uploads.c.project == project)
    return yard.registry.database.read(lambda tx: list(tx.execute(wanted).scalars()))


def test_of_two_jobs_that_commit_at_once_the_one_that_has_the_run_does(world: World) -> None:
    came = run_ranks(world, both_commit, size=2, is_grouped=False)
    assert (came[0].error, came[1].error, came[1].value) == ("RunTakenOver", "", 2)
    with world.yard(99) as yard:
        assert [one.step for one in yard.versions(RUN)] == [STEP]
        loaded = yard.load(f"{RUN}@step-{STEP}", tensors="model.*", verify="full")
        expected = {f"model.{name}": one for name, one in weights_of(1).items()}
        assert as_bytes(loaded) == as_bytes(expected)
        assert sorted(upload_states(yard)) == [UploadState.COMMITTED, UploadState.EXPIRED]


def commit_or_take_over(world: World, job: int) -> list[str | int | None]:
    """The second takes a run over just when the first commits; and so for some runs.

    What the first failed of, or from which step the second goes on.
    """
    found: list[str | int | None] = []
    method = ("commit", "begin_generation")[job]
    gate = Gate(world, job)
    for number in range(ROUNDS):
        with world.yard(job) as opened:
            yard = before(opened, method, partial(gate.meet, f"meet-{number}"))
            net = net_of(job)
            with TrainRun(yard, f"{RUN}-{number}", {"model": net}, interval=1) as run:
                if job == 0:
                    run.resume()
                    gate.say(f"begun-{number}")
                    found.append(attempt(run.step).error)
                else:
                    gate.wait(f"begun-{number}")
                    found.append(run.resume())
                    if found[-1] is not None:
                        assert as_bytes(net.state_dict()) == as_bytes(weights_of(0))
            assert yard._settling.wait()
    return found


def test_a_commit_that_meets_a_takeover_is_resumed_from_or_did_not_happen(world: World) -> None:
    came = run_ranks(world, commit_or_take_over, size=2, is_grouped=False)
    with world.yard(99) as yard:
        for number, (error, resumed) in enumerate(zip(came[0], came[1], strict=True)):
            assert (error, resumed) in (("", 1), ("RunTakenOver", None))
            steps = [one.step for one in yard.versions(f"{RUN}-{number}")]
            assert steps == ([] if error else [1])
