"""What a run cannot save, or cannot be told, is refused when it is made."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from trainer_world import Outcome, World, attempt, run_ranks
from training import RUN, Counter, train

from weightyard.errors import (
    BadSetting,
    Refused,
    TooLarge,
)
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.trainer import state as states
from weightyard.trainer.run import TrainRun
from weightyard.yard import Yard


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "store"), settings=settings) as opened:
        yield opened


@pytest.mark.parametrize(
    ("odd", "path"),
    [
        (Counter({"fn": len}), r"extra\['state'\]\['fn'\]"),
        (Counter([1, {2: {3.5: 1}}]), r"extra\['state'\]\[1\]\[2\].*3.5"),
        (Counter(torch.ones(2).to_sparse()), r"extra\.state.*sparse"),
        (Counter([torch.ones(2, device="meta")]), r"extra\.state\.0.*meta"),
        (Counter(torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)), r"extra.*float4"),
        (object(), "extra.*object"),
        (nn.LazyLinear(2), r"extra\.weight.*lazy"),
    ],
)
def test_what_cannot_be_saved_is_named_when_the_run_is_made(
    yard: Yard, odd: object, path: str
) -> None:
    with pytest.raises(Refused, match=path):
        TrainRun(yard, RUN, {"model": nn.Linear(2, 2), "extra": odd})
    assert yard.models() == []


def test_state_besides_tensors_that_is_too_large_is_named_when_the_run_is_made(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "MAX_STATE_BYTES", 40_000)
    state = {"model": nn.Linear(2, 2), "small": Counter(), "seen": Counter("x" * 40_000)}
    with pytest.raises(TooLarge, match=r"^seen: .*at most 40000"):
        TrainRun(yard, RUN, state)
    assert yard.models() == []
    TrainRun(yard, RUN, {**state, "seen": Counter("x" * 10_000)}).close()


def test_names_and_optimizers_that_do_not_fit_are_refused(yard: Yard) -> None:
    for name in ("a.b", "step", "rng", "", "1x"):
        with pytest.raises(Refused, match="state"):
            TrainRun(yard, RUN, {name: Counter()})
    module: Any = nn.Linear(2, 2)
    with pytest.raises(Refused, match=r"state is a Linear: .*\"model\""):
        TrainRun(yard, RUN, module)
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(Refused, match="no module of the state"):
        TrainRun(yard, RUN, {"model": nn.Linear(2, 2), "optim": stranger})
    for given in (
        {"async_mode": "maybe"},
        {"export_dtype": "int8"},
        {"keep_latest_k": 0},
        {"delta": "yes"},
    ):
        with pytest.raises(BadSetting):
            TrainRun(yard, RUN, {"model": nn.Linear(2, 2)}, **given)
    with pytest.raises(BadSetting, match="metrics: a TrainRun has no such option"):
        train(yard, 1, metrics={"loss": 1.0})
    with pytest.raises(BadSetting, match=r"exclude_from_loading.*optim"):
        TrainRun(yard, RUN, {"model": nn.Linear(2, 2)}, exclude_from_loading=["optim"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"interval": 2.5}, "interval=2.5: a whole number"),
        ({"interval": "10"}, "interval='10': a whole number"),
        ({"interval_s": "60"}, "interval_s='60': a number"),
        ({"load_step": "3"}, "load_step='3': a whole number"),
        ({"seed": -1}, "seed=-1: a whole number"),
        ({"seed": "x"}, "seed='x': a whole number"),
        ({"keep_latest_k": "all"}, "keep_latest_k"),
        ({"keep_every": 2.5}, "keep_every"),
        ({"keep_best": "loss"}, "keep_best"),
        ({"exclude_from_loading": 5}, "exclude_from_loading=5: a text, or a list"),
        ({"exclude_from_loading": [5]}, r"exclude_from_loading=\[5\]: a text, or a list"),
        ({"exclude_from_loading": "model"}, "exclude_from_loading: the state has no model"),
        ({"anchors_folder": 5}, "5 is no path"),
        ({"replication": 0}, "replication"),
        ({"policy": "no policy"}, "policy"),
        ({"threads": -1}, "threads=-1: a whole number of at least 1"),
        ({"threads": "2"}, "threads='2': a whole number"),
        ({"anchor_every": "5"}, "anchor_every='5': a whole number"),
        ({"anchors_bytes": "1G"}, "anchors_bytes='1G': a whole number"),
        ({"signals": signal.SIGUSR1}, "signals=.*a list"),
        ({"signals": ["USR1"]}, "signals="),
        ({"signals": [signal.SIGUSR1, signal.SIGKILL]}, "signals=.*SIGKILL"),
    ],
)
def test_options_that_a_later_save_or_resume_would_fail_of_are_refused_when_the_run_is_made(
    yard: Yard, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadSetting, match=said):
        TrainRun(yard, RUN, {"extra": Counter()}, **given)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize(
    "metrics", [0.5, {3: 0.5}, {"a\0b": 0.5}, {"\ud800": 0.5}, {str(n): 0.5 for n in range(2000)}]
)
def test_metrics_that_no_checkpoint_can_have_are_refused_in_their_step_which_does_not_count(
    yard: Yard, metrics: Any
) -> None:
    with TrainRun(yard, RUN, {"extra": Counter()}) as run:
        with pytest.raises(BadSetting, match="metrics"):
            run.step(metrics)
        assert run.steps == 0


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_tensor_that_is_still_to_be_added_up_is_named_when_the_run_is_made(
    yard: Yard, mesh: DeviceMesh
) -> None:
    loss = DTensor.from_local(torch.tensor(0.5), mesh, [Partial()])
    with pytest.raises(Refused, match=r"extra\.state.*added up"):
        TrainRun(yard, RUN, {"extra": Counter(loss)})


def test_a_metric_of_which_each_rank_has_a_part_is_refused(yard: Yard, mesh: DeviceMesh) -> None:
    """The norm of sharded gradients may be one: read by the first rank it would be its part."""
    with TrainRun(yard, RUN, {"extra": Counter()}, interval=1) as run:
        part, whole = (
            DTensor.from_local(torch.tensor(0.5), mesh, [placed])
            for placed in (Partial(), Replicate())
        )
        with pytest.raises(BadSetting, match=r"metrics\.norm.*full_tensor"):
            run.step({"norm": part})
        with pytest.raises(BadSetting, match=r"metrics\.norm.*full_tensor"):
            run.publish("team/out", metrics={"norm": part})
        run.step({"norm": whole})
    assert yard.resolve(RUN).metrics == {"norm": 0.5}


def stage(world: World, rank: int, width: int, name: str) -> Outcome:
    """A pipeline's, which has layers of its own and others that all have."""
    net = nn.ModuleDict({"all": nn.Linear(3, 3), name: nn.Linear(3, width + rank)})
    with world.yard(rank) as yard:
        return attempt(lambda: TrainRun(yard, RUN, {"model": net}).close())


def test_tensors_of_one_name_that_are_others_on_other_ranks_are_refused_on_all(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    for came in run_ranks(world, partial(stage, width=4, name="last"), size=2).values():
        assert came.error == "Refused"
        assert "model.last.weight is [4, 3] of torch.float32 on rank 0 and [5, 3]" in came.message
    assert {one.error for one in run_ranks(world, own_stage, size=2).values()} == {""}


def own_stage(world: World, rank: int) -> Outcome:
    return stage(world, rank, 4, f"stage{rank}")
