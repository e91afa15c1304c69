"""How the writer goes about it: what it reads, claims, keeps in memory and leaves behind."""

from __future__ import annotations

import errno
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import numpy as np
import pytest
from begun import begun, left
from strategies import content
from waiting import SOON_S, eventually

from weightyard import codec
from weightyard.errors import (
    AlreadyThere,
    Conflict,
    NoSuchThing,
    NotAllowed,
    StoreFull,
    StoreUnavailable,
    YardError,
)
from weightyard.format.block import KIB, MIB, Codec, block_id
from weightyard.format.dtypes import DType, nbytes
from weightyard.format.pack import Placement
from weightyard.format.splitting import Part, Piece, StateTensor, split_state
from weightyard.names import BlockId, PackId, UploadId
from weightyard.storage.local import LocalStore
from weightyard.storage.retry import Retry, RetryingStore
from weightyard.storage.store import FileOptions, Stage, StagedFile, Store, StorePath
from weightyard.testing.faults import Fault, FaultyStore
from weightyard.transfer import alive
from weightyard.transfer.catalogue import MemoryCatalogue, Packing
from weightyard.transfer.filling import AHEAD_BYTES, Filling, PackInWork, ReadyBlock
from weightyard.transfer.plan import Wanted
from weightyard.transfer.reader import Reader
from weightyard.transfer.source import FileSource, MemorySource, Source, piece_id, translated
from weightyard.transfer.writer import Content, WriteOptions, Writer

