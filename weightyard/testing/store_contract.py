"""StoreContract: what `weightyard.storage.Store` promises, as tests any store can inherit.

class TestMyStore(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with MyStore(...) as store:
            yield store          # fresh and empty; the suite calls init
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
from typing_extensions import Buffer

from weightyard.errors import (
    AlreadyThere,
    Cancelled,
    DataNodeFailed,
    DeadlineExceeded,
    FileMissing,
    StaleLocation,
    TooLarge,
    Unsupported,
)
from weightyard.names import Digest, PackId, UploadId
from weightyard.storage import layout
from weightyard.storage.cancel import Cancel
from weightyard.storage.store import (
    FileOptions,
    Location,
    Read,
    ReadPath,
    StagedFile,
    Store,
    StorePath,
)

_BYTES = bytes(range(256)) * 4099
"""About a megabyte with no repetition at a power of two, so that a shifted read shows."""


class StoreContract:
    """Inherit it and give a `store` fixture: a fresh, empty store."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        raise TypeError("a contract's subclass gives the store fixture")

    @pytest.fixture
    def ready(self, store: Store) -> Store:
        store.init()
        return store

    def test_init_may_be_repeated_and_changes_no_file(self, ready: Store) -> None:
        path = put(ready, _BYTES)
        ready.init()
        assert get(ready, path) == _BYTES

    def test_a_staged_file_has_no_final_name_until_published(self, ready: Store) -> None:
        path = layout.pack(PackId.new())
        staged = stage(ready, _BYTES)
        assert staged.length == len(_BYTES)
        with pytest.raises(FileMissing):
            ready.stat(path)
        ready.publish(staged, path)
        assert get(ready, path) == _BYTES
        with pytest.raises(FileMissing):
            ready.stat(staged.path)

    def test_bytes_come_back_from_many_writes_of_any_buffer(self, ready: Store) -> None:
        parts: list[Buffer] = [
            _BYTES[:1],
            bytearray(_BYTES[1:70_000]),
            memoryview(_BYTES)[70_000:],
            b"",
        ]
        path = layout.pack(PackId.new())
        ready.publish(stage(ready, *parts), path)
        assert get(ready, path) == _BYTES

    def test_an_empty_file_is_a_file(self, ready: Store) -> None:
        path = put(ready, b"")
        assert ready.stat(path).length == 0
        assert ready.locate(path).length == 0

    def test_publish_never_overwrites(self, ready: Store) -> None:
        path = put(ready, _BYTES)
        other = stage(ready, b"other")
        with pytest.raises(AlreadyThere):
            ready.publish(other, path)
        assert get(ready, path) == _BYTES
        assert get(ready, other.path) == b"other", "the loser stays staged"

    def test_publish_leaves_a_folder_of_that_name_alone(self, ready: Store) -> None:
        inside, staged = stage(ready, _BYTES), stage(ready, b"other")
        folder = StorePath(inside.path.text.rpartition("/")[0])
        with pytest.raises(AlreadyThere):
            ready.publish(staged, folder)
        assert get(ready, inside.path) == _BYTES
        assert get(ready, staged.path) == b"other", "it stays staged"

    def test_of_racing_publishers_exactly_one_wins(self, ready: Store) -> None:
        path = layout.manifest(Digest(os.urandom(32).hex()))
        contents = [bytes([i]) * (i + 1) for i in range(4)]
        staged = [stage(ready, content) for content in contents]
        won: list[int] = []
        start = threading.Barrier(len(staged))

        def race(i: int) -> None:
            start.wait()
            with contextlib.suppress(AlreadyThere):
                ready.publish(staged[i], path)
                won.append(i)

        threads = [threading.Thread(target=race, args=(i,)) for i in range(len(staged))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(won) == 1
        assert get(ready, path) == contents[won[0]]

    def test_publishing_what_is_not_staged_says_so(self, ready: Store) -> None:
        never = StagedFile(layout.staging(UploadId.new(), "never"), 3)
        with pytest.raises(FileMissing):
            ready.publish(never, layout.pack(PackId.new()))

    def test_bytes_that_can_be_had_again_are_the_callers_once_written(self, ready: Store) -> None:
        path, memory = layout.pack(PackId.new()), bytearray(_BYTES)
        with ready.stage(layout.staging(UploadId.new(), "p")) as stage_:
            stage_.write(memory, lambda: _BYTES)
            memory[:] = bytes(len(memory))
            stage_.write(memory, lambda: bytes(len(_BYTES)))
            ready.publish(stage_.close(), path)
        assert get(ready, path) == _BYTES + bytes(len(_BYTES))

    def test_an_aborted_stage_leaves_nothing(self, ready: Store) -> None:
        upload = UploadId.new()
        with ready.stage(layout.staging(upload, "p")) as stage_:
            stage_.write(_BYTES)
            stage_.abort()
            stage_.abort()
        assert files_of(ready, upload) == []

    def test_a_writer_that_fails_leaves_nothing_that_looks_whole(self, ready: Store) -> None:
        upload = UploadId.new()

        def fail_half_way() -> None:
            with ready.stage(layout.staging(upload, "p")) as stage_:
                stage_.write(_BYTES)
                raise RuntimeError("writer failed")

        with pytest.raises(RuntimeError, match="writer failed"):
            fail_half_way()
        assert files_of(ready, upload) == []

    def test_a_staging_name_in_use_is_left_alone(self, ready: Store) -> None:
        staged = stage(ready, _BYTES)
        with (
            contextlib.suppress(AlreadyThere),
            ready.stage(staged.path) as second,
        ):
            second.write(b"intruder")
            second.close()
        assert get(ready, staged.path) == _BYTES

    def test_ranges_fill_their_buffers_and_nothing_else(self, ready: Store) -> None:
        path = put(ready, _BYTES)
        ranges = [(0, 1), (511, 2), (1, 513), (65_535, 131_074), (len(_BYTES) - 7, 7), (9, 0)]
        frame = 16
        buffers = [bytearray(b"\xaa" * (length + 2 * frame)) for _, length in ranges]
        reads = [
            Read(offset, memoryview(buffer)[frame : frame + length])
            for (offset, length), buffer in zip(ranges, buffers, strict=True)
        ]
        ready.read(ready.locate(path), reads)
        for (offset, length), buffer in zip(ranges, buffers, strict=True):
            assert buffer[frame : frame + length] == _BYTES[offset : offset + length]
            assert buffer[:frame] + buffer[frame + length :] == b"\xaa" * 2 * frame

    def test_every_replica_named_serves_the_same_bytes(self, ready: Store) -> None:
        path = put(ready, _BYTES, FileOptions(replication=2 if ready.replicates else 1))
        location = ready.locate(path)
        assert location.length == len(_BYTES)
        assert [(span.offset, span.length) for span in location.spans] == [(0, len(_BYTES))]
        for replica in location.spans[0].replicas:
            out = bytearray(len(_BYTES))
            served = ready.read(location, [Read(0, memoryview(out))], replica=replica, timeout_s=30)
            assert out == _BYTES
            if served.path not in (ReadPath.LIBHDFS, ReadPath.NATIVE, ReadPath.WEBHDFS):
                assert served.replica == replica

    def test_reads_from_many_threads_do_not_mix(self, ready: Store) -> None:
        path = put(ready, _BYTES)
        location = ready.locate(path)
        wrong: list[int] = []

        def read(i: int) -> None:
            for k in range(8):
                offset = (i * 37_003 + k * 101_111) % (len(_BYTES) - 50_000)
                out = bytearray(50_000)
                ready.read(location, [Read(offset, memoryview(out))])
                if out != _BYTES[offset : offset + 50_000]:
                    wrong.append(offset)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []

    def test_a_read_past_the_end_is_refused(self, ready: Store) -> None:
        location = ready.locate(put(ready, b"abc"))
        with pytest.raises(TooLarge):
            ready.read(location, [Read(1, memoryview(bytearray(3)))])

    def test_a_read_that_is_cancelled_says_so_and_fills_nothing(self, ready: Store) -> None:
        location = ready.locate(put(ready, _BYTES))
        cancel = Cancel()
        out = bytearray(len(_BYTES))
        ready.read(location, [Read(0, memoryview(out))], cancel=cancel)
        assert out == _BYTES, "whoever may cancel need not"
        cancel.cancel()
        out = bytearray(len(_BYTES))
        for replica in (None, location.spans[0].replicas[0]):
            with pytest.raises(Cancelled):
                ready.read(location, [Read(0, memoryview(out))], replica=replica, cancel=cancel)
        assert out == bytes(len(_BYTES))
        ready.read(location, [Read(0, memoryview(out))])
        assert out == _BYTES, "the store goes on"

    def test_a_read_without_time_ends_at_once_and_the_store_goes_on(self, ready: Store) -> None:
        location = ready.locate(put(ready, _BYTES))
        out = bytearray(len(_BYTES))
        for replica in (None, location.spans[0].replicas[0]):
            with pytest.raises(DeadlineExceeded):
                ready.read(location, [Read(0, memoryview(out))], replica=replica, timeout_s=1e-6)
        ready.read(location, [Read(0, memoryview(out))], timeout_s=60.0)
        assert out == _BYTES

    def test_a_missing_file_is_missing_for_every_call(self, ready: Store) -> None:
        path = layout.pack(PackId.new())
        for call in (ready.stat, ready.locate):
            with pytest.raises(FileMissing):
                call(path)
        with pytest.raises(FileMissing):
            ready.adjust(path, FileOptions(replication=1))
        assert ready.delete(path) is False

    @pytest.mark.parametrize("below", ["x", "x/y"])
    def test_below_a_file_nothing_is_and_nothing_can_be(self, ready: Store, below: str) -> None:
        file, staged, upload = put(ready, _BYTES), stage(ready, b"x"), UploadId.new()
        path = StorePath(f"{file}/{below}")
        for call in (ready.stat, ready.locate):
            with pytest.raises(FileMissing):
                call(path)
        with pytest.raises(FileMissing):
            ready.adjust(path, FileOptions(replication=1))
        with pytest.raises(FileMissing):
            ready.publish(staged, path)
        assert get(ready, staged.path) == b"x", "it stays staged"
        ready.publish(staged, layout.staging_folder(upload))
        with pytest.raises(FileMissing):
            ready.stage(layout.staging(upload, "file"))
        assert ready.delete(path) is False
        assert list(ready.list(path)) == list(ready.list(file)) == []
        assert get(ready, file) == _BYTES

    def test_a_file_deleted_after_locating_is_an_error_or_still_itself(self, ready: Store) -> None:
        """A location outlives its file: where copies go in the store's own time (the blocks of
        HDFS), it may be read for a while yet. What it never gives is other bytes."""
        path = put(ready, _BYTES)
        location = ready.locate(path)
        assert ready.delete(path) is True
        with pytest.raises(FileMissing):
            ready.stat(path)
        assert ready.delete(path) is False
        assert path not in {file.path for file in ready.list(layout.PACKS)}
        with pytest.raises(FileMissing):
            ready.locate(path)
        for replica in (None, location.spans[0].replicas[0]):
            out = bytearray(len(_BYTES))
            try:
                ready.read(location, [Read(0, memoryview(out))], replica=replica)
            except (FileMissing, StaleLocation, DataNodeFailed):
                continue
            assert ready.replicates, "who has no copies elsewhere has none left"
            assert out == _BYTES

    def test_list_finds_files_at_any_depth_and_only_below_the_folder(self, ready: Store) -> None:
        packs = {put(ready, b"x" * i) for i in range(1, 4)}
        ready.publish(stage(ready, b"m"), layout.manifest(Digest("ab" * 32)))
        found = {file.path: file.length for file in ready.list(layout.PACKS)}
        assert set(found) == packs
        assert sorted(found.values()) == [1, 2, 3]
        assert list(ready.list(StorePath("packs/no-such-folder"))) == []

    def test_top_has_files_and_folders_right_below_the_root(self, ready: Store) -> None:
        before = set(ready.top())
        assert {*layout.FOLDERS} <= before
        stage = ready.stage(layout.staging(UploadId.new(), "file"))
        stage.write(b"whose?")
        ready.publish(stage.close(), StorePath("loose"))
        assert set(ready.top()) - before == {StorePath("loose")}

    def test_only_an_empty_folder_can_be_deleted(self, ready: Store) -> None:
        staged = stage(ready, b"x")
        folder = StorePath(staged.path.text.rpartition("/")[0])
        assert ready.delete(folder) is False
        assert get(ready, staged.path) == b"x"
        assert ready.delete(staged.path) is True
        assert ready.delete(folder) is True

    def test_replication_is_kept_and_can_change(self, ready: Store) -> None:
        if not ready.replicates:
            path = put(ready, b"x")
            with pytest.raises(Unsupported):
                ready.adjust(path, FileOptions(replication=2))
            return
        path = put(ready, b"x", FileOptions(replication=1))
        assert ready.stat(path).replication == 1
        ready.adjust(path, FileOptions(replication=2))
        assert ready.stat(path).replication == 2

    def test_a_policy_the_store_does_not_have_is_refused(self, ready: Store) -> None:
        path = put(ready, b"x")
        with pytest.raises(Unsupported):
            ready.adjust(path, FileOptions(policy="NO_SUCH_POLICY"))


def stage(store: Store, *parts: Buffer) -> StagedFile:
    """A staged file of these bytes, under a new name."""
    with store.stage(layout.staging(UploadId.new(), "file")) as stage_:
        for part in parts:
            stage_.write(part)
        return stage_.close()


def put(store: Store, content: bytes, options: FileOptions | None = None) -> StorePath:
    """A published file of these bytes, under a new pack's name."""
    path = layout.pack(PackId.new())
    with store.stage(layout.staging(UploadId.new(), "file"), options) as stage_:
        stage_.write(content)
        store.publish(stage_.close(), path)
    return path


def get(store: Store, path: StorePath) -> bytes:
    """All bytes of a file."""
    location: Location = store.locate(path)
    out = bytearray(location.length)
    store.read(location, [Read(0, memoryview(out))])
    return bytes(out)


def files_of(store: Store, upload: UploadId) -> list[StorePath]:
    return [file.path for file in store.list(layout.staging_folder(upload))]
