"""Many loads in a row, of every kind, leave nothing behind."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hdfs_world import by_service, straight
from late_device import LateDevice
from loader_world import BERT, leases, noise, our_threads, same, yard_in
from snapshot_world import leftovers
from torch import nn
from waiting import SOON_S, eventually

from weightyard.errors import DeadlineExceeded, NoSuchThing
from weightyard.format.block import MIB
from weightyard.loader import stored
from weightyard.loader.asked import Asked
from weightyard.loader.load import plan
from weightyard.loader.origin import Destination
from weightyard.loader.stored import StoreOrigin
from weightyard.registry.database import Database
from weightyard.testing.cluster import MiniCluster
from weightyard.transfer.settling import Settling
from weightyard.yard import Yard

STATE = {
    **{f"layers.{number}.weight": noise(512, 512, seed=number) for number in range(8)},
    "small": noise(9, seed=100),
}
STATE_BYTES = sum(one.nbytes for one in STATE.values())

FIRST = 25
"""Loads before anything is measured: pools, caches and the allocator have what they keep."""

WRITING = ("weightyard-records", "weightyard-stage")

KINDS = 8
TIMES = 8
"""How often each kind of load comes at least: one that leaves something behind leaves so many.

Less than that is a pool that met a busier moment: it keeps a thread or a connection for the next.
"""


@dataclass(frozen=True)
class World:
    yard: Yard
    cache: Path
    database: Database


@pytest.fixture(
    params=[
        "local",
        pytest.param("straight", marks=pytest.mark.cluster),
        pytest.param("by service", marks=pytest.mark.cluster),
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as opened:
        if request.param == "local":
            yard = opened.enter_context(yard_in(tmp_path))
            database = yard.registry.database
        elif request.param == "straight":
            cluster = request.getfixturevalue("cluster")
            yard = opened.enter_context(straight(cluster, tmp_path, cache_loads=True))
            database = yard.registry.database
        else:
            cluster = request.getfixturevalue("cluster")
            yard, database = opened.enter_context(by_service(cluster, tmp_path))
        yard.push(STATE, BERT)
        yield World(yard, tmp_path / "cache", database)


@dataclass(frozen=True)
class Held:
    """What this process has."""

    threads: tuple[str, ...]
    files: int
    resident_bytes: int


def held(world: World) -> Held:
    assert world.yard.byproducts.wait(60)
    wait_for_records()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for the next is nobody's
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        tuple(one.name for one in threading.enumerate()),
        len(os.listdir("/proc/self/fd")),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


def wait_for_records() -> None:
    """Whoever published, the yard or a service in this process, writes records behind that."""
    until = time.monotonic() + 60
    while any(one.name.startswith(WRITING) for one in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def load(world: World, turn: int) -> None:
    """One load, each turn in another way, some of which fail."""
    yard = world.yard
    match turn % KINDS:
        case 0 | 1:
            assert same(yard.load(BERT, cache=False), STATE)
        case 2:
            assert same(yard.load(BERT), STATE), "of the snapshot, if there is one"
        case 3:
            for _ in yard.stream(BERT, cache=False, ahead_bytes=MIB):
                break  # left early
        case 4:
            with yard.safe_open(BERT, cache=False) as lazy:
                lazy.get_slice("layers.3.weight")[7:9]
        case 5:
            with pytest.raises(DeadlineExceeded):
                yard.load(BERT, cache=False, timeout=1e-6)
        case 6:
            layers = (nn.Linear(512, 512, False, dtype=torch.bfloat16) for _ in range(8))
            module = nn.ModuleDict({"layers": nn.ModuleList(layers)})
            yard.load_into(module, BERT, tensors="layers.*", cache=False)
        case 7:
            with pytest.raises(NoSuchThing):
                yard.load(BERT, tensors="none")
            yard.snapshot(BERT)
            if turn % 32 == 31:
                for one in yard.snapshots.listed():
                    yard.snapshots.remove(one.place)


STEADY_BYTES = 24 * MIB
"""What the heap of a process may vary by: a leak of a hundredth of each load is more."""

ROUNDS = 3
"""A leak grows in every round. The heap of a process that ran other tests may, in one."""


def grown_bytes(world: World, work: Callable[[], object]) -> int:
    """By how much this process grows; of threads and files it has no more."""
    before = held(world)
    work()
    after = held(world)
    assert set(after.threads) <= set(before.threads)
    assert len(after.threads) < len(before.threads) + TIMES
    assert after.files < before.files + TIMES
    return after.resident_bytes - before.resident_bytes


def load_many(world: World, turns: Iterable[int]) -> None:
    for turn in turns:
        load(world, turn)


def test_loads_in_a_row_leave_nothing_behind(world: World) -> None:
    load_many(world, range(FIRST))
    loads = KINDS * TIMES
    allowed = loads * STATE_BYTES // 10
    grown: list[int] = []
    while not grown or (grown[-1] >= allowed and len(grown) < ROUNDS):
        turns = range(FIRST, FIRST + loads)
        grown.append(grown_bytes(world, lambda turns=turns: load_many(world, turns)))
    assert grown[-1] < allowed, f"far less than what was loaded, in one round of {grown}"
    assert leases(world.database) == 0
    assert leftovers(world.cache) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_of_a_thousand_loads_the_last_seven_hundred_add_nothing(world: World) -> None:
    load_many(world, range(300))
    assert grown_bytes(world, lambda: load_many(world, range(300, 1000))) < STEADY_BYTES
    assert leases(world.database) == 0
    assert leftovers(world.cache) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_hundred_versions_that_are_followed_and_applied_leave_nothing_behind(
    world: World,
) -> None:
    yard = world.yard
    states = {1: STATE, 2: {name: one + 1 for name, one in STATE.items()}}
    yard.push(states[2], BERT)
    yard.set_alias(BERT, "prod", 1)
    weights = yard.load(f"{BERT}@prod", cache=False)

    def there_and_back(times: int) -> None:
        for number in (2, 1) * times:
            yard.set_alias(BERT, "prod", number)
            ready = follower.wait(SOON_S)
            assert ready is not None, follower.failure
            assert ready.number == number
            follower.apply()
            assert same(weights, states[number])

    with yard.follow(f"{BERT}@prod", weights, poll_s=0.02) as follower:
        there_and_back(15)
        assert grown_bytes(world, lambda: there_and_back(50)) < STEADY_BYTES
    eventually(lambda: leases(world.database) == 0)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_hundred_loads_onto_a_device_leave_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AcceleratorCopies", lambda _: LateDevice())

    def load_onto(times: int) -> None:
        for turn in range(times):
            asked = Asked(device_decode=turn % 2 == 1)
            origin = world.yard._origin(BERT, asked, cache=False)
            assert isinstance(origin, StoreOrigin)
            there = Destination(torch.device("meta"))
            found = origin.tensors(plan(origin, asked), asked, there)
            assert same({one.name: tensor for one, tensor in found}, STATE)

    load_onto(30)
    assert grown_bytes(world, lambda: load_onto(100)) < STEADY_BYTES
    assert leases(world.database) == 0


@pytest.mark.cluster
def test_the_threads_of_a_store_end_with_its_yard(cluster: MiniCluster, tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def new() -> list[threading.Thread]:
        ours = (one for one in threading.enumerate() if one.name.startswith("weightyard"))
        return [one for one in ours if one not in before]

    with straight(cluster, tmp_path) as yard:
        yard.push(STATE, BERT)
        assert same(yard.load(BERT), STATE)
        wait_for_records()
        assert {one.name for one in new()} == {"weightyard-watched"}
    for one in new():
        one.join(SOON_S)
    assert not new()


def test_a_closed_yard_has_no_thread_left_that_wrote_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_more, is_ending = Settling._is_more, threading.Event()

    def ends_late(settling: Settling) -> bool:
        if is_more(settling):
            return True
        is_ending.set()
        time.sleep(0.2)
        return False

    monkeypatch.setattr(Settling, "_is_more", ends_late)
    with yard_in(tmp_path) as yard:
        yard.push(STATE, BERT)
        assert is_ending.wait(SOON_S)
    assert our_threads() == []
