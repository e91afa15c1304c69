"""Reading where direct reads cannot work: by libhdfs, hdfs-native or WebHDFS.

They choose the replica themselves and copy more, but know SASL, encryption and erasure coding.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from urllib3.exceptions import HTTPError

from weightyard.errors import (
    BadSetting,
    FileMissing,
    StaleLocation,
    StoreUnavailable,
    Unsupported,
)
from weightyard.settings import Settings
from weightyard.storage.cancel import ended_by
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.installed import has_libhdfs, provide_classes
from weightyard.storage.hdfs.namenode import NameNode
from weightyard.storage.hdfs.native import Namespace
from weightyard.storage.store import Location, Read, ReadPath
from weightyard.storage.watched import Watched

_PIECE_BYTES = 16 * 1024 * 1024
_MIB = 1024 * 1024
_SOCKET_S = 10.0

# If no replica is good, Java's client asks all of them four times, and would wait half a minute in
# between.
_HASTE = {"dfs.client.retry.window.base": "300"}
_ALL_FAILED = re.compile(r'DataTransferError\("All DataNodes failed.*', re.DOTALL)


class NoneServed(StoreUnavailable):
    """The NameNode said where the file is, but no DataNode gave its bytes: DataNodes are away, or
    their bytes fail HDFS's checksums."""


class Fallback(Protocol):
    """One way to fill buffers from a file."""

    path: ReadPath

    def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
        """Raises Unsupported if this way does not work here at all, FileMissing, StaleLocation,
        StoreUnavailable (NoneServed), NotAllowed, DeadlineExceeded.
        """

    def close(self) -> None: ...


class WhenNeeded:
    """A way that is prepared when it is first used: most stores never need any of them."""

    def __init__(self, path: ReadPath, prepare: Callable[[], Fallback]) -> None:
        self.path = path
        self._prepare = prepare
        self._lock = threading.Lock()
        self._prepared: Fallback | None = None

    def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
        with self._lock:
            if self._prepared is None:
                try:
                    self._prepared = self._prepare()
                except BadSetting as why:
                    raise Unsupported(f"{self.path} cannot be used here: {why}") from why
            prepared = self._prepared
        prepared.read(location, reads, deadline)

    def close(self) -> None:
        if self._prepared is not None:
            self._prepared.close()


class NativeReads:
    """By hdfs-native, which checks CRCs and goes to another replica by itself, but copies twice."""

    path = ReadPath.NATIVE

    def __init__(self, cluster: Cluster, namespace: Namespace) -> None:
        self._cluster = cluster
        self._namespace = namespace

    def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
        doing = f"reading {location.path} by hdfs-native"
        file = self._cluster.at(location.path)
        left_s = deadline.left(doing)
        reader = self._namespace.call(doing, lambda client: client.read(file), left_s)
        if len(reader) < location.length:
            raise StaleLocation(f"{location.path} is shorter than it was")
        for wanted in reads:
            for start in range(0, len(wanted.into), _PIECE_BYTES):
                into = wanted.into[start : start + _PIECE_BYTES]
                fetch = partial(reader.read_range, wanted.offset + start, len(into))
                limit_s = deadline.left(doing)
                try:
                    into[:] = self._namespace.watch(doing, limit_s, fetch)
                except StoreUnavailable as why:
                    said = _ALL_FAILED.sub("all DataNodes that have it failed", str(why))
                    raise NoneServed(said) from None

    def close(self) -> None:
        pass


class WebHdfsReads:
    """By WebHDFS: a DataNode the NameNode chooses, or a gateway, sends the bytes by HTTP."""

    path = ReadPath.WEBHDFS

    def __init__(self, namenode: NameNode) -> None:
        self._namenode = namenode

    def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
        for wanted in reads:
            if len(wanted.into):
                self._read(location, wanted, deadline)

    def close(self) -> None:
        pass

    def _read(self, location: Location, wanted: Read, deadline: Deadline) -> None:
        doing = f"reading {location.path} by WebHDFS"
        answer = self._namenode.open(location.path, wanted.offset, len(wanted.into), deadline)
        with closing(answer):
            redirect = answer.headers.get("Location")
            if redirect is None:  # a gateway, which sends the bytes itself
                try:
                    return _fill(partial(_receive, answer.raw), wanted.into, doing, deadline)
                except (OSError, HTTPError) as why:
                    deadline.left(doing)
                    raise StoreUnavailable(f"{doing}: {why!r}") from None
        url = urlsplit(redirect)
        doing = f"{doing} from {url.netloc}"
        with closing(_connection(url, deadline.left_at_most(_SOCKET_S, doing))) as connection:
            try:
                connection.connect()
                with ended_by(deadline.cancel, partial(_shut_down, connection.sock), doing):
                    _get(connection, url, location, wanted.into, doing, deadline)
            except (OSError, http.client.HTTPException) as why:
                deadline.left(doing)  # it may have been cut off for this
                raise NoneServed(f"{doing}: {why!r}") from None


