"""Placing on a device, proved with one that copies late and spoils what is used too early."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from late_device import LateDevice
from loader_world import BERT, left_threads, noise, same, yard_in

from weightyard.errors import StoreUnavailable
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.manifest import Box, Extent, TensorEntry
from weightyard.loader import stored
from weightyard.loader.arriving import Arriving
from weightyard.loader.asked import Asked
from weightyard.loader.batches import one_by_one
from weightyard.loader.budget import Budget
from weightyard.loader.load import plan
from weightyard.loader.mapped import SnapshotOrigin
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.plan import plan_tensors
from weightyard.loader.report import Tally
from weightyard.loader.ring import RingPlacer
from weightyard.loader.state import bytes_of
from weightyard.loader.stored import StoreOrigin
from weightyard.yard import Yard

STATE = {
    "a.long": noise(4096, 2048),
    "b.small": noise(7, 3, seed=1),
    "c.scalar": torch.tensor(1.25),
    "d.empty": torch.empty(0, 2),
    "e.mask": torch.tensor([True, False, True]),
    **{f"layers.{number}": noise(512, 1024, seed=number) for number in range(12)},
}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with yard_in(tmp_path_factory.mktemp("ring")) as opened:
        opened.push(STATE, BERT)
        yield opened


def _loaded(
    yard: Yard,
    device: LateDevice,
    asked: Asked | None = None,
    *,
    placer: type[RingPlacer] = RingPlacer,
    targets: dict[str, torch.Tensor] | None = None,
    slab_bytes: int = 2 * MIB,
    slow_s: float = 0,
) -> dict[str, torch.Tensor]:
    asked = asked or Asked()
    origin = yard._origin(BERT, asked, cache=False)
    assert isinstance(origin, StoreOrigin)
    plans = plan(origin, asked)
    by_number = {
        number: targets[one.name]
        for number, one in enumerate(plans)
        if targets is not None and one.name in targets
    }
    placed = placer(
        plans,
        origin.tally,
        device,
        dtype=asked.torch_dtype,
        targets=by_number,
        slab_bytes=slab_bytes,
        slabs=2,
    )
    found = {}
    for one, tensor in origin.place_all(
        plans, asked, one_by_one(plans, slab_bytes), placed, 8 * MIB
    ):
        found[one.name] = tensor if targets else tensor.clone()  # as it is when it is handed over
        time.sleep(slow_s)
    return found


def test_tensors_arrive_whole_through_slabs_smaller_than_they_are(yard: Yard) -> None:
    device = LateDevice()
    assert same(_loaded(yard, device), STATE)
    assert [one.nbytes for one in device.slabs] == [2 * MIB] * 2
    assert device.waited > 5
    assert left_threads() == []


def test_a_slow_caller_changes_nothing(yard: Yard) -> None:
    assert same(_loaded(yard, LateDevice(), slow_s=0.01), STATE)


def test_the_device_notices_a_slab_that_is_used_too_early(yard: Yard) -> None:
    """The proof proves something: without the wait for the copies, bytes are wrong."""

    class Hasty(RingPlacer):
        @contextmanager
        def _slab(self) -> Iterator[Any]:
            slab = self._free.get()
            try:
                yield slab
            finally:
                self._free.put(slab)

    assert not same(_loaded(yard, LateDevice(), placer=Hasty), STATE)


def test_the_device_notices_a_tensor_handed_over_too_early(yard: Yard) -> None:
    """And without the wait at the end, some are not there yet."""

    class NotAsked(LateDevice):
        def hand_over(self) -> None:
            pass

    assert not same(_loaded(yard, NotAsked()), STATE)


def test_the_device_notices_a_copy_into_memory_that_is_still_in_use(yard: Yard) -> None:
    """And copies that do not wait for the stream in which their tensors were made are spoiled."""

    class NotFollowed(LateDevice):
        def follow(self) -> None:
            pass

    assert not same(_loaded(yard, NotFollowed()), STATE)


def test_what_other_ranks_read_arrives_through_slabs_shorter_than_it_is() -> None:
    shapes = {"long": (5 * MIB,), "picked": (1024, 4096)}
    shapes |= {f"short.{number}": (700_000,) for number in range(5)}
    saved = {name: torch.randint(0, 256, shape).byte() for name, shape in shapes.items()}
    columns = (slice(None), slice(5, 9))
    entries = [
        TensorEntry(
            name,
            None,
            DType.U8,
            shape,
            (Box((0,) * len(shape), shape, (Extent(block, 0, math.prod(shape)),)),),
            None,
        )
        for block, (name, shape) in enumerate(shapes.items())
    ]
    plans = plan_tensors(entries, {"picked": columns})
    placer = RingPlacer(plans, Tally(), LateDevice(), slab_bytes=2 * MIB, slabs=2)
    told: list[int] = []
    arriving = Arriving(plans, placer, told.append)
    whole = arriving.take(
        (Extent(block, 0, one.nbytes), bytes_of(one)) for block, one in enumerate(saved.values())
    )
    found = {plans[number].name: placer.finish(number) for number in whole}
    placer.close()
    assert same(found, saved | {"picked": saved["picked"][columns]})
    assert sum(told) == sum(one.nbytes for one in found.values())


def test_slices_and_casts_arrive_too(yard: Yard) -> None:
    asked = Asked(tensors=["a.*", "e.*", "layers.3"], dtype="float32",
                  slices={"a.*": (slice(None), slice(5, 9)), "layers.*": slice(7, 9)})  # fmt: skip
    assert same(
        _loaded(yard, LateDevice(), asked),
        {
            "a.long": STATE["a.long"][:, 5:9].float(),
            "e.mask": STATE["e.mask"],
            "layers.3": STATE["layers.3"][7:9].float(),
        },
    )


def test_targets_are_filled_where_they_are_also_of_another_dtype(yard: Yard) -> None:
    targets = {
        "a.long": torch.zeros(4096, 2048, dtype=torch.bfloat16),
        "b.small": torch.zeros(7, 3, dtype=torch.float32),
        "layers.1": torch.zeros(1024, 512, dtype=torch.bfloat16).t(),
    }
    asked = Asked(tensors=list(targets))
    found = _loaded(yard, LateDevice(), asked, targets=targets)
    assert all(found[name] is targets[name] for name in targets)
    assert same(
        targets,
        {
            "a.long": STATE["a.long"],
            "b.small": STATE["b.small"].float(),
            "layers.1": STATE["layers.1"],
        },
    )


@pytest.fixture
def mapped(yard: Yard) -> Yard:
    """A node that has a snapshot of the version."""
    yard.snapshot(BERT)
    return yard


def onto_late_device(
    yard: Yard,
    monkeypatch: pytest.MonkeyPatch,
    asked: Asked,
    targets: dict[str, torch.Tensor] | None = None,
) -> tuple[LateDevice, dict[str, torch.Tensor], Origin]:
    """What a load onto the late device gives, as it is when it is handed over."""
    device = LateDevice()
    monkeypatch.setattr(stored, "AcceleratorCopies", lambda _: device)
    origin = yard._origin(BERT, asked, cache=True)
    there = Destination(torch.device("meta"), targets or {})
    placed = origin.tensors(plan(origin, asked), asked, there)
    return device, {one.name: got if targets else got.clone() for one, got in placed}, origin


def test_a_snapshot_goes_through_the_slabs_too(
    mapped: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    asked = Asked(budget=Budget(64 * MIB), device_decode=True, progress=told.append)
    device, found, origin = onto_late_device(mapped, monkeypatch, asked)
    assert isinstance(origin, SnapshotOrigin)
    assert same(found, STATE)
    assert len(device.slabs) == 3
    assert device.waited > 0
    assert device.is_finished
    report = origin.report("late")
    total = sum(one.nbytes for one in STATE.values())
    assert report.cached_bytes == report.bytes == sum(told) == total
    assert report.stage_bytes == {"map": total, "place": total}
    assert left_threads() == []


def test_slices_casts_and_targets_come_from_a_snapshot_as_from_the_store(
    mapped: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = {"a.*": (slice(None, None, -3), slice(5, 9)), "layers.*": slice(7, 9)}
    asked = Asked(tensors=["a.*", "e.*", "layers.3"], dtype="float32", slices=slices)
    _, found, _ = onto_late_device(mapped, monkeypatch, asked)
    expected = {
        "a.long": STATE["a.long"].flip(0)[::3, 5:9].float(),
        "e.mask": STATE["e.mask"],
        "layers.3": STATE["layers.3"][7:9].float(),
    }
    assert same(found, expected)
    targets = {
        "a.long": torch.zeros(4096, 2048, dtype=torch.float32),
        "layers.1": torch.zeros(1024, 512, dtype=torch.bfloat16).t(),
        "layers.2": torch.zeros(512, 1024, dtype=torch.bfloat16),
    }
    _, found, _ = onto_late_device(mapped, monkeypatch, Asked(tensors=list(targets)), targets)
    assert all(found[name] is targets[name] for name in targets)
    assert same(found, {name: STATE[name].to(one.dtype) for name, one in targets.items()})


@pytest.mark.parametrize("device_decode", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_tensors_without_elements_need_no_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: bool, device_decode: bool
) -> None:
    state = {"a": torch.empty(0, 3), "b": torch.empty(2, 0, dtype=torch.bfloat16)}
    with yard_in(tmp_path) as yard:
        yard.push(state, BERT)
        if cache:
            yard.snapshot(BERT)
        asked = Asked(device_decode=device_decode, dtype="float16")
        _, found, _ = onto_late_device(yard, monkeypatch, asked)
    assert same(found, {name: one.half() for name, one in state.items()})


def test_after_a_failure_nothing_is_copied_any_more(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    read = type(yard.store).read
    calls = iter(range(1000))

    def failing(store: Any, location: Any, reads: Iterable[Any], **options: Any) -> Any:
        if "packs/" in location.path.text and next(calls) > 1:
            raise StoreUnavailable("injected")
        return read(store, location, list(reads), **options)

    monkeypatch.setattr(type(yard.store), "read", failing)
    with pytest.raises(StoreUnavailable):
        _loaded(yard, device)
    assert device.is_finished
    assert device.is_idle
    assert left_threads() == []


def test_one_that_is_left_early_leaves_no_thread_waiting_for_a_slab(
    yard: Yard, tmp_path: Path
) -> None:
    asked = Asked()
    origin = yard._origin(BERT, asked, cache=False)
    assert isinstance(origin, StoreOrigin)
    plans = plan(origin, asked)
    placer = RingPlacer(plans, origin.tally, LateDevice(), slab_bytes=MIB, slabs=2)
    tensors = origin.place_all(plans, asked, one_by_one(plans, MIB), placer, 8 * MIB)
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]
    assert left_threads() == []
