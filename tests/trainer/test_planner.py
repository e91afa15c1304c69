"""Plans of saves: each rank knows what to write, and what is as before does not travel."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from trainer_world import RUN, World, attempt, run_ranks

from weightyard.errors import StoreUnavailable
from weightyard.trainer.job import Job
from weightyard.trainer.planner import ITEMS, PlannerOfItems
from weightyard.trainer.saving import Save, Saver
from weightyard.trainer.writer import YardWriter

Items = dict[str, Any]
Planned = tuple[dict[int, SavePlan], set[str]]
"""The plan of each rank that got one, and the names there are."""


class Ranks:
    """Planners that save together, as torch calls them."""

    def __init__(self, count: int) -> None:
        self.planners = [PlannerOfItems() for _ in range(count)]
        self.travelled = 0
        """Items of the plans that were sent in the last save, to the first rank and back."""

    def save(
        self, states: Sequence[Items], *, fails_in: str = "", fails_at: int = 0
    ) -> Planned | None:
        """None of a save that failed on some rank before there was a plan for all."""
        try:
            return self._planned(states, fails_in, fails_at)
        finally:
            for planner in self.planners:
                planner.forget()

    def _planned(self, states: Sequence[Items], fails_in: str, fails_at: int) -> Planned | None:
        mine = []
        for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True)):
            if fails_in != "local plan" or rank != fails_at:
                planner.set_up_planner({ITEMS: state}, is_coordinator=rank == 0)
                mine.append(planner.create_local_plan())
        if fails_in in ("local plan", "sending"):
            return None
        told, metadata = self.planners[0].create_global_plan(mine)
        self.travelled = sum(len(plan.items) for plan in (*mine, *told))
        if fails_in == "global plan":
            return None
        plans = {
            rank: planner.finish_plan(told[rank])
            for rank, planner in enumerate(self.planners)
            if fails_in != "final plan" or rank != fails_at
        }
        return plans, set(metadata.state_dict_metadata)


def saved(ranks: Ranks, *states: Items) -> Planned:
    came = ranks.save(states)
    assert came is not None
    return came


def weights(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Items:
    return {name: torch.zeros(shape, dtype=dtype), "both": torch.zeros(4)}


def tensors_of(plan: SavePlan) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        item.index.fqn: (item.tensor_data.size, item.tensor_data.properties.dtype)
        for item in plan.items
        if item.tensor_data is not None
    }


def test_a_state_as_before_is_planned_as_before_and_its_plans_do_not_travel() -> None:
    ranks = Ranks(2)
    first, names = saved(ranks, weights("a", 3), weights("b", 5))
    assert names == {"a", "b", "both"}
    assert ranks.travelled > 0
    for _ in range(2):
        assert saved(ranks, weights("a", 3), weights("b", 5)) == (first, names)
        assert ranks.travelled == 0


def test_a_tensor_that_becomes_another_is_planned_anew_on_its_rank() -> None:
    ranks = Ranks(2)
    saved(ranks, weights("a", 3), weights("b", 5))
    plans, _ = saved(ranks, weights("a", 3), weights("b", 5, dtype=torch.bfloat16))
    assert tensors_of(plans[1])["b"] == (torch.Size([5]), torch.bfloat16)
    assert ranks.travelled < 5
    plans, names = saved(ranks, weights("a", 3), weights("new", 5))
    assert "new" in tensors_of(plans[1])
    assert names == {"a", "new", "both"}


def test_a_rank_that_did_not_hear_the_answer_is_told_all_of_it_the_next_time() -> None:
    """What both have is the first one's to write; without it there, it is the other's."""
    ranks = Ranks(2)
    saved(ranks, weights("a", 3), weights("b", 5))
    only = {"a": torch.zeros(3)}
    ranks.save([only, weights("b", 5)], fails_in="final plan", fails_at=1)
    plans, _ = saved(ranks, only, weights("b", 5))
    assert set(tensors_of(plans[0])) == {"a"}
    assert set(tensors_of(plans[1])) == {"b", "both"}
    saved(ranks, only, weights("b", 5))
    assert ranks.travelled == 0


def test_a_state_that_comes_back_after_a_save_that_failed_is_not_taken_for_the_one_it_had() -> None:
    ranks = Ranks(1)
    saved(ranks, weights("a", 3))
    ranks.save([weights("other", 3)], fails_in="global plan")
    _, names = saved(ranks, weights("a", 3))
    assert names == {"a", "both"}


FAILURES = ("", "local plan", "sending", "global plan", "final plan")
"""Where a save may fail; of what fails after the plans, planners do not hear."""

TENSORS = st.sampled_from([torch.zeros(3), torch.zeros(9), torch.zeros(3, dtype=torch.int8)])
STATES = st.fixed_dictionaries(
    {}, optional={"a": TENSORS, "b": TENSORS, "both": TENSORS, "said": st.just((1, 2))}
)


@given(st.data(), st.integers(1, 3))
def test_whatever_changes_and_whichever_saves_fail_each_rank_plans_as_it_would_anew(
    data: st.DataObject, count: int
) -> None:
    ranks = Ranks(count)
    known = st.sampled_from([data.draw(STATES), data.draw(STATES)])  # so that one comes back
    for _ in range(data.draw(st.integers(2, 6))):
        states = [data.draw(known) for _ in range(count)]
        fails_in, fails_at = data.draw(st.sampled_from(FAILURES)), data.draw(st.integers(0, 2))
        if (came := ranks.save(states, fails_in=fails_in, fails_at=fails_at % count)) is None:
            continue
        plans, names = came
        planners = [DefaultSavePlanner() for _ in range(count)]
        for planner, state in zip(planners, states, strict=True):
            planner.set_up_planner(state)
        anew, metadata = planners[0].create_global_plan(
            [planner.create_local_plan() for planner in planners]
        )
        assert plans == {rank: anew[rank] for rank in plans}
        assert names == set(metadata.state_dict_metadata)


def test_nothing_of_a_state_is_held_when_it_is_saved() -> None:
    ranks = Ranks(1)
    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    plans, _ = saved(ranks, {"a": tensor})
    del tensor
    gc.collect()
    assert held() is None
    assert set(tensors_of(plans[0])) == {"a"}


class Failing(YardWriter):
    """Fails where it is told to."""

    fails_in = ""

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        self._fail("set_up_storage_writer")
        super().set_up_storage_writer(*args, **kwargs)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._fail("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._fail("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._fail("finish")
        super().finish(metadata, results)

    def _fail(self, phase: str) -> None:
        if phase == self.fails_in:
            self.fails_in = ""
            raise StoreUnavailable(f"in {phase}")


PHASES = [
    (0, "set_up_storage_writer"),
    (1, "set_up_storage_writer"),
    (0, "prepare_global_plan"),
    (0, "write_data"),
    (1, "write_data"),
    (0, "finish"),
]
"""Each of them on the rank that fails in it."""


def state_of(rank: int, step: int) -> Items:
    """A tensor that becomes longer on one rank, one that moves, and one that both have."""
    own = torch.full((300 + step * (rank == step % 2),), float(step))
    moving = {"moving": torch.full((300,), float(step))} if rank == step % 3 else {}
    return {f"own{rank}": own, "both": torch.full((300,), float(step)), **moving}


def saved_in_spite_of(world: World, rank: int) -> list[str]:
    errors = []
    with world.yard(rank) as yard, Failing(yard, RUN) as writer:
        job = Job()
        with job, Saver(writer, job, lambda: None, in_background=True) as saver:
            for number, (fails_at, phase) in enumerate(PHASES):
                for step in (3 * number, 3 * number + 1, 3 * number + 2):
                    if step % 3 == 1 and rank == fails_at:
                        writer.fails_in = phase
                    saver.save(Save(step, state_of(rank, step), {}))
                    errors.append(attempt(saver.wait).message)
    return errors


def test_saves_after_one_that_failed_have_what_the_state_has_become(tmp_path: Path) -> None:
    world = World(tmp_path, str(tmp_path / "store"))
    expected = [message for _, phase in PHASES for message in ("", f"in {phase}", "")]
    assert run_ranks(world, saved_in_spite_of, size=2) == {0: expected, 1: expected}
    with world.yard(99) as yard:
        steps = [one.step for one in yard.versions(RUN)]
        assert steps == [step for step in reversed(range(3 * len(PHASES))) if step % 3 != 1]
        for step in steps:
            assert step is not None
            loaded = yard.load(f"{RUN}@step-{step}")
            state = state_of(0, step) | state_of(1, step)
            assert loaded.keys() == state.keys()
            assert all(torch.equal(loaded[name], state[name]) for name in state)
