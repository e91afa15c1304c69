"""A load keeps to the memory it is given besides its tensors, measured."""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hdfs_world import straight
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
from weightyard.loader.peers import Alone
from weightyard.loader.report import Tally
from weightyard.loader.shared import load_shared
from weightyard.loader.stored import StoreOrigin
from weightyard.testing.cluster import MiniCluster
from weightyard.transfer.reader import Reader
from weightyard.yard import Yard

STATE = {
    **{f"layer.{number:02}": noise(2048, 1024, seed=number) for number in range(12)},
    "z.large": noise(40 * 1024, 1024, seed=99),
}
STATE_BYTES = 128 * MIB
BOUND = 64 * MIB
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with yard_in(tmp_path_factory.mktemp("budget")) as opened:
        opened.push(STATE, BERT)
        yield opened


@pytest.fixture(autouse=True)
def _seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for tensors comes from NumPy: what is mapped, or torch's, would not be measured."""
    monkeypatch.setattr(state, "fresh_memory", lambda length: np.empty(length, np.uint8))
    monkeypatch.setattr(state, "_LARGE_BYTES", 1)


def most_bytes(work: Callable[[], Tensors]) -> int:
    """The most memory at once besides the tensors that come of it: reserved, or really touched."""
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    tracemalloc.start()
    try:
        made = work()
        most = max(tracemalloc.get_traced_memory()[1], _status("VmHWM") - before)
    finally:
        tracemalloc.stop()
    return most - sum(one.nbytes for one in made.values())


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def by_group(yard: Yard, *, max_host_bytes: int | None = None, **how: Any) -> Tensors:
    """The tensors, loaded by a group of one rank."""
    tally = Tally()
    return load_shared(
        Alone(),
        lambda: yard._version_to_use(BERT),
        lambda version, asked: yard._origin_of(version, asked, tally, cache=False, leaves=False),
        Asked(**how, budget=Budget(max_host_bytes)),
        "cpu",
    )


def alone(yard: Yard, **how: Any) -> Tensors:
    return yard.load(BERT, cache=False, **how)


COLUMNS = {"*": (slice(None), slice(0, 1000))}


@pytest.mark.parametrize(
    ("load", "how"),
    [
        (alone, {}),
        (alone, {"dtype": "float32"}),
        (alone, {"slices": COLUMNS}),
        (alone, {"slices": COLUMNS, "dtype": "float32"}),
        (by_group, {"dtype": "float32"}),
        (by_group, {"slices": {"*": slice(0, 4096)}}),
    ],
    ids=["plain", "cast", "picked", "picked and cast", "group, cast", "group, rows"],
)
def test_the_host_takes_no_more_than_it_is_told(
    yard: Yard, load: Callable[..., Tensors], how: dict[str, Any]
) -> None:
    assert most_bytes(lambda: load(yard, max_host_bytes=BOUND, **how)) < BOUND


@pytest.mark.cluster
def test_the_host_takes_no_more_where_bytes_come_from_datanodes(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    with straight(cluster, tmp_path) as remote:
        remote.push(STATE, BERT)
        alone(remote, tensors="layer.00")  # what is made once for a store is not the load's
        assert most_bytes(lambda: alone(remote, max_host_bytes=BOUND)) < BOUND


def test_a_stream_that_casts_takes_no_more_besides_the_tensor_at_hand(yard: Yard) -> None:
    def read() -> Tensors:
        for _, tensor in yard.stream(
            BERT, tensors="layer.*", dtype="float32", cache=False, max_host_bytes=BOUND
        ):
            last = tensor
        return {"last": last}

    assert most_bytes(read) < BOUND


def test_without_a_bound_it_takes_more(yard: Yard) -> None:
    """The test above proves something."""
    assert most_bytes(lambda: alone(yard, dtype="float32")) > BOUND


@pytest.mark.parametrize("device_decode", [False, True])
def test_a_ring_and_its_reads_take_no_more_than_they_are_told(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, device_decode: bool
) -> None:
    device = LateDevice()
    monkeypatch.setattr(stored, "AcceleratorCopies", lambda _: device)
    asked = Asked(device_decode=device_decode, budget=Budget(BOUND, 20 * MIB))
    tracemalloc.start()
    try:
        found = onto_device(yard, asked)
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    slabs = sum(one.nbytes for one in device.slabs)
    assert same(found, STATE)
    assert read + slabs < BOUND
    assert slabs < BOUND / 2
    extra = device.made_bytes - STATE_BYTES
    assert extra == (8 * MIB if device_decode else 0), "with what it allocates to work, 20 MiB"


def onto_device(yard: Yard, asked: Asked) -> dict[str, torch.Tensor]:
    origin = yard._origin(BERT, asked, cache=False)
    assert isinstance(origin, StoreOrigin)
    there = Destination(torch.device("meta"))
    return {one.name: got for one, got in origin.tensors(plan(origin, asked), asked, there)}


@pytest.mark.parametrize("device_decode", [False, True])
def test_a_device_takes_no_more_than_it_is_told_to_cast(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, device_decode: bool
) -> None:
    device = LateDevice()
    monkeypatch.setattr(stored, "AcceleratorCopies", lambda _: device)
    asked = Asked(dtype="float32", device_decode=device_decode, budget=Budget(BOUND, 16 * MIB))
    found = onto_device(yard, asked)
    assert same(found, {name: one.float() for name, one in STATE.items()})
    besides = device.made_bytes - device.made[torch.float32]
    assert 0 < besides <= 16 * MIB


def test_reads_at_once_share_half_of_the_bound_with_those_who_decode(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []

    def made(*parts: Any, max_host_bytes: int, decoders: int, **options: Any) -> Reader:
        told.append((max_host_bytes, decoders))
        return Reader(*parts, max_host_bytes=max_host_bytes, decoders=decoders, **options)

    monkeypatch.setattr(stored, "Reader", made)
    for bound in (BOUND, 8 * BOUND):
        told.clear()
        assert same(yard.load(BERT, max_host_bytes=bound), STATE)
        ((reading, decoders),) = set(told)
        assert READS_AT_ONCE * (reading + decoders * ARENA_BYTES) == bound // 2


def test_a_bound_under_which_nothing_can_be_read_is_refused(yard: Yard) -> None:
    for how in ({"max_host_bytes": MIB}, {"max_device_extra_bytes": MIB}):
        with pytest.raises(BadSetting, match=f"{next(iter(how))} is {MIB}"):
            yard.load(BERT, **how)  # type: ignore[arg-type]
