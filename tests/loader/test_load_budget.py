"""A load keeps to the memory it is given besides its tensors, measured."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from late_device import LateDevice
from loader_world import BERT, noise, same, yard_in

from weightyard.codec.arena import ARENA_BYTES
from weightyard.errors import BadSetting
from weightyard.format.block import MIB
from weightyard.loader import state, stored
from weightyard.loader.asked import Asked
from weightyard.loader.budget import READS_AT_ONCE, Budget
from weightyard.loader.load import plan
from weightyard.loader.origin import Destination
from weightyard.loader.stored import StoreOrigin
from weightyard.transfer.decoding import cores
from weightyard.transfer.reader import Reader
from weightyard.yard import Yard

STATE = {f"layer.{number:02}": noise(2048, 1024, seed=number) for number in range(32)}
STATE_BYTES = 32 * 4 * MIB
BOUND = 64 * MIB
ARENAS_BYTES = READS_AT_ONCE * cores() * ARENA_BYTES
"""Of threads that decode: reserved, and mostly never touched."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with yard_in(tmp_path_factory.mktemp("budget")) as opened:
        opened.push(STATE, BERT)
        yield opened


@pytest.fixture(autouse=True)
def _seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for large tensors comes from NumPy: what is mapped would not be measured."""
    monkeypatch.setattr(state, "fresh_memory", lambda length: np.empty(length, np.uint8))


def most_bytes(work: Callable[[], object]) -> int:
    """The most memory at once, of that which NumPy has: torch's own is not seen."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "how",
    [{"dtype": "float32"}, {"slices": {"*": (slice(None), slice(0, 1000))}}],
    ids=["cast", "picked"],
)
def test_the_host_takes_no_more_than_it_is_told(yard: Yard, how: dict[str, Any]) -> None:
    unbound = most_bytes(lambda: yard.load(BERT, **how))
    bound = most_bytes(lambda: yard.load(BERT, max_host_bytes=BOUND, **how))
    assert bound < BOUND + ARENAS_BYTES < unbound


@pytest.mark.parametrize("device_decode", [False, True])
def test_a_ring_and_its_reads_take_no_more_than_they_are_told(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, device_decode: bool
) -> None:
    device = LateDevice()
    monkeypatch.setattr(stored, "AcceleratorCopies", lambda _: device)
    asked = Asked(device_decode=device_decode, budget=Budget(BOUND, 20 * MIB))
    origin = yard._origin(BERT, asked, cache=False)
    assert isinstance(origin, StoreOrigin)
    plans = plan(origin, asked)
    found: dict[str, torch.Tensor] = {}

    def load() -> None:
        for one, tensor in origin.tensors(plans, asked, Destination(torch.device("meta"))):
            found[one.name] = tensor

    read = most_bytes(load)
    slabs = sum(one.nbytes for one in device.slabs)
    assert same(found, STATE)
    assert read + slabs < BOUND + ARENAS_BYTES
    assert slabs < BOUND / 2
    extra = device.made_bytes - STATE_BYTES
    assert extra == (8 * MIB if device_decode else 0), "with what it allocates to work, 20 MiB"


def test_reads_at_once_share_half_of_the_bound(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def made(*parts: Any, max_host_bytes: int, **options: Any) -> Reader:
        told.append(max_host_bytes)
        return Reader(*parts, max_host_bytes=max_host_bytes, **options)

    monkeypatch.setattr(stored, "Reader", made)
    assert same(yard.load(BERT, max_host_bytes=BOUND), STATE)
    assert set(told) == {BOUND // 2 // READS_AT_ONCE}, "which a reader keeps to"


def test_a_bound_under_which_nothing_can_be_read_is_refused(yard: Yard) -> None:
    for how in ({"max_host_bytes": MIB}, {"max_device_extra_bytes": MIB}):
        with pytest.raises(BadSetting, match=f"{next(iter(how))} is {MIB}"):
            yard.load(BERT, **how)  # type: ignore[arg-type]
