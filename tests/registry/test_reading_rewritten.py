"""A reader that planned before gc rewrote the packs it planned for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
from collecting import KIB, gc, noise
from pushing import push

from weightyard.errors import FileMissing
from weightyard.format.block import block_id
from weightyard.format.pack import Placement
from weightyard.names import BlockId
from weightyard.registry.registry import Registry
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.transfer.learned import Learned
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.report import ReadEvent, ReadEventKind


class Between:
    """A registry that lets something happen after each answer to a reader."""

    def __init__(self, registry: Registry, happens: Callable[[], object]) -> None:
        self._registry = registry
        self._happens = happens
        self.asked = 0

    def placements(
        self, blocks: Sequence[BlockId], *, within_s: float = math.inf
    ) -> Mapping[BlockId, Sequence[Placement]]:
        self.asked += 1
        found = self._registry.placements(blocks)
        self._happens()
        return found


def buffers(seeds: range) -> dict[BlockId, bytearray]:
    return {block_id(noise(seed)): bytearray(66 * KIB) for seed in seeds}


@pytest.mark.parametrize("is_located", [False, True], ids=["located-after", "located-before"])
def test_packs_rewritten_between_plan_and_read_are_looked_up_once_more(
    registry: Registry, store: LocalStore, is_located: bool
) -> None:
    for seed in range(5):
        push(registry, store, noise(seed))
    learned = Learned()
    if is_located:
        Reader(store, registry, learned=learned).read(
            Wanted(block, 0, memoryview(into)) for block, into in buffers(range(5)).items()
        )
    between = Between(registry, lambda: gc(registry, store))
    events: list[ReadEvent] = []
    out = buffers(range(5))
    report = Reader(store, between, on_event=events.append, learned=learned).read(
        Wanted(block, 0, memoryview(into)) for block, into in out.items()
    )
    assert list(map(bytes, out.values())) == [noise(seed) for seed in range(5)]
    assert between.asked == 2
    assert report.looked_up_again == 5
    assert report.raw_bytes == 5 * 66 * KIB
    assert [event.kind for event in events].count(ReadEventKind.LOOKED_UP_AGAIN) == 5


def test_a_pack_that_is_gone_twice_is_an_error_that_names_it(
    registry: Registry, store: LocalStore
) -> None:
    push(registry, store, noise(1))
    (pack,) = store.list(layout.PACKS)
    between = Between(registry, lambda: store.delete(pack.path))
    with pytest.raises(FileMissing, match=pack.path.text):
        Reader(store, between, learned=Learned()).read(
            Wanted(block, 0, memoryview(into)) for block, into in buffers(range(1, 2)).items()
        )
    assert between.asked == 2
