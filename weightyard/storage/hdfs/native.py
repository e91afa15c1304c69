"""Names, folders and writes by hdfs-native, which brings RPC, HA, Kerberos and pipelines."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from hdfs_native import Client, FileStatus, FileWriter, WriteOptions

from weightyard.errors import (
    AlreadyThere,
    BadSetting,
    FileMissing,
    NotAllowed,
    StoreUnavailable,
    Unsupported,
    YardError,
)
from weightyard.storage.hdfs import remote
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.remote import NotEmpty
from weightyard.storage.hdfs.sink import Sink
from weightyard.storage.store import Ownership
from weightyard.storage.watched import Watched

_T = TypeVar("_T")

_ANSWER_S = 10.0
_SILENCE_S = 10.0
_MIB = 1024 * 1024
_PIECE_BYTES = 4 * _MIB
_COPY_BYTES = _MIB // 4
_MAX_KNOWN_FOLDERS = 4096

# hdfs-native alone would try for three minutes to reach a NameNode that is down. RetryingStore
# tries again, under a deadline and with read-back; here it is enough to find the active one.
_HASTE = {
    "dfs.client.failover.max.attempts": "4",
    "dfs.client.failover.sleep.base.millis": "100",
    "dfs.client.failover.sleep.max.millis": "500",
}


class Namespace:
    """The file system by hdfs-native; paths are absolute. Thread-safe, every call is bounded.

    Raises FileMissing, AlreadyThere, NotAllowed, StoreFull, Unsupported and StoreUnavailable.
    """

    def __init__(self, cluster: Cluster, *, limit_s: float, silence_s: float = _SILENCE_S) -> None:
        """`silence_s`: how long hdfs-native waits for a DataNode, before it asks another."""
        if not cluster.is_kerberos:
            _assume_user(cluster.user)
        self._cluster = cluster
        self._silence_s = silence_s
        self._answer_s = min(_ANSWER_S, limit_s)
        self._limit_s = limit_s
        self._watched = Watched()
        self._lock = threading.Lock()
        self._attempt = 0
        self._client = self._connect()
        self._known: set[str] = set()
        self._making: dict[str, threading.Event] = {}

    def status(self, path: str) -> FileStatus:
        return self.call(f"looking at {path}", lambda client: client.get_file_info(path))

    def entries(self, folder: str) -> Sequence[FileStatus]:
        """Files and folders right below a folder."""
        return self.call(f"listing {folder}", partial(_entries, folder))

    def list(self, folder: str) -> Iterator[FileStatus]:
        """All files below a folder. Folders that vanish meanwhile have none."""
        folders = [folder]
        while folders:
            one = folders.pop()
            try:
                entries = self.entries(one)
            except FileMissing:
                continue
            for entry in entries:
                if entry.isdir:
                    folders.append(entry.path)
                elif entry.path != folder:
                    yield entry

    def make_folder(self, folder: str, mode: int) -> None:
        """Make a folder and those above it that are missing, each with this very mode.

        Raises FileMissing if there is a file instead.
        """
        if folder in self._known or not folder:
            return

        with self._lock:
            others = self._making.get(folder)
            mine = self._making.setdefault(folder, threading.Event())
        if others is not None:  # an upload begins several of its first files at once
            others.wait(self._answer_s)
            if folder in self._known:
                return

        def make() -> None:
            # Does nothing if the folder is there: so that need not be asked first.
            try:
                self.call(f"making {folder}", lambda client: client.mkdirs(folder, mode, False))
            except AlreadyThere:
                raise FileMissing(f"{folder} is a file, not a folder") from None

        try:
            try:
                make()
            except FileMissing:
                above = folder.rpartition("/")[0]
                self.forget(above)
                self.make_folder(above, mode)
                make()
            with self._lock:
                if len(self._known) >= _MAX_KNOWN_FOLDERS:
                    self._known.clear()
                self._known.add(folder)
        finally:
            with self._lock:
                if self._making.get(folder) is mine:
                    del self._making[folder]
            mine.set()

    def own(self, folder: str, ownership: Ownership) -> None:
        """Give a folder its mode, owner and group; changes only what is not so already."""
        now = self.status(folder)
        mode = ownership.folder_mode
        if now.permission & 0o7777 != mode:
            doing = f"setting the mode of {folder}"
            self.call(doing, lambda client: client.set_permission(folder, mode))
        owner = ownership.owner if ownership.owner != now.owner else None
        group = ownership.group if ownership.group != now.group else None
        if owner is not None or group is not None:
            doing = f"setting the owner of {folder}"
            self.call(doing, lambda client: client.set_owner(folder, owner, group))

    def rename(self, source: str, target: str, folder_mode: int) -> None:
        """Give a file another name, which is not taken; its folder is made if missing."""
        doing = f"renaming {source} to {target}"
        self.in_folder(
            target,
            folder_mode,
            lambda: self.call(doing, lambda client: client.rename(source, target, False)),
        )

    def delete(self, path: str) -> bool:
        """Remove a file or an empty folder; False if there is none such."""
        self.forget(path)
        try:
            return self.call(f"deleting {path}", lambda client: client.delete(path, False))
        except (NotEmpty, FileMissing):  # it may lie below a file
            return False

    def set_replication(self, path: str, replication: int) -> None:
        doing = f"setting {path}'s replication"
        if not self.call(doing, lambda client: client.set_replication(path, replication)):
            raise FileMissing(f"{path} is not there")

    def in_folder(self, path: str, mode: int, act: Callable[[], _T]) -> _T:
        """Do what needs a path's folder; if there is none, make it, and do it then.

        Asking first would be a call for each file, though only a new yard lacks folders.
        """
        try:
            return act()
        except FileMissing:
            folder = path.rpartition("/")[0]
            self.forget(folder)
            self.make_folder(folder, mode)
            return act()

    def create(
        self, path: str, mode: int, replication: int | None, block_bytes: int | None
    ) -> Sink:
        """Open a new file in a folder that is there; None: HDFS's default."""
        options = WriteOptions(
            block_size=block_bytes,
            replication=replication,
            permission=mode,
            overwrite=False,
            create_parent=False,
        )
        writer = self.call(f"creating {path}", lambda client: client.create(path, options))
        return _NativeFile(self, path, writer, self._limit_s)

    def call(
        self, doing: str, function: Callable[[Client], _T], limit_s: float | None = None
    ) -> _T:
        """Ask a NameNode something; `limit_s`: for how long its answer is of use."""
        client, answer_s = self._client, self._answer_s
        doing = f"{doing} on {self._cluster.url}"
        if limit_s is None or limit_s >= answer_s:
            return self.watch(doing, answer_s, lambda: function(client), client)
        # If it had less time than usual, a client without an answer does not count as hanging.
        return self.watch(doing, limit_s, lambda: function(client))

    def watch(
        self,
        doing: str,
        limit_s: float,
        function: Callable[[], _T],
        client: Client | None = None,
    ) -> _T:
        """One call of hdfs-native, bounded, its errors translated; a hanging client is replaced."""
        try:
            return self._watched.call(doing, limit_s, function)
        except StoreUnavailable:
            if client is not None:
                self._replace(client)
            raise
        except YardError:
            raise
        except Exception as why:
            raise _translated(doing, why) from why
        except BaseException as why:
            if type(why).__name__ != "PanicException":
                raise
            raise StoreUnavailable(f"{doing}: hdfs-native failed: {why}") from why

    def forget(self, folder: str) -> None:
        with self._lock:
            self._known.discard(folder)

    def close(self) -> None:
        self._watched.close()

    def _connect(self) -> Client:
        properties = {**self._cluster.properties, **_HASTE}
        # Only DataNodes are given up on by this; for NameNodes `call` has a limit.
        properties["dfs.client.socket-timeout"] = str(round(self._silence_s * 1000))
        key = f"dfs.ha.namenodes.{self._cluster.authority}"
        if namenodes := properties.get(key):
            names = namenodes.split(",")
            first = self._attempt % len(names)
            properties[key] = ",".join(names[first:] + names[:first])
        try:
            return Client(self._cluster.url, config=properties)
        except (OSError, RuntimeError, ValueError) as why:
            if "No NameNode hosts found" in str(why):
                raise BadSetting(
                    f"{self._cluster.url}: Hadoop's configuration has no {key}; is HADOOP_CONF_DIR "
                    "that of the cluster? A NameNode is named with its port, such as "
                    f"{self._cluster.url}:8020"
                ) from None
            raise BadSetting(f"{self._cluster.url}: hdfs-native cannot use it: {why}") from why

    def _replace(self, hanging: Client) -> None:
        """Replace a client that waits for a silent NameNode by one that asks the next one first."""
        with self._lock:
            if self._client is hanging:
                self._attempt += 1
                self._client = self._connect()


