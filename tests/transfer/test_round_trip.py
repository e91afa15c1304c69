from __future__ import annotations

import filecmp
import gc
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import be_patient
from strategies import State, content, states

from weightyard.codec import Encoded, encode, encode_delta
from weightyard.errors import (
    Conflict,
    FileMissing,
    NoSuchThing,
    NotAllowed,
    Refused,
    YardError,
)
from weightyard.format import manifest as manifests
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, Codec
from weightyard.format.pack import PACK_HEADER, PackBuilder, padding
from weightyard.format.splitting import split_state
from weightyard.names import PackId, UploadId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.local import LocalStore
from weightyard.storage.opening import open_store
from weightyard.storage.store import Location, Read, ReadPath, Replica, Served, Store
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.faults import FaultyStore
from weightyard.transfer.appearing import appearing
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.folder import files_in, read_folder, write_folder
from weightyard.transfer.hedging import HedgeBudget
from weightyard.transfer.learned import Learned
from weightyard.transfer.plan import Wanted, wanted_of
from weightyard.transfer.reader import Reader, read_pack_index
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

SMALL_PACKS = WriteOptions(pack_bytes=5 * MIB)
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folder_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with LocalStore(tmp_path_factory.mktemp("yard")) as store:
        store.init()
        yield store


@pytest.fixture(scope="module")
def hdfs_store(cluster: MiniCluster) -> Iterator[Store]:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir)
    with pytest.MonkeyPatch.context() as patched:
        be_patient(patched)
        with open_store(cluster.fresh_dir(), settings) as store:
            store.init()
            yield store


def _round_trip(store: Store, state: State) -> None:
    catalogue = MemoryCatalogue()
    split = split_state(state.tensors, MIB)
    sources = [MemorySource(box) for box in state.boxes]
    blocks = Writer(store, catalogue.upload(), SMALL_PACKS).write([Content(split, sources)])
    digest, stored = manifests.encode(manifest_of([split], blocks))

    manifest = manifests.decode(stored, digest)
    learned = MemoryCatalogue()
    for pack in catalogue.packs:
        learned.add_pack(pack, read_pack_index(store, pack))
    found = [
        (box.extents, bytearray(sum(extent.length for extent in box.extents)))
        for tensor in manifest.tensors
        for box in tensor.boxes
    ]
    Reader(store, learned).read(
        want for extents, into in found for want in wanted_of(manifest, extents, memoryview(into))
    )
    assert [into for _, into in found] == state.boxes


@given(states())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_state_dict_comes_back_from_a_folder(folder_store: Store, state: State) -> None:
    _round_trip(folder_store, state)


@pytest.mark.cluster
@given(states())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_state_dict_comes_back_from_hdfs(hdfs_store: Store, state: State) -> None:
    _round_trip(hdfs_store, state)


