from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightyard.errors import NotAllowed, StoreFull
from weightyard.names import PackId, UploadId
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Ownership, Store
from weightyard.testing.store_contract import StoreContract, files_of, get, put, stage


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with LocalStore(tmp_path / "yard") as store:
            yield store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "yard")
    store.init()
    return store


def test_modes_are_those_of_init_whatever_the_umask_says(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "yard")
    before = os.umask(0o077)
    try:
        store.init(Ownership(folder_mode=0o775))
        path = put(store, b"x")
    finally:
        os.umask(before)
    file = tmp_path / "yard" / path.text
    assert file.stat().st_mode & 0o777 == 0o664
    assert file.parent.stat().st_mode & 0o777 == 0o775


def test_a_full_disk_is_said_so_and_leaves_nothing(store: LocalStore) -> None:
    """A file size limit gives a real error from the kernel in the middle of a write."""
    upload = UploadId.new()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with (
            pytest.raises(StoreFull),
            store.stage(layout.staging(upload, "p")) as writing,
        ):
            writing.write(bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert files_of(store, upload) == []


def test_a_folder_without_write_permission_is_not_allowed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        store = LocalStore(Path(folder, "yard"))
        store.init(Ownership(folder_mode=0o555))
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)  # to root nothing is forbidden
        try:
            with pytest.raises(NotAllowed):
                stage(store, b"x")
        finally:
            if root:
                os.seteuid(0)


def test_a_writer_killed_half_way_leaves_nothing_under_a_final_name(tmp_path: Path) -> None:
    root = tmp_path / "yard"
    store = LocalStore(root)
    store.init()
    upload = UploadId.new()
    script = f"""
import os, signal
from pathlib import Path
from weightyard.names import UploadId
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
stage = LocalStore(Path({str(root)!r})).stage(layout.staging(UploadId({upload.hex!r}), "p"))
stage.write(bytes(1 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(store.list(layout.PACKS)) == []
    (left,) = files_of(store, upload)
    assert store.delete(left) is True


def test_a_published_file_is_not_the_staged_one_under_two_names(store: LocalStore) -> None:
    path = layout.pack(PackId.new())
    store.publish(stage(store, b"x"), path)
    assert (Path(store.url.removeprefix("file://")) / path.text).stat().st_nlink == 1
    assert get(store, path) == b"x"