def _entries(folder: str, client: Client) -> list[FileStatus]:
    return [*client.list_status(folder)]


class _NativeFile(Sink):
    def __init__(self, namespace: Namespace, path: str, writer: FileWriter, limit_s: float) -> None:
        self._namespace = namespace
        self._limit_s = limit_s
        self._path = path
        self._writer = writer

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            write = partial(_write_copies, self._writer, data[start : start + _PIECE_BYTES])
            self._namespace.watch(f"writing {self._path}", self._limit_s, write)

    def close(self) -> None:
        self._namespace.watch(f"closing {self._path}", self._limit_s, self._writer.close)

    def leave(self) -> None:
        """hdfs-native has no call for it."""


def _write_copies(writer: FileWriter, data: memoryview) -> None:
    """hdfs-native takes a memoryview byte by byte, ten times slower than bytes.

    Copies as short as these are made in memory that was just used, longer ones in fresh pages.
    """
    for start in range(0, len(data), _COPY_BYTES):
        writer.write(bytes(data[start : start + _COPY_BYTES]))


_RPC_ERROR = re.compile(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)', re.DOTALL)
_BY_PYTHON_CLASS: tuple[tuple[type[Exception], type[YardError]], ...] = (
    (FileNotFoundError, FileMissing),
    (FileExistsError, AlreadyThere),
    (NotImplementedError, Unsupported),
)
_LOGIN_ERRORS = ("SASLError", "GSSAPIError", "NoSASLMechanism")