@given(
    wanted=st.lists(st.tuples(st.integers(0, 5 * MIB // 2), st.integers(0, MIB)), max_size=6),
    kind=st.sampled_from(["weights", "noise", "text"]),
)
@settings(max_examples=40, deadline=None)
def test_any_ranges_of_a_block_come_back(
    folder_store: Store, wanted: list[tuple[int, int]], kind: str
) -> None:
    raw = content(5 * MIB // 2, kind, 1)
    block, catalogue = _one_block(folder_store, raw)
    ranges = [(offset, min(length, len(raw) - offset)) for offset, length in wanted]
    buffers = [bytearray(length) for _, length in ranges]
    Reader(folder_store, catalogue).read(
        Wanted(block.encoding.block, offset, memoryview(into))
        for (offset, _), into in zip(ranges, buffers, strict=True)
    )
    assert buffers == [raw[offset : offset + length] for offset, length in ranges]


def _one_block(store: Store, raw: bytes) -> tuple[Encoded, MemoryCatalogue]:
    encoded = encode(raw, hint=Codec.PLANES_BF16)
    return encoded, _write_pack(store, [encoded])


def _write_pack(store: Store, blocks: Sequence[Encoded]) -> MemoryCatalogue:
    builder = PackBuilder(PackId.new())
    with store.stage(layout.staging(UploadId.new(), "p")) as stage:
        stage.write(PACK_HEADER)
        for block in blocks:
            builder.add(block.encoding)
            for segment in block.segments:
                stage.write(segment)
                stage.write(padding(len(segment)))
        stage.write(builder.finish())
        store.publish(stage.close(), layout.pack(builder.pack))
    catalogue = MemoryCatalogue()
    catalogue.add_pack(builder.pack, builder.placements)
    return catalogue


@pytest.mark.parametrize("offset", [0, 1, MIB + 3])
def test_a_delta_is_read_through_its_base(folder_store: Store, offset: int) -> None:
    base = content(3 * MIB, "weights", 1)
    changed = bytearray(base)
    changed[MIB + 10 : MIB + 20] = b"0123456789"
    standalone = encode(base, hint=Codec.PLANES_BF16)
    delta = encode_delta(changed, base, standalone.encoding.block, hint=Codec.PLANES_BF16)
    catalogue = _write_pack(folder_store, [standalone, delta])
    out = bytearray(3 * MIB - offset)
    Reader(folder_store, catalogue).read([Wanted(delta.encoding.block, offset, memoryview(out))])
    assert out == changed[offset:]


def test_a_delta_without_its_base_is_an_error_that_names_it(folder_store: Store) -> None:
    base, changed = bytes(MIB), b"\x01" + bytes(MIB - 1)
    standalone = encode(base)
    delta = encode_delta(changed, base, standalone.encoding.block)
    catalogue = _write_pack(folder_store, [delta])
    with pytest.raises(FileMissing, match=standalone.encoding.block.hex):
        Reader(folder_store, catalogue).read(
            [Wanted(delta.encoding.block, 0, memoryview(bytearray(MIB)))]
        )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as people have it: weights, a config, a tokenizer, an empty file, an odd file."""
    folder = tmp_path / "model"
    (folder / "tokenizer").mkdir(parents=True)
    header = json.dumps(
        {
            "a.weight": {"dtype": "BF16", "shape": [2048, 700], "data_offsets": [0, 2867200]},
            "a.bias": {"dtype": "F32", "shape": [700], "data_offsets": [2867200, 2870000]},
        }
    ).encode()
    weights = len(header).to_bytes(8, "little") + header + content(2870000, "weights", 3)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "odd.safetensors").write_bytes(weights + b"one byte too many")
    (folder / "config.json").write_text('{"layers": 1}')
    (folder / "tokenizer" / "vocab.txt").write_bytes(content(1_500_000, "text", 0))
    (folder / "empty").touch()
    return folder


def _assert_same(model: Path, back: Path) -> None:
    names = [file.relative_to(model).as_posix() for file in model.rglob("*") if file.is_file()]
    assert sorted(names) == sorted(
        file.relative_to(back).as_posix() for file in back.rglob("*") if file.is_file()
    )
    assert filecmp.cmpfiles(model, back, names, shallow=False)[0] == names


def test_a_folder_comes_back_bit_for_bit(folder_store: Store, model: Path, tmp_path: Path) -> None:
    catalogue = MemoryCatalogue()
    manifest = write_folder(Writer(folder_store, catalogue.upload()), model, MIB)
    read_folder(Reader(folder_store, catalogue), manifest, tmp_path / "back")
    _assert_same(model, tmp_path / "back")


@pytest.mark.cluster
def test_a_folder_comes_back_from_hdfs_by_direct_reads(
    hdfs_store: Store, model: Path, tmp_path: Path
) -> None:
    catalogue = MemoryCatalogue()
    options = WriteOptions(replication=2, min_replicas=2)
    writer = Writer(hdfs_store, catalogue.upload(), options)
    manifest = write_folder(writer, model, MIB)
    # On a busy machine any replica may be slower than another, which is told like a failure.
    unhedged = Learned(hedges=HedgeBudget(share=0, burst=0))
    reader = Reader(hdfs_store, catalogue, learned=unhedged)
    report = read_folder(reader, manifest, tmp_path / "back")
    _assert_same(model, tmp_path / "back")
    assert set(report.by_path) == {ReadPath.DIRECT}
    assert report.failed == []


def test_what_is_in_the_store_is_not_written_again(folder_store: Store, model: Path) -> None:
    catalogue = MemoryCatalogue()
    first = Writer(folder_store, catalogue.upload())
    write_folder(first, model, MIB)
    assert first.report.packs_written == 1
    sizes = [file.stat().st_size for file in model.rglob("*") if file.is_file()]
    assert first.report.logical_bytes == sum(sizes)
    second = Writer(folder_store, catalogue.upload())
    write_folder(second, model, MIB)
    assert (second.report.new_bytes, second.report.packs_written) == (0, 0)
    assert second.report.logical_bytes == first.report.logical_bytes


def test_the_same_tensor_in_an_odd_file_is_plain_bytes_and_still_comes_back(
    folder_store: Store, model: Path
) -> None:
    manifest = write_folder(Writer(folder_store, MemoryCatalogue().upload()), model, MIB)
    kinds = {file.path: file.kind for file in manifest.files}
    assert kinds["model.safetensors"] == "safetensors"
    assert kinds["odd.safetensors"] == "plain"


def test_blocks_that_shrink_less_than_planned_go_into_another_pack(tmp_path: Path) -> None:
    """The plan takes bf16 at its usual ratio; noise does not shrink at all."""
    store = LocalStore(tmp_path)
    store.init()
    noise = tmp_path / "noise.safetensors"
    header = b'{"w":{"dtype":"BF16","shape":[6291456],"data_offsets":[0,12582912]}}'
    noise.write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(12 * MIB))
    catalogue = MemoryCatalogue()
    writer = Writer(store, catalogue.upload(), WriteOptions(pack_bytes=8 * MIB))
    manifest = write_folder(writer, noise, MIB)
    assert all(file.length <= 8 * MIB for file in store.list(layout.PACKS))
    read_folder(Reader(store, catalogue), manifest, tmp_path / "back")
    assert filecmp.cmp(noise, tmp_path / "back" / "noise.safetensors", shallow=False)


def test_a_file_that_is_there_already_is_not_overwritten(
    folder_store: Store, model: Path, tmp_path: Path
) -> None:
    catalogue = MemoryCatalogue()
    manifest = write_folder(Writer(folder_store, catalogue.upload()), model, MIB)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "config.json").write_text("mine")
    with pytest.raises(Conflict, match=r"config\.json"):
        read_folder(Reader(folder_store, catalogue), manifest, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_text() == "mine"


def test_a_pull_that_is_done_leaves_no_file_mapped(
    folder_store: Store, model: Path, tmp_path: Path
) -> None:
    catalogue = MemoryCatalogue()
    manifest = write_folder(Writer(folder_store, catalogue.upload()), model, MIB)
    gc.disable()
    try:
        read_folder(Reader(folder_store, catalogue), manifest, tmp_path / "back")
        assert str(tmp_path / "back") not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


class OneServes(FaultyStore):
    """One pack is read, or refused; reads of the others hang until they are cancelled."""

    def __init__(self, store: Store, one: PackId, refusal: YardError | None) -> None:
        super().__init__(store)
        self._one = layout.pack(one)
        self._refusal = refusal
        self._are_hanging = threading.Event()

    def read(
        self,
        location: Location,
        reads: Sequence[Read],
        *,
        replica: Replica | None = None,
        timeout_s: float | None = None,
        cancel: Cancel | None = None,
    ) -> Served:
        rest = [one.into[1:] for one in reads]  # as whoever receives has them at hand
        if location.path == self._one:
            assert self._are_hanging.wait(LIMIT_S)
            if self._refusal is not None:
                raise self._refusal
            return super().read(location, reads, replica=replica, timeout_s=timeout_s)
        assert cancel is not None
        ended = threading.Event()
        with cancel.ending(ended.set, "receiving"):
            self._are_hanging.set()
            ended.wait(LIMIT_S)
        cancel.check("receiving")
        raise AssertionError(f"nobody ended it, {len(rest)} reads are left")


@pytest.mark.parametrize("error", [NotAllowed("x"), KeyboardInterrupt(), RuntimeError()])
def test_a_pull_that_fails_says_why_and_leaves_no_file(
    folder_store: Store, tmp_path: Path, error: BaseException
) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(6 * MIB))
    catalogue = MemoryCatalogue()
    writer = Writer(folder_store, catalogue.upload(), WriteOptions(pack_bytes=3 * MIB))
    manifest = write_folder(writer, tmp_path / "noise", MIB)

    def interrupt(done_bytes: int) -> None:
        raise error

    refusal = error if isinstance(error, YardError) else None
    store = OneServes(folder_store, next(iter(catalogue.packs)), refusal)
    reader = Reader(store, catalogue, learned=Learned())
    with pytest.raises(type(error)):
        read_folder(reader, manifest, tmp_path / "back", progress=interrupt)
    assert list((tmp_path / "back").iterdir()) == []


def test_a_link_is_refused_rather_than_followed(folder_store: Store, model: Path) -> None:
    (model / "link").symlink_to("/etc/hostname")
    with pytest.raises(Refused, match="link"):
        write_folder(Writer(folder_store, MemoryCatalogue().upload()), model, MIB)


def test_what_is_no_file_is_refused_rather_than_left_out(model: Path) -> None:
    os.mkfifo(model / "pipe")
    with pytest.raises(Refused, match="pipe is neither a file nor a folder"):
        files_in(model)


def test_a_folder_that_cannot_be_read_is_named_rather_than_left_out() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        Path(folder, "config.json").write_text("{}")
        Path(folder, "shards").mkdir(mode=0o700)
        Path(folder, "shards", "model.bin").write_bytes(b"x")
        with _may_not_enter(Path(folder, "shards")), pytest.raises(NotAllowed, match="shards"):
            files_in(Path(folder))


@pytest.mark.parametrize("what", ["", "model.bin", "further"])
def test_what_lies_in_a_folder_that_may_not_be_entered_is_named(
    what: str, folder_store: Store
) -> None:
    catalogue = MemoryCatalogue()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shards = Path(folder, "shards")
        Path(shards, "further").mkdir(parents=True)
        Path(shards, "model.bin").write_bytes(b"x")
        manifest = write_folder(Writer(folder_store, catalogue.upload()), shards, MIB)
        shards.chmod(0o744)  # others may read its names, and nothing else of it
        with _may_not_enter(shards):
            with pytest.raises(NotAllowed, match="shards"):
                files_in(shards / what)
            with pytest.raises(NotAllowed, match="shards"):
                read_folder(Reader(folder_store, catalogue), manifest, shards / what)
            with pytest.raises(NotAllowed, match="shards"), appearing(shards / "new.bin"):
                pass


def test_a_name_too_long_for_the_system_is_that_of_no_folder() -> None:
    with pytest.raises(NoSuchThing, match="File name too long"):
        files_in(Path("a" * 300))


@contextmanager
def _may_not_enter(folder: Path) -> Iterator[None]:
    """Whoever the tests run as. The folder says what others may."""
    before = folder.stat().st_mode
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)  # to root nothing is forbidden
    else:
        folder.chmod((before & 0o7) << 6)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        else:
            folder.chmod(before)


def test_memory_sources_are_not_copied() -> None:
    array = np.arange(10, dtype=np.uint8)
    view = MemorySource(array).view(2, 3)
    array[3] = 99
    assert view is not None
    assert bytes(view) == b"\x02\x63\x04"
