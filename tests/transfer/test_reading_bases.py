"""Bases of deltas are read as all else is: hedged, failed over, and counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from replicated import Replicated
from strategies import content

from weightyard.codec import Encoded, encode, encode_delta
from weightyard.errors import (
    BlockCorrupt,
    Cancelled,
    DataNodeFailed,
    DeadlineExceeded,
    ReplicasDamaged,
)
from weightyard.format.block import MIB, Codec, block_id
from weightyard.format.pack import PACK_HEADER, PackBuilder, padding
from weightyard.names import PackId, UploadId
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Location, Read, Replica, Store
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.hedging import ENOUGH_SAMPLES, HedgeBudget
from weightyard.transfer.learned import Learned
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.report import ReadEvent, ReadEventKind, ReadReport

BLOCK_BYTES = 2 * MIB
LONG_S = 3600.0
FIRST, SECOND = Replica("first:9866", "first"), Replica("second:9866", "second")


class TwoReplicas(Replicated):
    """Every file on two DataNodes, of which the first can be told to fail or hang by pack.

    `refused`: packs of which no replica passes HDFS's checksums.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, FIRST, SECOND)
        self.failing: set[PackId] = set()
        self.hanging: set[PackId] = set()
        self.refused: set[PackId] = set()

    def before_read(
        self,
        location: Location,
        reads: Sequence[Read],
        replica: Replica | None,
        cancel: Cancel | None,
    ) -> None:
        if location.path in map(layout.pack, self.refused):
            raise ReplicasDamaged(f"{location.path}: injected")
        if replica == FIRST and location.path in map(layout.pack, self.failing):
            raise DataNodeFailed(FIRST.datanode, "injected")
        if replica == FIRST and location.path in map(layout.pack, self.hanging):
            assert cancel is not None
            ended = threading.Event()
            with cancel.ending(ended.set, "hanging"):
                assert ended.wait(60), "nobody asked the other replica"
            raise Cancelled("ended")


class World:
    """A base in two packs, and one delta to it in a third.

    Reads of the base are worth a second one after `base_takes_s`, those of the delta never, however
    long this machine lets them wait.
    """

    def __init__(self, folder: Path, base_takes_s: float = LONG_S) -> None:
        local = LocalStore(folder)
        local.init()
        self.store = TwoReplicas(local)
        self.catalogue = MemoryCatalogue()
        base = content(BLOCK_BYTES, "weights", 1)
        changed = bytearray(base)
        changed[::4096] = bytes(len(changed[::4096]))
        self.data = bytes(changed)
        whole = encode(base, hint=Codec.PLANES_BF16)
        self.base_bytes = whole.encoding.stored_bytes
        self.bases = [self._pack(local, whole), self._pack(local, whole)]
        delta = encode_delta(self.data, base, block_id(base), hint=Codec.PLANES_BF16)
        self.delta_bytes = delta.encoding.stored_bytes
        self._pack(local, delta)
        self.events: list[ReadEvent] = []
        self.learned = Learned(hedges=HedgeBudget(burst=1000))
        for length, took_s in ((self.base_bytes, base_takes_s), (self.delta_bytes, LONG_S)):
            for _ in range(ENOUGH_SAMPLES):
                self.learned.pace.add(length, took_s)
        assert self.base_bytes.bit_length() != self.delta_bytes.bit_length(), "of different kinds"
        self.reader = Reader(
            self.store,
            self.catalogue,
            choose=lambda span: span.replicas,
            on_event=self.events.append,
            learned=self.learned,
        )

    def read(self) -> tuple[bytearray, ReadReport]:
        out = bytearray(BLOCK_BYTES)
        return out, self.reader.read([Wanted(block_id(self.data), 0, memoryview(out))])

    def _pack(self, store: LocalStore, encoded: Encoded) -> PackId:
        builder = PackBuilder(PackId.new())
        with store.stage(layout.staging(UploadId.new(), "p")) as stage:
            stage.write(PACK_HEADER)
            builder.add(encoded.encoding)
            for segment in encoded.segments:
                stage.write(segment)
                stage.write(padding(memoryview(segment).nbytes))
            stage.write(builder.finish())
            store.publish(stage.close(), layout.pack(builder.pack))
        self.catalogue.add_pack(builder.pack, builder.placements)
        return builder.pack

    def damage(self, pack: PackId) -> None:
        local = self.store._store
        assert isinstance(local, LocalStore)
        file = local.folder / layout.pack(pack).text
        file.chmod(0o600)
        content = bytearray(file.read_bytes())
        content[len(PACK_HEADER) + 100] ^= 1
        file.write_bytes(content)

    def used_base(self) -> PackId:
        """The pack a reader takes the base from when nothing is wrong."""
        before = len(self.store.calls)
        self.read()
        assert len(self.store.calls) > before
        located = {layout.pack(one): one for one in self.bases}
        known = [path for path in located if self.learned.locations.get(path) is not None]
        return located[known[0]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_bytes_of_a_base_are_counted(world: World) -> None:
    out, report = world.read()
    assert out == world.data
    assert report.requests == 2
    assert report.stored_bytes == world.base_bytes + world.delta_bytes
    assert report.by_datanode == {FIRST.datanode: report.stored_bytes}
    assert report.raw_bytes == BLOCK_BYTES


def test_a_base_comes_from_the_next_replica_where_one_fails(world: World) -> None:
    world.store.failing.update(world.bases)
    out, report = world.read()
    assert out == world.data
    assert report.failed_over == 1
    assert any(FIRST.datanode in failure for failure in report.failed)
    assert report.by_datanode[SECOND.datanode] == world.base_bytes
    assert ReadEventKind.REPLICA_FAILED in {event.kind for event in world.events}


def test_a_base_that_is_slow_is_hedged_every_time(tmp_path: Path) -> None:
    world = World(tmp_path, base_takes_s=0.001)
    world.store.hanging.update(world.bases)
    for _ in range(3):
        out, report = world.read()
        assert out == world.data
        assert report.hedged == report.hedges_won == 1
        assert report.failed_over == 0
        assert report.by_datanode[SECOND.datanode] == world.base_bytes
    assert ReadEventKind.HEDGED in {event.kind for event in world.events}


def test_a_base_that_is_damaged_in_one_pack_comes_from_another(world: World) -> None:
    used = world.used_base()
    world.damage(used)
    out, report = world.read()
    assert out == world.data
    assert report.looked_up_again == 0
    for pack in world.bases:
        if pack != used:
            world.damage(pack)
    with pytest.raises(BlockCorrupt):
        world.read()


def test_a_base_whose_replicas_are_all_damaged_comes_from_another_pack(world: World) -> None:
    world.store.refused.add(world.used_base())
    out, report = world.read()
    assert out == world.data
    assert report.looked_up_again == 0
    world.store.refused.update(world.bases)
    with pytest.raises(ReplicasDamaged):
        world.read()


def test_asking_where_a_base_lies_holds_a_read_no_longer_than_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, is_over = World(tmp_path), threading.Event()
    locate = world.store.locate
    slow = {layout.pack(base) for base in world.bases}

    def hang(path: layout.StorePath, *, timeout_s: float | None = None) -> Location:
        if path in slow:
            is_over.wait(60)
        return locate(path, timeout_s=timeout_s)

    monkeypatch.setattr(world.store, "locate", hang)
    began = time.monotonic()
    try:
        with pytest.raises(DeadlineExceeded):
            world.reader.read(
                [Wanted(block_id(world.data), 0, memoryview(bytearray(BLOCK_BYTES)))],
                timeout_s=0.3,
            )
        assert time.monotonic() - began < 30
    finally:
        is_over.set()