class LibhdfsReads:
    """By libhdfs through pyarrow, where a Hadoop client is installed: a JVM in this process."""

    path = ReadPath.LIBHDFS

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._watched = Watched()
        self._lock = threading.Lock()
        self._files: Any = None
        self._why_not: str | None = None

    def read(self, location: Location, reads: Sequence[Read], deadline: Deadline) -> None:
        doing = f"reading {location.path} by libhdfs"
        path = self._cluster.at(location.path)
        giving_up = threading.Lock()
        is_given_up = is_located = False

        def fill() -> None:
            nonlocal is_located
            files = self._connected()
            piece = memoryview(
                bytearray(min(_MIB, max((len(one.into) for one in reads), default=0)))
            )
            with files.open_input_file(path) as file:
                is_located = True
                for wanted in reads:
                    file.seek(wanted.offset)
                    for start in range(0, len(wanted.into), _MIB):
                        into = wanted.into[start : start + _MIB]
                        _fill(file.readinto, piece[: len(into)], doing, deadline)
                        # A call given up on goes on by itself: it must not write into memory that
                        # the caller uses for other bytes by now.
                        with giving_up:
                            if is_given_up:
                                return
                            into[:] = piece[: len(into)]

        try:
            self._watched.call(doing, deadline.left(doing), fill)
        except FileNotFoundError:
            raise FileMissing(f"{location.path} is not there") from None
        except (OSError, StoreUnavailable) as why:
            first_line = str(why).removeprefix(f"{doing}: ").split("\n", 1)[0]
            kind = NoneServed if is_located else StoreUnavailable
            raise kind(f"{doing}: {first_line[:300]}") from why
        finally:
            with giving_up:
                is_given_up = True

    def close(self) -> None:
        self._watched.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._why_not is not None:
                # A new error each time: the traceback of one raised before keeps its caller's
                # buffers.
                raise Unsupported(self._why_not)
            if self._files is None:
                try:
                    self._files = self._connect()
                except Unsupported as why:
                    self._why_not = str(why)
                    raise
            return self._files

    def _connect(self) -> Any:
        # A JVM without Hadoop's classes prints pages, so it is tried only where the settings say
        # that there is a libhdfs, and once.
        if not has_libhdfs(self._settings):
            raise Unsupported("no libhdfs: HADOOP_HOME or ARROW_LIBHDFS_DIR name none")
        try:
            from pyarrow.fs import HadoopFileSystem
        except ImportError:
            raise Unsupported("libhdfs needs pyarrow: install weightyard[arrow]") from None
        provide_classes(self._settings)
        host, _, port = self._cluster.authority.partition(":")
        user = None if self._cluster.is_kerberos else self._cluster.user
        try:
            return HadoopFileSystem(host, int(port or 0), user=user, extra_conf=_HASTE)
        except OSError as why:
            first_line = str(why).split("\n", 1)[0]
            raise Unsupported(f"libhdfs does not work: {first_line[:300]}") from why


def _fill(
    receive: Callable[[memoryview], int], into: memoryview, doing: str, deadline: Deadline
) -> None:
    """Receive until the buffer is full."""
    rest = into
    while len(rest):
        deadline.left(doing)
        got = receive(rest[:_MIB])
        if not got:
            deadline.left(doing)  # it may have been cut off for this
            raise StaleLocation(f"{doing}: the file ends {len(rest)} bytes early")
        rest = rest[got:]


def _connection(url: SplitResult, limit_s: float) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "https":
        tls = ssl.create_default_context()
        return http.client.HTTPSConnection(host, url.port, timeout=limit_s, context=tls)
    return http.client.HTTPConnection(host, url.port, timeout=limit_s)


def _get(
    connection: http.client.HTTPConnection,
    url: SplitResult,
    location: Location,
    into: memoryview,
    doing: str,
    deadline: Deadline,
) -> None:
    """Fill a buffer with what a DataNode sends."""
    opened = connection.sock
    connection.request("GET", f"{url.path}?{url.query}")
    # DataNodes end the connection with the answer: then only it has the socket.
    with closing(connection.getresponse()) as response:
        if response.status == http.HTTPStatus.NOT_FOUND:
            raise FileMissing(f"{location.path} is not there")
        if response.status != http.HTTPStatus.OK:
            raise NoneServed(f"{doing}: it answered {response.status}")

        def receive(part: memoryview) -> int:
            opened.settimeout(deadline.left_at_most(_SOCKET_S, doing))
            return _receive(response, part)

        _fill(receive, into, doing, deadline)


def _receive(answer: Any, into: memoryview) -> int:
    """What has come, at least a byte: waiting for more would ignore the deadline."""
    data = answer.read1(len(into))
    into[: len(data)] = data
    return len(data)


def _shut_down(opened: socket.socket) -> None:
    """End the wait of whoever waits for bytes on it, in the clear or by TLS."""
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)
