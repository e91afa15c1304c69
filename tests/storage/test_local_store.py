from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weightyard.errors import BadSetting, FileMissing, NotAllowed, StoreFull, Unsupported
from weightyard.names import PackId, UploadId
from weightyard.storage import final_name, layout
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


def test_a_folder_that_is_gone_as_when_it_was_unmounted_is_not_made_anew(
    store: LocalStore, tmp_path: Path
) -> None:
    staged = stage(store, b"x")
    (tmp_path / "yard").rename(tmp_path / "away")
    for act in (
        lambda: stage(store, b"y"),
        lambda: store.publish(staged, layout.pack(PackId.new())),
    ):
        with pytest.raises(FileMissing):
            act()
    assert not (tmp_path / "yard").exists()


@pytest.mark.parametrize("stranger", [{"owner": "nobody-knows"}, {"group": "nobody-knows"}])
def test_an_owner_this_host_does_not_know_is_refused_before_a_folder_is_made(
    tmp_path: Path, stranger: dict[str, str]
) -> None:
    with pytest.raises(BadSetting, match="nobody-knows"):
        LocalStore(tmp_path / "yard").init(Ownership(**stranger))  # type: ignore[arg-type]
    assert not (tmp_path / "yard").exists()


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT, on many file systems in user space, and on some network shares."""

    def refuse(*names: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_links")
class TestLocalStoreWithoutHardLinks(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with LocalStore(tmp_path / "yard") as store:
            yield store


@pytest.mark.usefixtures("no_links")
def test_a_file_system_that_can_only_overwrite_is_named_with_what_to_do(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_name, "_rename_if_free", lambda source, target: errno.EINVAL)
    with pytest.raises(Unsupported, match=r"(?s)\(\w+\).*hard links.*another file system"):
        put(store, b"x")
    assert list(store.list(layout.PACKS)) == []


def test_a_full_disk_is_said_so_and_leaves_nothing(store: LocalStore) -> None:
    """A file size limit gives a real error from the kernel in the middle of a write."""
    upload = UploadId.new()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with (
            pytest.raises(StoreFull, match=re.escape(str(store.folder))),
            store.stage(layout.staging(upload, "p")) as writing,
        ):
            writing.write(bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert files_of(store, upload) == []


@pytest.fixture
def reachable() -> Iterator[LocalStore]:
    """A store in a folder that others may enter, as they may not enter pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        store = LocalStore(Path(folder, "yard"))
        store.init(Ownership(folder_mode=0o755))
        yield store


@contextmanager
def as_nobody() -> Iterator[None]:
    """To root nothing is forbidden."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_folder_without_write_permission_is_not_allowed(reachable: LocalStore) -> None:
    reachable.init(Ownership(folder_mode=0o555))
    with as_nobody(), pytest.raises(NotAllowed):
        stage(reachable, b"x")


def test_a_file_whose_mode_cannot_be_set_leaves_neither_a_descriptor_nor_itself(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*values: object) -> None:  # as some file systems of other hosts do
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    upload, before = UploadId.new(), os.listdir("/proc/self/fd")
    with pytest.raises(NotAllowed):
        store.stage(layout.staging(upload, "f"))
    assert os.listdir("/proc/self/fd") == before
    assert files_of(store, upload) == []


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(reachable: LocalStore) -> None:
    path = put(reachable, b"x")
    (reachable.folder / path.text).parent.chmod(0o300)
    with as_nobody(), pytest.raises(NotAllowed):
        list(reachable.list(layout.PACKS))


def test_a_file_in_a_folder_that_cannot_be_entered_is_not_taken_for_a_missing_one(
    reachable: LocalStore,
) -> None:
    path, staged = put(reachable, b"x"), stage(reachable, b"y")
    for file in (path, staged.path):
        (reachable.folder / file.text).parent.chmod(0o600)
    with as_nobody():
        for look in (reachable.stat, reachable.locate, reachable.delete):
            with pytest.raises(NotAllowed):
                look(path)
        with pytest.raises(NotAllowed):
            reachable.publish(staged, layout.pack(PackId.new()))


def test_a_link_that_leads_nowhere_is_no_file(store: LocalStore) -> None:
    path = put(store, b"x")
    for name, leads_to in (("itself", "itself"), ("gone", "nothing")):
        (store.folder / path.text).with_name(name).symlink_to(leads_to)
    assert [file.path for file in store.list(layout.PACKS)] == [path]


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
