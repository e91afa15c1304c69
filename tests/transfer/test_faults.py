"""What the engines do when bytes, replicas or writers go bad."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from begun import begun, left
from patience import be_patient
from strategies import content

from weightyard.codec import Encoded, encode
from weightyard.errors import (
    BlockCorrupt,
    Bug,
    DataNodeFailed,
    FileMissing,
    PackInvalid,
    ReplicasDamaged,
    StaleLocation,
    StoreUnavailable,
    UnderReplicated,
    UnknownFormat,
    YardError,
)
from weightyard.format.block import CHUNK_BYTES, MIB, Codec
from weightyard.format.dtypes import DType
from weightyard.format.pack import Placement
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import BlockId, PackId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.local import LocalStore
from weightyard.storage.opening import open_store
from weightyard.storage.store import (
    FileOptions,
    Location,
    Read,
    ReadPath,
    Replica,
    Served,
    Span,
    Stage,
    Store,
    StorePath,
)
from weightyard.testing.cluster import MiniCluster, damage
from weightyard.testing.cluster.daemon import Daemon
from weightyard.testing.faults import Fault, FaultyStore
from weightyard.transfer import writer as writing
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.learned import Learned
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Choose, Reader, ReadReport, read_pack_index
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

RAW_BYTES = 3 * MIB


class Yard:
    """Some blocks in a store, and what they should be."""

    def __init__(self, store: Store, kind: str, options: WriteOptions | None = None) -> None:
        self.store = store
        self.catalogue = MemoryCatalogue()
        tensors = [StateTensor(f"t{i}", DType.BF16, (RAW_BYTES // 2,)) for i in range(4)]
        data = [content(RAW_BYTES, kind, i) for i in range(4)]
        split = split_state(tensors, RAW_BYTES)
        writer = Writer(store, self.catalogue.upload(), options)
        (ids,) = writer.write([Content(split, [MemorySource(d) for d in data])])
        self.blocks = dict(zip(ids, data, strict=True))

    @property
    def pack(self) -> PackId:
        (pack,) = self.catalogue.packs
        return pack

    @property
    def placements(self) -> list[Placement]:
        return sorted(self.catalogue.packs[self.pack], key=lambda placement: placement.offset)

    def read_all(self, choose: Choose = lambda span: span.replicas) -> dict[BlockId, bytearray]:
        out = {block: bytearray(RAW_BYTES) for block in self.blocks}
        self.report = Reader(self.store, self.catalogue, choose=choose).read(
            Wanted(block, 0, memoryview(into)) for block, into in out.items()
        )
        return out


@pytest.fixture(params=["weights", "noise"])
def yard(request: pytest.FixtureRequest, tmp_path: Path) -> Yard:
    """Once of encoded blocks, once of raw ones that are received in place."""
    store = LocalStore(tmp_path)
    store.init()
    return Yard(store, request.param)


def _file(yard: Yard) -> Path:
    return Path(yard.store.url.removeprefix("file://"), layout.pack(yard.pack).text)


def test_a_flipped_bit_anywhere_in_a_block_is_found(yard: Yard) -> None:
    file = _file(yard)
    whole = file.read_bytes()
    for placement in yard.placements[:2]:
        stored = [
            (placement.offset + start, segment.stored_bytes)
            for start, segment in zip(
                placement.encoding.offsets[:-1], placement.encoding.segments, strict=True
            )
        ]
        for start, length in stored:
            at = start + length // 2
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            with pytest.raises(BlockCorrupt, match=placement.encoding.block.hex):
                yard.read_all()
    file.write_bytes(whole)
    assert yard.read_all() == yard.blocks


def test_two_blocks_swapped_in_a_pack_are_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.init()
    yard = Yard(store, "noise")
    first, second = yard.placements[:2]
    file = _file(yard)
    data = bytearray(file.read_bytes())
    data[first.offset : first.end], data[second.offset : second.end] = (
        data[second.offset : second.end],
        data[first.offset : first.end],
    )
    file.write_bytes(data)
    with pytest.raises(BlockCorrupt):
        yard.read_all()


def test_two_chunks_swapped_in_a_block_are_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.init()
    yard = Yard(store, "noise")
    at = yard.placements[0].offset
    file = _file(yard)
    data = bytearray(file.read_bytes())
    first, second = slice(at, at + CHUNK_BYTES), slice(at + CHUNK_BYTES, at + 2 * CHUNK_BYTES)
    data[first], data[second] = data[second], data[first]
    file.write_bytes(data)
    with pytest.raises(BlockCorrupt):
        yard.read_all()


def test_a_pack_under_another_packs_name_is_found(yard: Yard) -> None:
    other = PackId.new()
    target = Path(yard.store.url.removeprefix("file://"), layout.pack(other).text)
    target.parent.mkdir(exist_ok=True)
    os.link(_file(yard), target)
    with pytest.raises(PackInvalid, match=yard.pack.hex):
        read_pack_index(yard.store, other)


def test_a_truncated_pack_is_found(yard: Yard) -> None:
    file = _file(yard)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(PackInvalid):
        read_pack_index(yard.store, yard.pack)


class Cut(LocalStore):
    """Says what HDFS says of a file that is shorter than it was when it was located."""

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        if self.stat(location.path).length < location.length:
            raise StaleLocation(f"{location.path} is shorter than it was")
        return super().read(location, reads, replica=replica, timeout_s=timeout_s, cancel=cancel)


@pytest.mark.parametrize("is_located", [False, True])
@pytest.mark.parametrize("kind", [LocalStore, Cut])
def test_a_block_whose_pack_was_cut_short_comes_from_another_pack(
    tmp_path: Path, kind: type[LocalStore], is_located: bool
) -> None:
    store = kind(tmp_path)
    store.init()
    yard, other = Yard(store, "weights"), Yard(store, "weights")
    path = layout.pack(yard.pack)
    whole = store.locate(path)
    os.truncate(_file(yard), RAW_BYTES)
    out = {block: bytearray(RAW_BYTES) for block in yard.blocks}

    def read() -> ReadReport:
        learned = Learned()
        if is_located:
            learned.locations.keep(path, whole)
        wanted = [Wanted(block, 0, memoryview(into)) for block, into in out.items()]
        return Reader(store, yard.catalogue, learned=learned).read(wanted)

    with pytest.raises(FileMissing, match=yard.pack.hex):
        read()
    yard.catalogue.add_pack(other.pack, other.placements)
    assert read().looked_up_again == 1
    assert out == yard.blocks


class Rotten(FaultyStore):
    """Says of one file what HDFS says of one whose replicas are all damaged."""

    rotten: StorePath | None = None

    def before_read(self, location: Location, *_: object) -> None:
        if location.path == self.rotten:
            raise ReplicasDamaged(f"{location.path}: none passes HDFS's checksums")


def test_a_block_whose_replicas_are_all_damaged_comes_from_another_pack(tmp_path: Path) -> None:
    store = Rotten(LocalStore(tmp_path))
    store.init()
    yard, other = Yard(store, "weights"), Yard(store, "weights")
    store.rotten = layout.pack(yard.pack)
    with pytest.raises(ReplicasDamaged, match=yard.pack.hex):
        yard.read_all()
    yard.catalogue.add_pack(other.pack, other.placements)
    assert yard.read_all() == yard.blocks
    assert yard.report.looked_up_again == 1


def test_a_pack_that_was_lost_keeps_no_memory_of_the_read_that_found_another(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    store.init()
    yard, other = Yard(store, "noise"), Yard(store, "noise")
    learned = Learned()
    learned.locations.ask(store, layout.pack(yard.pack))
    os.truncate(_file(yard), RAW_BYTES)
    yard.catalogue.add_pack(other.pack, other.placements)
    out = {block: bytearray(RAW_BYTES) for block in yard.blocks}
    reader = Reader(store, yard.catalogue, learned=learned)
    gc.disable()  # it counts objects, not bytes, and may come late
    try:
        report = reader.read([Wanted(block, 0, memoryview(into)) for block, into in out.items()])
        assert report.looked_up_again == 1
        assert out == yard.blocks
        for into in out.values():
            into.clear()  # refused while anyone has a view
    finally:
        gc.enable()


class RottenTail(LocalStore):
    """Has three replicas, of which those named have a wrong byte so far before the end."""

    def __init__(self, folder: Path, before_end: int, *rotten: str) -> None:
        super().__init__(folder)
        self._before_end = before_end
        self._rotten = rotten

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        found = super().locate(path, timeout_s=timeout_s)
        replicas = tuple(Replica(f"{host}:1", host) for host in "abc")
        return Location(path, found.length, (Span(0, found.length, replicas),))

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        (asked,) = reads
        served = super().read(location, reads)
        if replica is not None and replica.host == "b":
            raise DataNodeFailed(replica.datanode, "nobody listens")
        if (replica.host if replica else "a") in self._rotten:
            asked.into[location.length - self._before_end - asked.offset] ^= 0x40
        return served


@pytest.mark.parametrize("before_end", [1, 16, 20, 100], ids=["magic", "version", "sum", "index"])
def test_an_index_that_is_rotten_on_one_replica_is_read_from_another(
    yard: Yard, before_end: int
) -> None:
    folder = Path(yard.store.url.removeprefix("file://"))
    assert read_pack_index(RottenTail(folder, before_end, "a"), yard.pack) == tuple(yard.placements)
    with pytest.raises((PackInvalid, UnknownFormat)):
        read_pack_index(RottenTail(folder, before_end, "a", "c"), yard.pack)


def _write_one(store: Store, catalogue: MemoryCatalogue) -> None:
    split = split_state([StateTensor("t", DType.U8, (RAW_BYTES,))], RAW_BYTES)
    source = MemorySource(content(RAW_BYTES, "noise", 1))
    Writer(store, catalogue.upload()).write([Content(split, [source])])


@pytest.mark.parametrize("fault", Fault)
def test_a_writer_that_fails_at_any_call_makes_nothing_claimable(
    tmp_path: Path, fault: Fault
) -> None:
    inner = LocalStore(tmp_path)
    inner.init()
    clean = FaultyStore(inner)
    _write_one(clean, MemoryCatalogue())
    assert "publish" in clean.calls
    for index in range(len(clean.calls)):
        catalogue = MemoryCatalogue()
        with pytest.raises(StoreUnavailable, match=f"call {index},"):
            _write_one(FaultyStore(inner, {index: fault}), catalogue)
        assert catalogue.packs == {}


def test_no_thread_is_left_behind_by_a_failed_write(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path), {3: Fault.BEFORE})
    store.init()
    with begun() as threads, pytest.raises(StoreUnavailable):
        Yard(store, "weights")
    assert threads
    assert left(threads) == []


def test_too_few_replicas_in_time_is_an_error_and_the_pack_cannot_be_claimed(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    store.init()
    said = "on 1 DataNodes, 2 are required: start another DataNode, or push with --replication 1"
    with pytest.raises(UnderReplicated, match=said):
        Yard(store, "noise", WriteOptions(min_replicas=2, replicas_timeout_s=0.05))


class CountingStore(LocalStore):
    """A store that says, when a file is closed, on how many DataNodes it lies."""

    def __init__(self, folder: Path, replicas: int) -> None:
        super().__init__(folder)
        self._replicas = replicas
        self.located: list[StorePath] = []

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        staging = super().stage(path, options)
        close = staging.close
        staging.close = lambda: replace(close(), replicas=self._replicas)  # type: ignore[method-assign]
        return staging

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        self.located.append(path)
        return super().locate(path, timeout_s=timeout_s)


def test_replicas_counted_at_closing_are_not_asked_for_again_unless_too_few(
    tmp_path: Path,
) -> None:
    options = WriteOptions(min_replicas=2, replicas_timeout_s=0.05)
    enough, too_few = CountingStore(tmp_path / "a", 2), CountingStore(tmp_path / "b", 1)
    for store in (enough, too_few):
        store.init()
    Yard(enough, "noise", options)
    assert enough.located == []
    with pytest.raises(UnderReplicated, match="on 1 DataNodes, 2 are required"):
        Yard(too_few, "noise", options)


@pytest.fixture
def hdfs_yard(cluster: MiniCluster) -> Iterator[Yard]:
    with open_store(cluster.fresh_dir(), Settings(hadoop_conf_dir=cluster.conf_dir)) as store:
        store.init()
        yield Yard(store, "weights", WriteOptions(replication=2, min_replicas=2))


def _first(datanode: Daemon) -> Choose:
    """Ask this DataNode before the others."""
    return lambda span: sorted(
        span.replicas, key=lambda replica: replica.datanode != datanode.plan.address
    )


def _hdfs_path(yard: Yard) -> str:
    return f"{yard.store.url.rstrip('/')}/{layout.pack(yard.pack)}"


@pytest.mark.cluster
@pytest.mark.parametrize("hide", [False, True], ids=["seen-by-hdfs", "hidden-from-hdfs"])
def test_a_replica_damaged_on_disk_is_found_and_read_elsewhere(
    cluster: MiniCluster, hdfs_yard: Yard, hide: bool
) -> None:
    """With `hide` HDFS's own checksums are rewritten to fit, so only ours can tell."""
    bad = cluster.replica_files(_hdfs_path(hdfs_yard))[0]
    damage(bad, offset=hdfs_yard.placements[1].offset + 100_000, length=3, hide=hide)
    assert hdfs_yard.read_all(_first(bad.datanode)) == hdfs_yard.blocks
    assert len(hdfs_yard.report.failed) >= 1