RAW_BYTES = MIB
QUICK = Retry(deadline_s=5, first_wait_s=0.001, longest_wait_s=0.01)
FOUR = WriteOptions(kept_bytes=4 * RAW_BYTES)
"""So many new pieces are claimed at once."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with LocalStore(tmp_path / "yard") as store:
        store.init()
        yield store


class Elsewhere(Source):
    """Bytes that are not in memory: each read counts, and may find them changed."""

    def __init__(self, data: bytes, later: bytes | None = None) -> None:
        self.length = len(data)
        self.reads = 0
        self._data = data
        self._later = later or data

    def read_into(self, offset: int, into: memoryview) -> None:
        data = self._later if self.reads else self._data
        self.reads += 1
        into[:] = data[offset : offset + len(into)]


class WatchedUpload:
    """An upload that remembers how much was asked in each claim, and tells of each step."""

    def __init__(self, upload: Packing, told: Callable[[str], None] = lambda step: None) -> None:
        self._upload = upload
        self._told = told
        self.claims: list[int] = []

    @property
    def id(self) -> UploadId:
        return self._upload.id

    def claim(self, blocks: Sequence[BlockId]) -> Mapping[BlockId, Sequence[Placement]]:
        self._told("claim")
        self.claims.append(len(blocks))
        return self._upload.claim(blocks)

    def begin_pack(self, pack: PackId) -> None:
        self._told("begin_pack")
        self._upload.begin_pack(pack)

    def add_pack(self, pack: PackId, pack_bytes: int, placements: Sequence[Placement]) -> None:
        self._upload.add_pack(pack, pack_bytes, placements)


def contents(sources: Sequence[Source]) -> list[Content]:
    """Each source a tensor of one block."""
    tensors = [
        StateTensor(f"t{number:03}", DType.BF16, (source.length // 2,))
        for number, source in enumerate(sources)
    ]
    return [Content(split_state(tensors, RAW_BYTES), sources)]


def data(count: int, kind: str = "weights", first: int = 0) -> list[bytes]:
    return [content(RAW_BYTES, kind, first + seed) for seed in range(count)]


def read_back(store: Store, catalogue: MemoryCatalogue, blocks: Sequence[BlockId]) -> list[bytes]:
    into = [bytearray(RAW_BYTES) for _ in blocks]
    Reader(store, catalogue).read(
        Wanted(block, 0, memoryview(one)) for block, one in zip(blocks, into, strict=True)
    )
    return [bytes(one) for one in into]


@pytest.mark.parametrize("compress", [True, False])
def test_what_is_new_is_read_once_and_comes_back(store: Store, compress: bool) -> None:
    catalogue, raws = MemoryCatalogue(), data(40)
    sources = [Elsewhere(raw) for raw in raws]
    writer = Writer(store, catalogue.upload(), WriteOptions(compress=compress, pack_bytes=6 * MIB))
    (blocks,) = writer.write(contents(sources))
    assert {source.reads for source in sources} == {1}
    assert read_back(store, catalogue, blocks) == raws
    assert writer.report.blocks == writer.report.blocks_new == 40


def test_however_many_pieces_are_claimed_at_once_if_they_are_short(store: Store) -> None:
    upload = WatchedUpload(MemoryCatalogue().upload())
    Writer(store, upload).write(contents([MemorySource(raw) for raw in data(40)]))
    assert upload.claims == [40]


def test_what_is_known_is_claimed_in_few_calls_and_not_kept(store: Store) -> None:
    catalogue, raws = MemoryCatalogue(), data(40)
    Writer(store, catalogue.upload()).write(contents([MemorySource(raw) for raw in raws]))
    again = WatchedUpload(catalogue.upload())
    writer = Writer(store, again, FOUR)
    writer.write(contents([Elsewhere(raw) for raw in raws]))
    assert again.claims == [4, 36]
    assert writer.report.blocks_new == writer.report.packs_written == 0
    assert writer.report.logical_bytes == 40 * RAW_BYTES


def test_a_new_block_among_many_known_ones_is_read_again(store: Store) -> None:
    catalogue, raws = MemoryCatalogue(), data(30)
    Writer(store, catalogue.upload()).write(contents([MemorySource(raw) for raw in raws[:29]]))
    last = Elsewhere(raws[29])
    sources = [*(Elsewhere(raw) for raw in raws[:29]), last]
    (blocks,) = Writer(store, catalogue.upload(), FOUR).write(contents(sources))
    assert last.reads == 2
    assert read_back(store, catalogue, blocks) == raws


def test_a_source_that_changed_before_it_was_read_again_is_refused(store: Store) -> None:
    catalogue, raws = MemoryCatalogue(), data(30)
    Writer(store, catalogue.upload()).write(contents([MemorySource(raw) for raw in raws[:29]]))
    changed = Elsewhere(raws[29], later=raws[0])
    sources = [*(Elsewhere(raw) for raw in raws[:29]), changed]
    with pytest.raises(Conflict, match="changed since it was hashed"):
        Writer(store, catalogue.upload(), FOUR).write(contents(sources))
    assert not catalogue.placements([block_id(raws[29])])


@pytest.mark.parametrize("kind", ["weights", "noise"])
@pytest.mark.parametrize("delta", ["off", "only"])
@pytest.mark.parametrize("when", ["claim", "begin_pack"])
def test_memory_that_changes_after_it_was_named_is_stored_as_it_was(
    store: Store, kind: str, delta: Literal["off", "only"], when: str
) -> None:
    catalogue, bases = MemoryCatalogue(), data(2, kind)
    (base_ids,) = Writer(store, catalogue.upload()).write(contents([*map(MemorySource, bases)]))
    raws = [bytes([raw[0] ^ 1]) + raw[1:] for raw in bases]
    tensors = [np.frombuffer(bytearray(raw), np.uint8) for raw in raws]

    def train(step: str) -> None:
        if step == when:
            for tensor in tensors:
                tensor += 1

    (content_of,) = contents([MemorySource(tensor) for tensor in tensors])
    with_bases = replace(content_of, bases=dict(enumerate(base_ids)))
    options, reader = WriteOptions(delta=delta), Reader(store, catalogue)
    upload = WatchedUpload(catalogue.upload(), train)
    (blocks,) = Writer(store, upload, options, bases=reader).write([with_bases])
    assert blocks == [block_id(raw) for raw in raws]
    assert read_back(store, catalogue, blocks) == raws


def test_memory_that_changed_before_it_was_read_again_is_refused(store: Store) -> None:
    catalogue, raws = MemoryCatalogue(), data(30)
    Writer(store, catalogue.upload()).write(contents([*map(MemorySource, raws[:29])]))
    tensors = [np.frombuffer(bytearray(raw), np.uint8) for raw in raws]
    claims: list[str] = []

    def train(step: str) -> None:
        claims.append(step)
        if claims == ["claim", "claim"]:  # the second one is for those that are not kept
            tensors[29][:] += 1

    with pytest.raises(Conflict, match="changed since it was hashed"):
        Writer(store, WatchedUpload(catalogue.upload(), train), FOUR).write(
            contents([*map(MemorySource, tensors)])
        )
    assert not catalogue.placements([block_id(raws[29]), block_id(tensors[29])])


@pytest.mark.parametrize("kind", ["weights", "noise"])
def test_no_block_gets_another_ones_name_while_training_goes_on(store: Store, kind: str) -> None:
    catalogue = MemoryCatalogue()
    tensors = [np.frombuffer(bytearray(raw), np.uint8) for raw in data(12, kind)]
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            for tensor in tensors:
                tensor += 1

    training = threading.Thread(target=train)
    training.start()
    try:
        sources = [MemorySource(tensor) for tensor in tensors]
        for _ in range(3):
            Writer(store, catalogue.upload(), WriteOptions(pack_bytes=4 * MIB)).write(
                contents(sources)
            )
    finally:
        stop.set()
        training.join()
    named = [one.encoding.block for pack in catalogue.packs.values() for one in pack]
    assert [block_id(raw) for raw in read_back(store, catalogue, named)] == named


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_file_that_changed_since_it_was_looked_at_is_refused(
    tmp_path: Path, is_longer: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    source = FileSource(path)
    assert source.read_at(0, 6) == b"before"
    seen = path.stat().st_mtime_ns
    path.write_bytes(b"behind" + b"!" * is_longer)
    os.utime(path, ns=(seen, seen + 10**7))  # the clock of a file system may be slow
    with pytest.raises(Conflict, match="changed while it was read"):
        source.read_at(0, 2)
    with pytest.raises(Conflict, match="changed while it was read"):
        list(source.passing(0, 2))


@pytest.mark.parametrize("length", [0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB + 77])
def test_a_block_has_the_same_name_whether_its_bytes_are_kept_or_only_pass(
    tmp_path: Path, length: int
) -> None:
    content = os.urandom(3 * MIB)
    path = tmp_path / "file"
    path.write_bytes(content)
    piece = Piece((Part(0, 5, length), Part(1, 0, length)), Codec.RAW)
    sources = [FileSource(path), MemorySource(content)]
    assert piece_id(piece, sources) == block_id(content[5 : 5 + length] + content[:length])


def test_a_file_the_system_fails_to_read_is_not_said_to_be_missing() -> None:
    unreadable = FileSource(Path("/proc/self/mem"))  # nothing is mapped at its beginning
    with pytest.raises(StoreUnavailable, match="/proc/self/mem: Input/output error"):
        unreadable.read_at(0, 1)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, NoSuchThing),
        (errno.ENOTDIR, NoSuchThing),
        (errno.ELOOP, NoSuchThing),
        (errno.EISDIR, NoSuchThing),
        (errno.ENAMETOOLONG, NoSuchThing),
        (errno.EEXIST, AlreadyThere),
        (errno.EACCES, NotAllowed),
        (errno.EROFS, NotAllowed),
        (errno.ENOSPC, StoreFull),
        (errno.EMFILE, StoreUnavailable),
        (errno.ENOMEM, StoreUnavailable),
    ],
)
def test_what_the_system_says_of_a_file_tells_what_to_do_next(
    number: int, kind: type[YardError]
) -> None:
    with pytest.raises(kind) as caught, translated(Path("model.bin")):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert str(caught.value) == f"model.bin: {os.strerror(number)}"


def test_a_block_that_occurs_far_apart_is_stored_once(store: Store) -> None:
    catalogue, raws = MemoryCatalogue(), data(30)
    sources = [Elsewhere(raw) for raw in [*raws, raws[0], raws[29]]]
    writer = Writer(store, catalogue.upload())
    (blocks,) = writer.write(contents(sources))
    assert (blocks[30], blocks[31]) == (blocks[0], blocks[29])
    assert writer.report.blocks_new == 30
    assert sum(len(placements) for placements in catalogue.packs.values()) == 30


@pytest.mark.parametrize("kind", ["weights", "noise"])
def test_memory_of_the_caller_is_never_written_to(store: Store, kind: str) -> None:
    catalogue, raws = MemoryCatalogue(), data(12, kind)
    tensors = [np.frombuffer(bytearray(raw), np.uint8) for raw in raws]
    writer = Writer(store, catalogue.upload(), WriteOptions(pack_bytes=3 * MIB))
    for _ in range(2):  # the second time all is known
        writer.write(contents([MemorySource(tensor) for tensor in tensors]))
    more = data(12, kind, first=100)
    writer.write(contents([Elsewhere(raw) for raw in more]))
    assert [tensor.tobytes() for tensor in tensors] == raws


def test_the_next_pack_is_begun_when_the_next_block_does_not_fit(store: Store) -> None:
    catalogue = MemoryCatalogue()
    sources = [MemorySource(raw) for raw in data(10, "noise")]
    (blocks,) = Writer(store, catalogue.upload(), WriteOptions(pack_bytes=4 * MIB)).write(
        contents(sources)
    )
    packs = [
        [placement.encoding.block for placement in placements]
        for placements in catalogue.packs.values()
    ]
    assert sorted(packs, key=lambda pack: blocks.index(pack[0])) == [
        blocks[start : start + 3] for start in range(0, 10, 3)
    ]


@pytest.mark.parametrize("lanes", [2, 3])
def test_as_many_packs_are_in_flight_as_there_are_lanes(store: Store, lanes: int) -> None:
    meeting = threading.Barrier(lanes, timeout=SOON_S)

    def wait_for_the_others(index: int, call: str) -> None:
        if call == "close":  # none is, before all are written
            meeting.wait()

    catalogue, raws = MemoryCatalogue(), data(3 * lanes, "noise")
    options = WriteOptions(pack_bytes=4 * MIB, lanes=lanes)  # three blocks fill a pack
    meeting_store = FaultyStore(store, on_call=wait_for_the_others)
    writer = Writer(meeting_store, catalogue.upload(), options)
    (blocks,) = writer.write(contents([MemorySource(raw) for raw in raws]))
    assert writer.report.packs_written == lanes
    assert read_back(store, catalogue, blocks) == raws


def test_after_a_failure_whole_packs_stay_and_no_thread_is_left(store: Store) -> None:
    clean = FaultyStore(store)
    sources = [MemorySource(raw) for raw in data(12, "noise")]
    options = WriteOptions(pack_bytes=4 * MIB, lanes=1)
    Writer(clean, MemoryCatalogue().upload(), options).write(contents(sources))
    second = [index for index, name in enumerate(clean.calls) if name == "publish"][1]

    catalogue = MemoryCatalogue()
    failing = FaultyStore(store, {second: Fault.BEFORE})
    with begun() as threads, pytest.raises(StoreUnavailable):
        Writer(failing, catalogue.upload(), options).write(contents(sources))
    assert threads
    assert left(threads) == []
    (placements,) = catalogue.packs.values()
    known = [placement.encoding.block for placement in placements]
    assert read_back(store, catalogue, known) == data(3, "noise")


def test_a_source_that_fails_ends_the_packs_being_written(store: Store) -> None:
    class Failing(Elsewhere):
        def read_into(self, offset: int, into: memoryview) -> None:
            raise Conflict("gone")

    catalogue = MemoryCatalogue()
    sources: list[Source] = [Elsewhere(raw) for raw in data(12, "noise")]
    with begun() as threads, pytest.raises(Conflict, match="gone"):
        Writer(store, catalogue.upload(), WriteOptions(pack_bytes=64 * MIB)).write(
            contents([*sources, Failing(bytes(RAW_BYTES))])
        )
    assert threads
    assert left(threads) == []
    assert not catalogue.packs


@pytest.mark.parametrize("kind", ["weights", "noise"])
def test_a_pack_is_written_again_though_the_memory_of_its_blocks_was_used_for_others(
    store: Store, kind: str
) -> None:
    catalogue, raws = MemoryCatalogue(), data(24, kind)
    sources = [Elsewhere(raw) for raw in raws]
    options = WriteOptions(pack_bytes=32 * MIB, kept_bytes=2 * MIB, threads=1)
    failing = FaultyStore(store, on_call=_fail_once("close"))
    writer = Writer(RetryingStore(failing, QUICK), catalogue.upload(), options)
    (blocks,) = writer.write(contents(sources))
    assert {source.reads for source in sources} == {2}
    assert writer.report.packs_written == 1
    assert read_back(store, catalogue, blocks) == raws


def test_a_source_that_changed_before_its_pack_was_written_again_is_refused(store: Store) -> None:
    catalogue, raws = MemoryCatalogue(), data(4)
    sources = [*(Elsewhere(raw) for raw in raws[:3]), Elsewhere(raws[3], later=raws[0])]
    failing = FaultyStore(store, on_call=_fail_once("close"))
    with pytest.raises(Conflict, match="changed since it was hashed"):
        Writer(RetryingStore(failing, QUICK), catalogue.upload()).write(contents(sources))
    assert not catalogue.packs


def _fail_once(name: str) -> Callable[[int, str], None]:
    failed = threading.Event()

    def on_call(index: int, call: str) -> None:
        if call == name and not failed.is_set():
            failed.set()
            raise StoreUnavailable("for a moment")

    return on_call


def test_little_is_encoded_before_what_is_there_is_written(store: Store) -> None:
    size = 8 * MIB
    raw = np.random.default_rng(1).integers(0, 256, size, np.uint8).data
    block = ReadyBlock(codec.encode(raw, hint=Codec.RAW), raw, lambda: raw)
    most = AHEAD_BYTES // size + 1
    taken = 0

    def encoded() -> Iterator[ReadyBlock]:
        nonlocal taken
        for _ in range(3 * most):
            taken += 1
            assert taken - written <= most
            yield block

    written, stop = 0, threading.Event()
    filling = Filling(3 * most, 3 * most * size, pack_bytes=1024 * MIB, lanes=2, stop=stop)
    packs: SimpleQueue[PackInWork] = SimpleQueue()
    filler = threading.Thread(target=lambda: [packs.put(one) for one in filling.packs(encoded())])
    filler.start()
    pack = packs.get(timeout=SOON_S)
    eventually(lambda: taken == most)
    for one in pack:
        written += 1
        pack.written(one)
    filler.join(SOON_S)
    assert written == 3 * most


class PlannedStore(LocalStore):
    """Remembers how long files were said to become, and were."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.planned: dict[StorePath, int | None] = {}
        self.lengths: dict[StorePath, int] = {}

    def stage(self, path: StorePath, options: FileOptions | None = None) -> Stage:
        self.planned[path] = options.planned_bytes if options else None
        return super().stage(path, options)

    def publish(self, staged: StagedFile, path: StorePath) -> None:
        self.lengths[staged.path] = staged.length
        super().publish(staged, path)


