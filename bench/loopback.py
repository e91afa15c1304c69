"""The limit: as many bytes through a loopback socket, from one process's memory to another's."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from bench.buffers import fresh, touched
from bench.site import Site
from bench.worker import Prepare

_GO = b"g"
_PACKET_BYTES = 1024 * 1024
_SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
_TIMEOUT_S = 60


class Receiver:
    """Receives from sender processes, one for each stream, with nothing to parse on the way."""

    def __init__(
        self, site: Site, *, length: int, streams: int, by_sendfile: bool, is_fresh: bool = False
    ) -> None:
        self._length, self._share = length, -(-length // streams)
        self._kept = None if is_fresh else touched(length)
        lengths = [len(part) for part in self._parts()]
        self._pool = ThreadPoolExecutor(streams)
        self._connections: list[socket.socket] = []
        self.server_pids: list[int] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_TIMEOUT_S)
            port = listener.getsockname()[1]
            for part_bytes in lengths:
                arguments = [str(port), str(part_bytes), str(int(by_sendfile))]
                sender = subprocess.Popen([sys.executable, "-m", "bench.loopback", *arguments])
                self.server_pids.append(sender.pid)
                connection, _ = listener.accept()
                connection.settimeout(None)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
                self._connections.append(connection)

    def __call__(self) -> list[memoryview]:
        list(self._pool.map(_receive_part, self._connections, self._parts()))
        return []

    def _parts(self) -> list[memoryview]:
        into = fresh(self._length) if self._kept is None else self._kept
        return [into[start : start + self._share] for start in range(0, self._length, self._share)]


def _receive_part(connection: socket.socket, part: memoryview) -> None:
    connection.sendall(_GO)
    rest = part
    while rest:
        got = connection.recv_into(rest[:_PACKET_BYTES], 0, socket.MSG_WAITALL)
        if not got:
            raise RuntimeError("the sender is gone")
        rest = rest[got:]


def send(port: int, length: int, *, by_sendfile: bool) -> None:
    """Send so many bytes whenever one byte comes, until the other side is gone."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A DataNode sends from the page cache, and that is what this memory is.
        pages = os.memfd_create("sent")
        os.ftruncate(pages, length)
        data = mmap.mmap(pages, length)
        for start in range(0, length, _PACKET_BYTES):
            data[start : start + _PACKET_BYTES] = b"\1" * min(_PACKET_BYTES, length - start)
        while connection.recv(1):
            if not by_sendfile:
                connection.sendall(data)
                continue
            at = 0
            while at < length:
                at += os.sendfile(connection.fileno(), pages, at, min(_PACKET_BYTES, length - at))


TASKS: Mapping[str, Prepare] = {"loopback": Receiver}

if __name__ == "__main__":
    send(int(sys.argv[1]), int(sys.argv[2]), by_sendfile=sys.argv[3] == "1")
