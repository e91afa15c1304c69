"""A DataNode of which nothing comes: one time for all that may take long before its first byte."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weightyard.errors import DataNodeFailed
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs import datanode, sockets
from weightyard.storage.hdfs.datanode import DataNodeReader
from weightyard.storage.hdfs.wire import BlockAccess
from weightyard.storage.store import Read, Replica, Span

LIMIT_S = 60.0
SPAN = Span(0, 4096, (), BlockAccess("BP-1", 1, 1, 4096))


@pytest.fixture
def silent() -> Iterator[str]:
    """A DataNode that lets connect, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"localhost:{server.getsockname()[1]}"


def test_the_time_to_look_up_a_name_counts_as_silence(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s = 0.0
    ask = socket.getaddrinfo

    def look_up(*wanted: Any, flags: int = 0, **options: Any) -> Any:
        nonlocal passed_s
        if not flags & socket.AI_NUMERICHOST:
            passed_s = LIMIT_S - 0.2
        return ask(*wanted, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    for module in (datanode, sockets):
        monkeypatch.setattr(module, "time", clock)
    reader = DataNodeReader("test", stall_s=LIMIT_S)
    began = time.monotonic()
    with pytest.raises(DataNodeFailed, match=silent):
        reader.read(
            Replica(silent, "localhost"),
            SPAN,
            [Read(0, memoryview(bytearray(9)))],
            Deadline.after(10 * LIMIT_S),
        )
    assert time.monotonic() - began < LIMIT_S / 2
    reader.close()


def test_the_addresses_of_a_datanode_share_the_time_to_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    waited_s: list[float] = []

    class SwitchedOff(socket.socket):
        """To a host that is: connecting takes all the time it is given."""

        def connect(self, address: Any) -> None:
            nonlocal now
            waited_s.append(self.gettimeout() or 0)
            now += waited_s[-1]
            raise TimeoutError("timed out")

    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(socket, "socket", SwitchedOff)
    kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    addresses = [(*kind, (f"10.0.0.{number}", 9866)) for number in range(3)]
    with pytest.raises(TimeoutError):
        sockets.connected("dn:9866", addresses, 1.5, None)
    assert waited_s == pytest.approx([0.5, 0.5, 0.5])