@pytest.mark.parametrize("kind", ["weights", "noise"])
@pytest.mark.parametrize("dtype", [DType.U8, DType.BF16, DType.F64])
@pytest.mark.parametrize("raw_bytes", [8, 64 * KIB, MIB, 3 * MIB + 8])
def test_a_pack_is_planned_as_long_as_it_becomes_and_hardly_longer(
    tmp_path: Path, raw_bytes: int, dtype: DType, kind: str
) -> None:
    store, catalogue = PlannedStore(tmp_path / "yard"), MemoryCatalogue()
    store.init()
    raws = [content(raw_bytes, kind, seed) for seed in range(3)]
    tensors = [
        StateTensor(f"t{number}", dtype, (raw_bytes // nbytes(dtype, (1,)),)) for number in range(3)
    ]
    split = split_state(tensors, MIB)
    bases: Mapping[int, BlockId] = {}
    for delta in ("off", "also"):
        options = WriteOptions(delta=delta)
        writer = Writer(store, catalogue.upload(), options, bases=Reader(store, catalogue))
        (ids,) = writer.write([Content(split, [MemorySource(raw) for raw in raws], bases)])
        bases = dict(enumerate(ids))
        raws = [bytes([raw[0] ^ 1]) + raw[1:] for raw in raws]
    assert len(store.lengths) == 2
    for path, length in store.lengths.items():
        planned = store.planned[path]
        assert planned is not None
        assert length <= planned < 6 * raw_bytes + MIB


def test_the_report_says_what_deltas_would_take_whole(store: Store) -> None:
    catalogue, raws = MemoryCatalogue(), data(4)
    first = Writer(store, catalogue.upload())
    (bases,) = first.write(contents([MemorySource(raw) for raw in raws]))
    changed = [bytes([raw[0] ^ 1]) + raw[1:] for raw in raws]
    (content_of,) = contents([MemorySource(raw) for raw in changed])
    deltas = Writer(
        store, catalogue.upload(), WriteOptions(delta="only"), bases=Reader(store, catalogue)
    )
    deltas.write([replace(content_of, bases=dict(enumerate(bases)))])
    assert deltas.report.stored_bytes < 0.1 * deltas.report.whole_bytes
    assert deltas.report.whole_bytes == pytest.approx(first.report.whole_bytes, rel=0.01)
    assert first.report.whole_bytes <= first.report.stored_bytes


def test_what_work_fails_of_is_raised_whatever_becomes_of_its_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alive, "HEARTBEAT_S", 0.01)
    beaten = threading.Event()

    class Forbidden(WatchedUpload):
        def heartbeat(self) -> None:
            beaten.set()
            raise NotAllowed("the token was revoked")

        abandon = heartbeat

    def work() -> None:
        with alive.kept_alive(Forbidden(MemoryCatalogue().upload())):  # type: ignore[type-var]
            assert beaten.wait(SOON_S)
            raise StoreFull("no room")

    with pytest.raises(StoreFull):
        work()


@pytest.mark.parametrize("delta", ["off", "also", "only"])
def test_blocks_that_shrink_to_nothing_hold_no_memory_until_their_pack_is_full(
    store: Store, delta: Literal["off", "also", "only"]
) -> None:
    class NearlyZero(Source):
        length = 2 * RAW_BYTES

        def __init__(self, number: int) -> None:
            self._number = number

        def read_into(self, offset: int, into: memoryview) -> None:
            into[:] = bytes(len(into))
            into[:2] = self._number.to_bytes(2, "little")

    def nearly_zero(first: int) -> Content:
        tensors = [StateTensor(f"t{n:03}", DType.BF16, (RAW_BYTES,)) for n in range(64)]
        sources = [NearlyZero(number) for number in range(first, first + 64)]
        return Content(split_state(tensors, 2 * RAW_BYTES), sources)

    catalogue, options = MemoryCatalogue(), WriteOptions(kept_bytes=4 * MIB, threads=2)
    (bases,) = Writer(store, catalogue.upload(), options).write([nearly_zero(1)])
    writer = Writer(
        store, catalogue.upload(), replace(options, delta=delta), bases=Reader(store, catalogue)
    )
    tracemalloc.start()
    try:
        writer.write([replace(nearly_zero(100), bases=dict(enumerate(bases)))])
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert writer.report.packs_written == 1
    assert most_bytes < writer.report.new_bytes // 2