def _translated(doing: str, why: Exception) -> YardError:
    """hdfs-native's errors as our own: their text has Java's class and message."""
    text = str(why)
    if rpc := _RPC_ERROR.match(text):
        said = rpc[2].removesuffix('")').replace('\\"', '"')  # as Rust quotes it
        return remote.error(doing, remote.short_name(rpc[1]), said)
    kind: type[YardError] = StoreUnavailable
    for python_class, meant in _BY_PYTHON_CLASS:
        if isinstance(why, python_class):
            kind = meant
    if "encryption zone" in text:
        kind = Unsupported
    elif text.startswith(_LOGIN_ERRORS):
        kind = NotAllowed
        text = f"{text}; is there a Kerberos ticket (kinit)?"
    return kind(f"{doing}: {remote.first_line(text)}")


_user_lock = threading.Lock()
_user: str | None = None


def _assume_user(user: str) -> None:
    """Be this user from now on.

    hdfs-native has no parameter for it: it looks at HADOOP_USER_NAME whenever it connects. So a
    process has one HDFS user, and asking for a second one is refused rather than ignored.
    """
    global _user
    with _user_lock:
        if _user not in (None, user):
            raise BadSetting(f"this process is {_user} on HDFS already; be {user} in another one")
        _user = user
        os.environ["HADOOP_USER_NAME"] = user
