"""A narrow link: a TCP proxy in front of each DataNode; together they pass so many bytes a second.

    python -m bench.shaping BYTES_PER_S HOST:PORT…

prints where it listens for each, as JSON, and goes on until its standard input is closed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import msgspec

_STEP_BYTES = 64 * 1024
"""What passes at a time: at 100 MB/s, under a millisecond of the link."""

_BURST_S = 0.005
_CONNECT_S = 10.0


class Bucket:
    """Tokens for bytes, which come at a steady rate; a few milliseconds of them can be saved up."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, amount: int) -> None:
        """Wait until so many bytes may pass."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + amount / self._rate
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


@contextmanager
def narrow_link(bytes_per_s: float, datanodes: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """The proxies in a process of their own: where to go instead of each DataNode."""
    command = [sys.executable, "-m", "bench.shaping", str(bytes_per_s), *datanodes]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield msgspec.json.decode(process.stdout.readline(), type=dict[str, str])
        finally:
            process.stdin.close()
            process.wait(60)


def serve(bytes_per_s: float, datanodes: Sequence[str]) -> None:
    bucket = Bucket(bytes_per_s)
    listening = {}
    for datanode in datanodes:
        listener = socket.create_server(("127.0.0.1", 0))
        listening[datanode] = f"127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=_accept, args=(listener, datanode, bucket), daemon=True).start()
    print(msgspec.json.encode(listening).decode(), flush=True)
    sys.stdin.read()


def _accept(listener: socket.socket, datanode: str, bucket: Bucket) -> None:
    host, _, port = datanode.rpartition(":")
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection((host, int(port)), _CONNECT_S)
        except OSError:
            client.close()
            continue
        for one in (client, server):
            one.settimeout(None)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target, limit in ((client, server, None), (server, client, bucket)):
            threading.Thread(target=_pass, args=(source, target, limit), daemon=True).start()


def _pass(source: socket.socket, target: socket.socket, bucket: Bucket | None) -> None:
    """By splice, in the kernel: the proxy shares its cores with what is measured."""
    outlet, inlet = os.pipe()
    with suppress(OSError):
        while got := os.splice(source.fileno(), inlet, _STEP_BYTES):
            if bucket is not None:
                bucket.take(got)
            while got:
                got -= os.splice(outlet, target.fileno(), got)
    for end in (outlet, inlet):
        os.close(end)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    serve(float(sys.argv[1]), sys.argv[2:])