@pytest.mark.cluster
def test_all_replicas_damaged_is_an_error_never_a_tensor(
    cluster: MiniCluster,
    hdfs_yard: Yard,
    way: ReadPath,
    only_way: Callable[[str], Store],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever way the bytes come: HDFS's own checksums fit, and only ours can tell."""
    be_patient(monkeypatch)
    with only_way(hdfs_yard.store.url) as hdfs_yard.store:
        assert hdfs_yard.read_all() == hdfs_yard.blocks
        assert set(hdfs_yard.report.by_path) == {way}
        _damage_all(cluster, hdfs_yard, hide=True)
        with pytest.raises(BlockCorrupt, match=hdfs_yard.placements[1].encoding.block.hex):
            hdfs_yard.read_all()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("way", "error"),
    [
        (ReadPath.DIRECT, BlockCorrupt),
        (ReadPath.NATIVE, ReplicasDamaged),
        # Java's client looks for a good replica again and again before it says that it got none.
        pytest.param(ReadPath.WEBHDFS, ReplicasDamaged, marks=pytest.mark.long),
        pytest.param(ReadPath.LIBHDFS, ReplicasDamaged, marks=pytest.mark.long),
    ],
)
def test_damage_that_hdfs_sees_is_an_error_never_a_tensor(
    cluster: MiniCluster,
    hdfs_yard: Yard,
    only_way: Callable[[str], Store],
    error: type[YardError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be_patient(monkeypatch)
    _damage_all(cluster, hdfs_yard, hide=False)
    with only_way(hdfs_yard.store.url) as hdfs_yard.store, pytest.raises(error):
        hdfs_yard.read_all()


@pytest.mark.cluster
def test_a_replica_whose_datanode_is_dead_is_not_called_damaged(cluster: MiniCluster) -> None:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir)
    with open_store(cluster.fresh_dir(), settings) as store:
        store.init()
        yard = Yard(store, "weights", WriteOptions(replication=1, min_replicas=1))
    ((holder,),) = cluster.replicas(_hdfs_path(yard))
    holder.kill()
    try:
        for way in (ReadPath.NATIVE, ReadPath.WEBHDFS):
            with (
                HdfsStore(store.url, settings, read_paths=[way]) as yard.store,
                pytest.raises(StoreUnavailable),
            ):
                yard.read_all()
    finally:
        cluster.restart(holder)


def _damage_all(cluster: MiniCluster, yard: Yard, *, hide: bool) -> None:
    for replica in cluster.replica_files(_hdfs_path(yard)):
        damage(replica, offset=yard.placements[1].offset + 100_000, length=3, hide=hide)


@pytest.mark.cluster
def test_reading_goes_on_when_a_datanode_stops_answering(
    cluster: MiniCluster, hdfs_yard: Yard
) -> None:
    (holders,) = cluster.replicas(_hdfs_path(hdfs_yard))
    stopped = holders[0]
    stopped.pause()
    try:
        began = time.monotonic()
        assert hdfs_yard.read_all(_first(stopped)) == hdfs_yard.blocks
        took_s = time.monotonic() - began
    finally:
        stopped.resume()
        cluster.wait_until_live(stopped)
    assert any(stopped.plan.address in failure for failure in hdfs_yard.report.failed)
    assert took_s < 25, "before the store's deadline of 30 s"


def test_encoding_is_proved_before_anything_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec that loses a bit is caught by the writer itself."""

    def lossy(raw: memoryview, **options: object) -> Encoded:
        wrong = bytearray(raw)
        wrong[0] ^= 1
        return encode(wrong, hint=Codec.PLANES_BF16)

    monkeypatch.setattr(writing.codec, "encode", lossy)
    store = FaultyStore(LocalStore(tmp_path))
    store.init()
    with pytest.raises(Bug):
        Yard(store, "weights")
    assert "publish" not in store.calls
