"""PlannerOfItems: plans the saves of a run; plans that are as in the last save are not sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from weightyard.errors import Bug
from weightyard.trainer.packing import Items

ITEMS = "items"
"""The name under which it is given all items, as one value: torch writes two debugging records for
each value, which took half of the time of a save's planning, while training goes on."""

_AS_BEFORE = "as before"


class PlannerOfItems(DefaultSavePlanner):
    """One for all saves of a writer, on every rank.

    torch sends the plans of all ranks to the first and back, as dozens of Python objects for each
    tensor. Making them keeps cores from the training, and collecting garbage among so many more
    objects keeps its interpreter. (torch's own cache of plans is one for the process, whoever
    saves.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._mine: SavePlan | None = None
        self._sent: SavePlan | None = None
        """The plan of this rank that the first one has, and has answered by `_final`."""
        self._final: SavePlan | None = None
        self._theirs: list[SavePlan] = []
        self._answers: list[SavePlan] = []
        self._global: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        items: Items = state_dict[ITEMS]
        super().set_up_planner(items, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self._mine = super().create_local_plan()
        is_known = self._mine == self._sent
        self._sent = None  # until answered: if this save fails, the first rank may keep another
        return _as_before() if is_known else self._mine

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The metadata has only names: all ranks get it when a save has ended."""
        is_known = [plan.planner_data == _AS_BEFORE for plan in all_plans]
        if any(is_known) and len(self._theirs) != len(all_plans):
            raise Bug("plans as before of ranks that were not there before")
        if not all(is_known):
            theirs = [
                self._theirs[rank] if is_known[rank] else plan
                for rank, plan in enumerate(all_plans)
            ]
            answers, metadata = super().create_global_plan(theirs)
            names: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
            is_known = [
                known and answer == self._answers[rank]
                for rank, (known, answer) in enumerate(zip(is_known, answers, strict=True))
            ]
            self._theirs, self._answers = theirs, answers
            self._global = replace(metadata, state_dict_metadata=names)
        assert self._global is not None, "no rank knows an answer that was not given"
        told = [
            _as_before() if known else answer
            for known, answer in zip(is_known, self._answers, strict=True)
        ]
        return told, self._global

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.planner_data == _AS_BEFORE:
            assert self._final is not None, "the first rank was told so"
            new_plan = replace(self._final, storage_data=new_plan.storage_data)
        self._sent, self._final = self._mine, new_plan
        return super().finish_plan(new_plan)

    def forget(self) -> None:
        """Hold nothing of the state that was saved."""
        self.state_dict = {}


def _as_before() -> SavePlan:
    return SavePlan([], planner_data=_AS_BEFORE)
