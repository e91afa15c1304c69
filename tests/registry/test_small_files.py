"""Manifests and records: small files that many may write, and each costs HDFS a close."""

from __future__ import annotations

import pytest
from pushing import push, read_back, write

from weightyard.errors import Conflict, FileMissing, StoreUnavailable
from weightyard.names import ModelName, UploadId
from weightyard.records import Publication
from weightyard.registry.registry import Registry
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.testing.faults import Fault, FaultyStore
from weightyard.transfer.once import is_there, read_whole, write_each_once
from weightyard.transfer.publish import publish

BERT, ROBERTA = ModelName("team", "bert"), ModelName("team", "roberta")
FILES = {
    layout.journal(1): b"first",
    layout.record(BERT, 1): b"second",
    layout.record(ROBERTA, 1): b"third",
}


def test_files_of_one_name_in_several_folders_are_written_together(store: LocalStore) -> None:
    store.init()
    write_each_once(store, UploadId.new(), FILES)
    assert {path: read_whole(store, path) for path in FILES} == FILES
    assert list(store.list(layout.STAGING)) == []


def test_no_file_is_there_before_those_in_front_of_it(store: LocalStore) -> None:
    store.init()
    clean = FaultyStore(store)
    write_each_once(clean, UploadId.new(), {layout.journal(9): b"", layout.journal(8): b""})
    second = [index for index, name in enumerate(clean.calls) if name == "publish"][1]
    failing = FaultyStore(store, {second: Fault.BEFORE})
    first, *others = FILES
    with pytest.raises(StoreUnavailable):
        write_each_once(failing, UploadId.new(), dict(list(FILES.items())[:2]))
    assert is_there(store, first, FILES[first])
    with pytest.raises(FileMissing):
        store.stat(others[0])


def test_who_cannot_publish_leaves_nothing_in_staging(store: LocalStore) -> None:
    store.init()
    clean = FaultyStore(store)
    write_each_once(clean, UploadId.new(), {layout.journal(9): b"", layout.journal(8): b""})
    first = clean.calls.index("publish")
    failing, files = FaultyStore(store, {first: Fault.BEFORE}), dict(list(FILES.items())[:2])
    with pytest.raises(StoreUnavailable):
        write_each_once(failing, UploadId.new(), files)
    assert list(store.list(layout.STAGING)) == []


def test_a_file_that_is_there_with_other_content_is_a_conflict(store: LocalStore) -> None:
    store.init()
    write_each_once(store, UploadId.new(), FILES)
    write_each_once(store, UploadId.new(), FILES)
    with pytest.raises(Conflict, match="other content"):
        write_each_once(store, UploadId.new(), {layout.journal(1): b"other"})
    assert list(store.list(layout.STAGING)) == []


def test_what_a_killed_writer_left_in_staging_is_in_nobodys_way(store: LocalStore) -> None:
    store.init()
    upload, killed = UploadId.new(), FaultyStore(store, on_call=_die_before_publish)
    with pytest.raises(_Killed):
        write_each_once(killed, upload, FILES)
    assert list(store.list(layout.STAGING)) != []
    write_each_once(store, upload, FILES)
    assert {path: read_whole(store, path) for path in FILES} == FILES


def test_a_commit_is_repeated_after_a_kill_before_its_manifest_had_its_name(
    registry: Registry, store: LocalStore
) -> None:
    upload = registry.open_upload(BERT, Publication())
    manifest = write(upload, store, b"one", b"two")
    killed = FaultyStore(store, on_call=_die_before_publish)
    with pytest.raises(_Killed):
        publish(killed, upload, manifest, Publication(), "key")
    version = publish(store, upload, manifest, Publication(), "key")
    assert read_back(registry, store, version) == [b"one", b"two"]


class _Killed(BaseException):
    pass


def _die_before_publish(index: int, name: str) -> None:
    if name == "publish":
        raise _Killed


def test_a_manifest_that_is_there_is_not_written_again(
    registry: Registry, store: LocalStore
) -> None:
    first = push(registry, store, b"one", b"two")
    counted = FaultyStore(store)
    second = push(registry, counted, b"one", b"two")
    assert (second.digest, second.number) == (first.digest, first.number + 1)
    assert "stage" not in counted.calls
