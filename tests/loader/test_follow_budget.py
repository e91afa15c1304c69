"""A follower keeps to the memory it is given, measured, and keeps little between two versions."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_world import BERT, left_threads, noise, same, yard_in
from waiting import SOON_S, eventually

from weightyard.client.blocks import ServiceReader
from weightyard.format.block import MIB
from weightyard.loader.changes import content_of, plan_changes
from weightyard.loader.follower import Follower
from weightyard.loader.plan import plan_tensors
from weightyard.loader.resident import Resident
from weightyard.loader.staging import WORKING_BYTES, Shares, Stage, StagedTensor, prepare
from weightyard.names import BlockId
from weightyard.storage.cancel import Cancel
from weightyard.transfer.memory import SpareMemory
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.yard import Yard

PROD = f"{BERT}@prod"
STATE = {f"layer.{number:02}": noise(8192, 512, seed=number) for number in range(6)}
LOOSE = 2 * MIB
"""Python's own objects: plans, requests, threads."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with yard_in(tmp_path_factory.mktemp("following"), poll_s=0.05) as opened:
        opened.push(STATE, BERT, alias="prod")
        yield opened


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every core that decodes has scratch memory of its own."""
    monkeypatch.setattr("weightyard.transfer.reader.cores", lambda: 16)


def most_bytes(work: Callable[[], object]) -> int:
    """The most memory at once: what is read into, and what is read with, is NumPy's."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def brought(
    yard: Yard,
    slices: Mapping[str, Any],
    max_host_bytes: int | None,
    source: ServiceReader | None = None,
    **how: Any,
) -> tuple[StagedTensor, ...]:
    """Slices of a version's tensors, as a follower brings them."""
    manifest = yard.manifest(PROD)
    plans = plan_tensors(manifest.tensors, slices)
    contents = {plan.name: content_of(plan, manifest.blocks) for plan in plans}
    changes = plan_changes(plans, contents, {}, ())
    stage = Stage(source or yard.store, yard.catalogue, max_host_bytes, **how)
    version = yard.resolve(PROD)
    tensors, _ = stage.bring(version, changes, manifest.blocks, Resident(None), {}, Cancel())
    return tensors


SLICES: Mapping[str, Any] = {
    "all": (slice(None), slice(None)),
    "some rows": (slice(100, 2100), slice(None)),
    "some columns": (slice(None), slice(0, 100)),
}


@pytest.mark.parametrize(
    ("part", "verify"),
    [("all", "fast"), ("some rows", "full"), ("some columns", "fast"), ("some columns", "full")],
)
def test_bringing_a_version_takes_no_more_than_it_is_told(
    yard: Yard, part: str, verify: str
) -> None:
    slices = dict.fromkeys(STATE, SLICES[part])
    needed = sum(one[SLICES[part]].nbytes for one in STATE.values())
    bound = needed + WORKING_BYTES
    found: list[StagedTensor] = []
    most = most_bytes(lambda: found.extend(brought(yard, slices, bound, verify=verify)))
    whole = {one.names[0]: one.whole(Resident(None)) for one in found}
    assert same(whole, {name: one[SLICES[part]] for name, one in STATE.items()})
    assert most <= bound + LOOSE


@pytest.mark.parametrize("part", ["all", "some columns"])
def test_bringing_a_version_through_the_service_takes_no_more_than_it_is_told(
    tmp_path: Path, part: str
) -> None:
    state = {"long": noise(5 * 8192, 1024, seed=1)}
    with yard_in(tmp_path) as yard:
        yard.push(state, BERT, alias="prod")
        manifest = yard.manifest(PROD)
        blocks: dict[BlockId, bytearray] = {b.id: bytearray(b.raw_bytes) for b in manifest.blocks}
        Reader(yard.store, yard.catalogue).read(
            [Wanted(block, 0, memoryview(raw)) for block, raw in blocks.items()]
        )

        def fetch(block: BlockId, write: Callable[[bytes], object]) -> None:
            """As it comes through a service: in pieces, several blocks at once."""
            for start in range(0, len(blocks[block]), MIB):
                write(bytes(blocks[block][start : start + MIB]))
                time.sleep(0.001)

        source = ServiceReader(manifest, fetch)
        slices = {"long": SLICES[part]}
        bound = state["long"][SLICES[part]].nbytes + WORKING_BYTES
        found: list[StagedTensor] = []
        most = most_bytes(lambda: found.extend(brought(yard, slices, bound, source=source)))
        assert same({"long": found[0].whole(Resident(None))}, {"long": state["long"][SLICES[part]]})
        assert most <= bound + LOOSE


def kept(follower: Follower) -> list[np.ndarray]:
    """The memory it has to read with while it reads nothing.

    Looked at, not taken and left again: what it leaves itself just then would be lost.
    """
    return list(follower._following.spare._buffers)


def test_memory_to_read_with_is_there_beforehand_is_used_again_and_goes_with_the_follower(
    tmp_path: Path,
) -> None:
    states = [{"weight": noise(8192, 1024, seed=number)} for number in range(3)]
    with yard_in(tmp_path, poll_s=0.05) as yard:
        yard.push(states[0], BERT, alias="prod")
        weights = yard.load(PROD)
        with yard.follow(PROD, weights) as follower:
            eventually(lambda: kept(follower))
            before = {id(one) for one in kept(follower)}
            for number in (2, 3):
                yard.push(states[number - 1], BERT, alias="prod")
                found = follower.wait(SOON_S)
                assert found is not None
                assert found.number == number
                assert follower.report is not None
                assert follower.report.most_host_bytes > 0, "it was decoded"
                assert {id(one) for one in kept(follower)} == before, "none is fresh"
                follower.apply()
                assert same(weights, states[number - 1])
            assert sum(one.size for one in kept(follower)) <= WORKING_BYTES
        assert kept(follower) == []
    assert left_threads() == []


def test_no_more_is_kept_than_the_bound_and_first_what_was_used_last() -> None:
    spare = SpareMemory(10 * MIB)
    first, second, third = (np.empty(length * MIB, np.uint8) for length in (4, 7, 5))
    spare.leave([first, second, third])
    assert [len(one) for one in spare.take_all()] == [4 * MIB, 5 * MIB]
    assert spare.take_all() == []


@pytest.mark.parametrize("max_host_bytes", [None, WORKING_BYTES])
def test_what_is_prepared_is_within_the_bound(max_host_bytes: int | None) -> None:
    spare = SpareMemory(WORKING_BYTES)
    prepare(spare, max_host_bytes)
    buffers = spare.take_all()
    assert len(buffers) == 4
    reading_bytes = Shares.within(max_host_bytes).reading_bytes
    assert sum(one.size for one in buffers) <= min(WORKING_BYTES, reading_bytes)
