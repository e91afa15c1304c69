"""Files that have not changed since they were pushed are not read again; all others are."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from weightyard.errors import Conflict
from weightyard.format.block import MIB
from weightyard.opening import open_yard
from weightyard.records import Pushed
from weightyard.settings import Settings
from weightyard.transfer import known
from weightyard.transfer.source import FileSource
from weightyard.transfer.stamp import Stamp, marking_devices
from weightyard.yard import Yard

MODEL = "team/bert"
FILE_BYTES = 20 * MIB
HOUR_NS = 3_600_000_000_000


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if every file had lain on a disk for a while; those of tests are new, and in memory."""
    monkeypatch.setattr(known, "SETTLED_NS", -HOUR_NS)
    here = frozenset({tmp_path.stat().st_dev})
    monkeypatch.setattr(known, "marking_devices", lambda: here)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model" / "weights.bin"
    file.parent.mkdir()
    file.write_bytes(_noise(1))
    return file


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as yard:
        yield yard


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long every read of a file was."""
    lengths = []
    fill = FileSource._fill

    def counting(source: FileSource, file: int, offset: int, into: memoryview) -> None:
        lengths.append(len(into))
        fill(source, file, offset, into)

    monkeypatch.setattr(FileSource, "_fill", counting)
    return lengths


def yard_in(folder: Path, store: str = "store") -> Yard:
    settings = Settings(home=folder / f"home-{store}", cache=folder / "cache")
    return open_yard(str(folder / store), settings=settings)


def _noise(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(FILE_BYTES)


def content(yard: Yard, pushed: Pushed, folder: Path) -> bytes:
    return Path(yard.pull(pushed.ref, folder), "weights.bin").read_bytes()


def test_what_has_not_changed_is_pushed_again_without_being_read(
    yard: Yard, model: Path, read: list[int], tmp_path: Path
) -> None:
    first = yard.push(model.parent, MODEL)
    assert sum(read) >= FILE_BYTES
    read.clear()
    again = yard.push(model.parent, MODEL)
    assert sum(read) < MIB
    assert (again.digest, again.new_bytes, again.packs_written) == (first.digest, 0, 0)
    assert content(yard, again, tmp_path / "out") == model.read_bytes()


def test_a_preview_reads_nothing_that_is_known_and_a_push_nothing_it_hashed(
    yard: Yard, model: Path, read: list[int]
) -> None:
    seen = yard.push(model.parent, MODEL)
    read.clear()
    with yard.gather(model.parent) as gathered:
        assert yard.preview(gathered, MODEL).digest == seen.digest
    assert sum(read) < MIB


@pytest.mark.parametrize("how", ["a byte", "another file", "its dates set back"])
def test_a_file_that_changed_is_read(
    yard: Yard, model: Path, tmp_path: Path, how: str, read: list[int]
) -> None:
    yard.push(model.parent, MODEL)
    was = model.stat()
    if how == "another file":
        model.with_name("new").write_bytes(_noise(2))
        model.with_name("new").replace(model)
    else:
        with model.open("r+b") as opened:
            opened.seek(9 * MIB)
            opened.write(b"changed")
    if how == "its dates set back":
        os.utime(model, ns=(was.st_atime_ns, was.st_mtime_ns))
    read.clear()
    pushed = yard.push(model.parent, MODEL)
    assert sum(read) >= FILE_BYTES
    assert content(yard, pushed, tmp_path / "out") == model.read_bytes()


def test_a_file_known_from_one_yard_is_pushed_whole_to_another(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    yard.push(model.parent, MODEL)
    with yard_in(tmp_path, "other") as other:
        pushed = other.push(model.parent, MODEL)
        assert pushed.new_bytes == FILE_BYTES
        assert content(other, pushed, tmp_path / "out") == model.read_bytes()


def test_a_copy_is_another_file(yard: Yard, model: Path, tmp_path: Path, read: list[int]) -> None:
    yard.push(model.parent, MODEL)
    copy = tmp_path / "copy"
    shutil.copytree(model.parent, copy)  # with its dates
    read.clear()
    assert yard.push(copy, MODEL).new_bytes == 0
    assert sum(read) >= FILE_BYTES


def test_a_name_that_is_wrong_is_never_stored_and_not_believed_again(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    """As if a record had been kept for bytes that the file no longer has."""
    yard.push(model.parent, MODEL)
    (record,) = (tmp_path / "cache" / known.FOLDER_NAME).iterdir()
    kept = record.read_bytes()
    with model.open("r+b") as opened:
        opened.write(b"changed")
    now = Stamp.of(model.stat())
    body = known.msgspec.msgpack.decode(kept[known._CHECK_BYTES :], type=known._Record)
    lying = known.msgspec.msgpack.encode(known._Record(body.format, now, body.blocks))
    record.write_bytes(known._check(lying) + lying)
    with yard_in(tmp_path, "other") as other:
        with pytest.raises(Conflict, match="push it again"):
            other.push(model.parent, MODEL)
        pushed = other.push(model.parent, MODEL)
        assert content(other, pushed, tmp_path / "out") == model.read_bytes()


def test_rehash_reads_what_is_known(yard: Yard, model: Path, read: list[int]) -> None:
    yard.push(model.parent, MODEL)
    read.clear()
    yard.push(model.parent, MODEL, rehash=True)
    assert sum(read) >= FILE_BYTES


@pytest.mark.parametrize("harm", ["cut", "flipped", "empty", "a folder", "someone else's"])
def test_a_record_that_is_not_whole_or_not_ours_costs_a_reading(
    yard: Yard, model: Path, tmp_path: Path, read: list[int], harm: str
) -> None:
    first = yard.push(model.parent, MODEL)
    (record,) = (tmp_path / "cache" / known.FOLDER_NAME).iterdir()
    kept = record.read_bytes()
    if harm == "cut":
        record.write_bytes(kept[:-1])
    elif harm == "flipped":
        record.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    elif harm == "empty":
        record.write_bytes(b"")
    elif harm == "a folder":
        record.unlink()
        record.mkdir()
    elif os.geteuid() == 0:
        os.chown(record, 12345, 12345)
    else:
        record.unlink()
        record.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_bytes(kept)
    read.clear()
    assert yard.push(model.parent, MODEL).digest == first.digest
    assert sum(read) >= FILE_BYTES


def test_a_cache_that_cannot_be_used_fails_no_push(yard: Yard, model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / known.FOLDER_NAME).write_bytes(b"no folder")
    assert yard.push(model.parent, MODEL).new_bytes == FILE_BYTES


def test_a_file_that_changes_while_it_is_pushed_is_not_remembered(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    with yard.gather(model.parent) as gathered:
        yard.preview(gathered, MODEL)
        model.write_bytes(_noise(3))
    assert not (tmp_path / "cache" / known.FOLDER_NAME).exists()


def test_a_file_that_changed_a_moment_ago_is_not_remembered(
    yard: Yard, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has it mapped could change it once more, and the system would not notice."""
    monkeypatch.setattr(known, "SETTLED_NS", 60_000_000_000)
    yard.push(model.parent, MODEL)
    assert not (tmp_path / "cache" / known.FOLDER_NAME).exists()


