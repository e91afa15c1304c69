"""What two versions are said to differ in: bytes, not the blocks they happen to share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.manifest import Manifest
from weightyard.format.splitting import StateTensor, split_state
from weightyard.storage.local import LocalStore
from weightyard.transfer import diff
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.diff import diff_manifests, doubtful_pairs, equal_pairs
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.report import ReadReport
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, Writer


class World:
    """Versions of state dicts, and how much is read to compare them."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._catalogue = MemoryCatalogue()
        self.reads: list[int] = []

    def push(self, tensors: Mapping[str, bytes]) -> Manifest:
        shapes = [StateTensor(name, DType.U8, (len(data),)) for name, data in tensors.items()]
        split = split_state(shapes, MIB)
        sources = [MemorySource(data) for data in tensors.values()]
        writer = Writer(self._store, self._catalogue.upload())
        return manifest_of([split], writer.write([Content(split, sources)]))

    def read(self, wanted: Sequence[Wanted], progress: object = None) -> ReadReport:
        self.reads.append(sum(want.into.nbytes for want in wanted))
        return Reader(self._store, self._catalogue).read(wanted)

    def diff(self, before: Manifest, after: Manifest) -> diff.Diff:
        equal = equal_pairs(doubtful_pairs(before, after), self, self)
        return diff_manifests(before, after, equal)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with LocalStore(tmp_path / "yard") as store:
        store.init()
        yield World(store)


def biases(count: int) -> dict[str, bytes]:
    random = np.random.default_rng(0)
    return {f"b{number:02}": random.bytes(1000) for number in range(count)}


def test_of_tensors_that_share_a_block_only_the_one_that_changed_is_named(world: World) -> None:
    before = biases(10)
    found = world.diff(world.push(before), world.push({**before, "b03": bytes(1000)}))
    assert found.tensors_changed == ("b03",)
    assert found.tensors_same == 9


def test_a_tensor_that_came_to_lie_elsewhere_is_the_same(world: World) -> None:
    before = biases(3)
    found = world.diff(world.push(before), world.push({"a": bytes(77), **before}))
    assert (found.tensors_added, found.tensors_changed) == (("a",), ())
    alone = world.diff(world.push({"b00": before["b00"]}), world.push(before))
    assert alone.tensors_same == 1, "it had a block of its own"


def test_tensors_with_blocks_of_their_own_are_compared_without_reading(world: World) -> None:
    large = {"w": bytes(3 * MIB), "x": b"x" * MIB}
    found = world.diff(world.push(large), world.push({**large, "w": bytes(2 * MIB) + b"w" * MIB}))
    assert found.tensors_changed == ("w",)
    assert found.tensors_same == 1
    assert world.reads == []


def test_what_is_the_same_block_is_not_read(world: World) -> None:
    before = biases(10)
    assert world.diff(world.push(before), world.push(before)).tensors_same == 10
    assert world.reads == []


def test_however_much_is_compared_little_of_it_is_in_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "_READ_BYTES", 4500)
    before = biases(10)
    found = world.diff(world.push(before), world.push({**before, "b09": bytes(1000)}))
    assert found.tensors_changed == ("b09",)
    assert world.reads == [4000, 4000, 4000, 4000, 2000, 2000]


def test_without_reading_a_tensor_in_a_block_that_changed_counts_as_changed(world: World) -> None:
    before = biases(10)
    found = diff_manifests(world.push(before), world.push({**before, "b03": bytes(1000)}))
    assert len(found.tensors_changed) == 10
