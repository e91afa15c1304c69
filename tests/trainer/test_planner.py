"""Plans of saves: each rank knows what to write, and what is as before does not travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan

from weightyard.trainer.planner import ITEMS, PlannerOfItems

Items = dict[str, Any]


class Ranks:
    """Planners that save together, as torch calls them."""

    def __init__(self, count: int) -> None:
        self.planners = [PlannerOfItems() for _ in range(count)]
        self.travelled = 0
        """Items of the plans that were sent in the last save, to the first rank and back."""

    def save(
        self, states: Sequence[Items], *, fails_at: int | None = None
    ) -> tuple[list[SavePlan], set[str]]:
        """The plan of each rank, and the names there are; of a rank that failed, none."""
        mine = []
        for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True)):
            planner.set_up_planner({ITEMS: state}, is_coordinator=rank == 0)
            mine.append(planner.create_local_plan())
        told, metadata = self.planners[0].create_global_plan(mine)
        self.travelled = sum(len(plan.items) for plan in (*mine, *told))
        plans = []
        for rank, planner in enumerate(self.planners):
            if rank != fails_at:
                plans.append(planner.finish_plan(told[rank]))
            planner.forget()
        return plans, set(metadata.state_dict_metadata)


def weights(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Items:
    return {name: torch.zeros(shape, dtype=dtype), "both": torch.zeros(4)}


def planned(plan: SavePlan) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        item.index.fqn: (item.tensor_data.size, item.tensor_data.properties.dtype)
        for item in plan.items
        if item.tensor_data is not None
    }


def test_a_state_as_before_is_planned_as_before_and_its_plans_do_not_travel() -> None:
    ranks = Ranks(2)
    first, names = ranks.save([weights("a", 3), weights("b", 5)])
    assert names == {"a", "b", "both"}
    assert ranks.travelled > 0
    for _ in range(2):
        assert ranks.save([weights("a", 3), weights("b", 5)]) == (first, names)
        assert ranks.travelled == 0


def test_a_tensor_that_becomes_another_is_planned_anew_on_its_rank() -> None:
    ranks = Ranks(2)
    ranks.save([weights("a", 3), weights("b", 5)])
    (_, plan), _ = ranks.save([weights("a", 3), weights("b", 5, dtype=torch.bfloat16)])
    assert planned(plan)["b"] == (torch.Size([5]), torch.bfloat16)
    assert ranks.travelled < 5
    (_, plan), names = ranks.save([weights("a", 3), weights("new", 5)])
    assert "new" in planned(plan)
    assert names == {"a", "new", "both"}


def test_a_rank_that_did_not_hear_the_answer_is_told_all_of_it_the_next_time() -> None:
    """What both have is the first one's to write; without it there, it is the other's."""
    ranks = Ranks(2)
    ranks.save([weights("a", 3), weights("b", 5)])
    only = {"a": torch.zeros(3)}
    ranks.save([only, weights("b", 5)], fails_at=1)
    (first, second), _ = ranks.save([only, weights("b", 5)])
    assert set(planned(first)) == {"a"}
    assert set(planned(second)) == {"b", "both"}
    ranks.save([only, weights("b", 5)])
    assert ranks.travelled == 0


def test_nothing_of_a_state_is_held_when_it_is_saved() -> None:
    ranks = Ranks(1)
    state = weights("a", 3)
    ranks.save([state])
    assert not ranks.planners[0].state_dict