def test_a_small_file_is_neither_remembered_nor_waited_for(
    yard: Yard, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr("os.fdatasync", written.append)
    model.write_bytes(b"small")
    yard.push(model.parent, MODEL)
    assert not written
    assert not (tmp_path / "cache" / known.FOLDER_NAME).exists()


def test_a_file_in_memory_is_not_remembered(
    yard: Yard, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "marking_devices", frozenset)
    yard.push(model.parent, MODEL)
    assert not (tmp_path / "cache" / known.FOLDER_NAME).exists()


def test_records_are_bounded(
    yard: Yard, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "_MAX_RECORDS", 2)
    for number in range(4):
        (model.parent / f"{number}.bin").write_bytes(_noise(number)[: 2 * MIB])
    yard.push(model.parent, MODEL)
    assert len(os.listdir(tmp_path / "cache" / known.FOLDER_NAME)) == 2


@pytest.mark.parametrize(
    ("kind", "is_marking"),
    [("ext4", True), ("xfs", True), ("overlay", True), ("tmpfs", False), ("nfs4", False)],
)
def test_only_file_systems_that_note_every_change_are_believed(
    kind: str, is_marking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"36 35 98:7 /mnt1 /mnt2 rw,noatime master:1 - {kind} /dev/root rw\n")
    monkeypatch.setattr("weightyard.transfer.stamp._MOUNTS", mounts)
    assert marking_devices() == (frozenset({os.makedev(98, 7)}) if is_marking else frozenset())


def test_a_system_that_does_not_tell_its_mounts_has_nothing_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("", "36 35\n", "36 35 x:y / / rw - ext4 /dev/root rw\n"):
        (tmp_path / "mountinfo").write_text(text)
        monkeypatch.setattr("weightyard.transfer.stamp._MOUNTS", tmp_path / "mountinfo")
        assert marking_devices() == frozenset()
    monkeypatch.setattr("weightyard.transfer.stamp._MOUNTS", tmp_path / "none")
    assert marking_devices() == frozenset()


def test_a_write_through_a_mapping_is_noticed_although_it_wrote_to_the_page_before(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own doing: no other kind of write is so easily missed."""
    monkeypatch.setattr(known, "marking_devices", marking_devices)
    with tempfile.TemporaryDirectory(prefix="weightyard-tests-", dir="/var/tmp") as disk:
        if Path(disk).stat().st_dev not in marking_devices():
            pytest.skip("/var/tmp is not on a disk of this host whose file system marks changes")
        file = Path(disk, "weights.bin")
        file.write_bytes(_noise(1))
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
            mapped[0] = 1
            yard.push(disk, MODEL)
            assert (tmp_path / "cache" / known.FOLDER_NAME).is_dir()
            time.sleep(0.02)  # a tick of the clock
            mapped[1] = 2
            pushed = yard.push(disk, MODEL)
            assert content(yard, pushed, tmp_path / "out") == mapped[:]
