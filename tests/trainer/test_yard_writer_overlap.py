"""Saves that overlap on one writer: the one under way is unharmed, the others are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from trainer_world import RUN, World, attempt
from waiting import SOON_S

from weightyard.errors import StoreUnavailable
from weightyard.testing.faults import FaultyStore
from weightyard.trainer.writer import YardWriter
from weightyard.yard import Yard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with World(tmp_path, str(tmp_path / "store")).yard(0) as opened:
        yield opened


@pytest.fixture
def alone() -> Iterator[None]:
    """`async_save` wants a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Held:
    """A store whose first publish waits until it is let go."""

    def __init__(self, yard: Yard, then: Callable[[], None] = lambda: None) -> None:
        self.has_begun, self.may_go = threading.Event(), threading.Event()
        self._then = then
        store = FaultyStore(yard.store, on_call=self._hold)
        self.yard = Yard(store, yard.catalogue, block_bytes=yard.block_bytes)

    def _hold(self, index: int, name: str) -> None:
        if name == "publish" and not self.has_begun.is_set():
            self.has_begun.set()
            assert self.may_go.wait(SOON_S)
            self._then()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that overlap here do so until the test ends one: no need to wait for it."""
    monkeypatch.setattr("weightyard.trainer.writer._ENDING_S", 0.05)


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((200, 200), float(step))}


def save(writer: YardWriter, step: int) -> None:
    dcp.save(weights(step), checkpoint_id=step, storage_writer=writer, no_dist=True)


def require_own_weights(yard: Yard, steps: list[int]) -> None:
    assert [one.step for one in yard.versions(RUN)] == steps
    for step in steps:
        assert torch.equal(yard.load(f"{RUN}@step-{step}")["w"], weights(step)["w"])


def test_a_save_that_overlaps_another_is_refused_and_each_step_has_its_own_weights(
    yard: Yard, alone: None, impatient: None
) -> None:
    held = Held(yard)
    with YardWriter(held.yard, RUN) as writer:
        first = async_save(writer, 1)
        assert held.has_begun.wait(SOON_S)
        refused = [attempt(async_save(writer, step).result) for step in (2, 3)]
        held.may_go.set()
        first.result(SOON_S)
        assert [one.failures for one in refused] == [{0: "Conflict"}] * 2
        assert "a save of step-1 is still under way" in refused[0].message
        async_save(writer, 4).result(SOON_S)
    require_own_weights(yard, [4, 1])


def async_save(writer: YardWriter, step: int) -> Future[None]:
    begun = dcp.async_save(weights(step), checkpoint_id=step, storage_writer=writer)
    assert isinstance(begun, Future)
    return begun


def test_saves_that_begin_at_once_commit_only_what_they_name(
    yard: Yard, alone: None, impatient: None
) -> None:
    with YardWriter(yard, RUN) as writer:
        begun = {step: async_save(writer, step) for step in range(1, 6)}
        done = [step for step, future in begun.items() if attempt(future.result).error == ""]
    assert done
    committed = [one.step for one in yard.versions(RUN) if one.step is not None]
    assert sorted(committed) == done
    require_own_weights(yard, committed)


def test_a_save_that_failed_is_in_nobodys_way(yard: Yard) -> None:
    def fail() -> None:
        raise StoreUnavailable("the disk is gone")

    held = Held(yard, fail)
    held.may_go.set()
    with YardWriter(held.yard, RUN) as writer, ThreadPoolExecutor(1) as pool:
        assert attempt(pool.submit(save, writer, 1).result).failures == {0: "StoreUnavailable"}
        save(writer, 2)  # while the thread of the other still lives
    require_own_weights(yard, [2])
