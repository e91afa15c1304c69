"""Direct reads, from real DataNodes and from one that lies."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hostile import ROUNDS
from waiting import eventually

from weightyard.errors import (
    DataNodeFailed,
    DeadlineExceeded,
    StaleLocation,
    StoreUnavailable,
    TooLarge,
)
from weightyard.format.block import block_id, segment_checksum
from weightyard.settings import Settings
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs import wire
from weightyard.storage.hdfs.datanode import (
    GAP_BYTES,
    DataNodeReader,
    plan_runs,
)
from weightyard.storage.hdfs.fallbacks import WebHdfsReads
from weightyard.storage.hdfs.protobuf import varint
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.hdfs.wire import BlockAccess, BlockToken, Packet
from weightyard.storage.store import (
    FileOptions,
    Location,
    Read,
    ReadPath,
    Replica,
    Span,
    StorePath,
)
from weightyard.testing.cluster import Daemon, MiniCluster, damage
from weightyard.testing.store_contract import put

MIB = 1 << 20
SIZE = 48 * MIB
CONTENT = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
LIMIT_S = 60.0
TRIES = 3
"""Of a time that is promised: a busy machine may be late once, a broken promise is late always."""


def opened(cluster: MiniCluster) -> HdfsStore:
    store = HdfsStore(cluster.fresh_dir(), Settings(hadoop_conf_dir=cluster.conf_dir))
    store.init()
    return store


@pytest.fixture(scope="module")
def store(cluster: MiniCluster) -> Iterator[HdfsStore]:
    with opened(cluster) as store:
        yield store


@pytest.fixture(scope="module")
def path(cluster: MiniCluster, store: HdfsStore) -> StorePath:
    path = put(store, CONTENT, FileOptions(replication=2, planned_bytes=SIZE))
    cluster.wait_for_replication(f"{store.url}/{path}", 2)
    return path


@pytest.fixture
def reader() -> Iterator[DataNodeReader]:
    reader = DataNodeReader("test", stall_s=LIMIT_S)
    yield reader
    reader.close()


def daemon_of(cluster: MiniCluster, replica: Replica) -> Daemon:
    return next(one for one in cluster.datanodes if one.plan.address == replica.datanode)


def soon() -> Deadline:
    return Deadline.after(LIMIT_S)


@pytest.mark.cluster
def test_scattered_reads_come_back_exactly_over_one_connection(
    store: HdfsStore, path: StorePath, reader: DataNodeReader
) -> None:
    (span,) = store.locate(path).spans
    chance = random.Random(3)
    for _ in range(30):
        position, reads, wanted = chance.randrange(SIZE // 2), [], []
        for _ in range(chance.randint(1, 40)):
            length = chance.choice([1, 16, 511, 512, 513, 65536, 300_000])
            reads.append(Read(position, memoryview(bytearray(length))))
            wanted.append(CONTENT[position : position + length])
            position += length + chance.choice([0, 0, 3, 5000, GAP_BYTES, 2 * GAP_BYTES])
        chance.shuffle(reads)
        reader.read(span.replicas[0], span, reads, soon())
        assert sorted(bytes(read.into) for read in reads) == sorted(wanted)
    assert reader.connects == 1


@pytest.mark.cluster
def test_a_thousand_tiny_neighbours_are_one_request(
    store: HdfsStore, path: StorePath, reader: DataNodeReader
) -> None:
    (span,) = store.locate(path).spans
    out = bytearray(16 * 4000)
    reads = [Read(100 + i, memoryview(out)[i : i + 16]) for i in range(0, len(out), 16)]
    assert len(list(plan_runs(span, reads, memoryview(bytearray(GAP_BYTES))))) == 1
    reader.read(span.replicas[0], span, reads, soon())
    assert out == CONTENT[100 : 100 + len(out)]


@pytest.mark.cluster
def test_a_connection_the_datanode_gave_up_is_replaced_silently(
    store: HdfsStore, path: StorePath, reader: DataNodeReader
) -> None:
    (span,) = store.locate(path).spans
    out = memoryview(bytearray(1000))
    reader.read(span.replicas[0], span, [Read(5, out)], soon())
    (kept,) = reader._idle
    kept._socket.shutdown(socket.SHUT_RDWR)
    reader.read(span.replicas[0], span, [Read(77, out)], soon())
    assert bytes(out) == CONTENT[77:1077]
    assert reader.connects == 2


@pytest.mark.cluster
@pytest.mark.parametrize("end", ["kill", "pause"])
def test_a_datanode_that_dies_in_the_middle_is_named_in_two_seconds_and_another_serves(
    cluster: MiniCluster, store: HdfsStore, path: StorePath, end: str
) -> None:
    took_s: list[float] = []
    while not took_s or took_s[-1] >= 2:
        assert len(took_s) < TRIES, took_s
        took_s.append(seconds_until_named(cluster, store, path, end))


def seconds_until_named(cluster: MiniCluster, store: HdfsStore, path: StorePath, end: str) -> float:
    """How long after a DataNode ended the read says so; another one serves then."""
    # One that was ended before is back, but of its blocks the NameNode may not have heard yet.
    eventually(lambda: len(store.locate(path).spans[0].replicas) > 1)
    location = store.locate(path)
    victim = location.spans[0].replicas[0]
    daemon = daemon_of(cluster, victim)
    out = bytearray(SIZE)
    whole = [Read(0, memoryview(out))]
    store.read(location, whole, replica=victim)
    ended_at: list[float] = []

    def end_it() -> None:
        time.sleep(0.2)
        getattr(daemon, end)()
        ended_at.append(time.monotonic())

    ending = threading.Thread(target=end_it)
    ending.start()

    def read_on_and_on() -> None:
        while True:
            store.read(location, whole, replica=victim)

    try:
        with pytest.raises(DataNodeFailed) as caught:
            read_on_and_on()
        seen_at = time.monotonic()
        ending.join()
        assert caught.value.datanode == victim.datanode

        out[:] = bytes(SIZE)
        served = store.read(location, whole)
        assert served.path == ReadPath.DIRECT
        assert served.replica == location.spans[0].replicas[1]
        assert out == CONTENT
        return seen_at - ended_at[0]
    finally:
        ending.join()
        cluster.bring_back(daemon)


@pytest.mark.cluster
def test_a_wrong_byte_on_disk_is_seen_by_its_checksum_and_mended_by_hdfs_native(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    content = CONTENT[: 2 * MIB]
    name = block_id(content)
    good = segment_checksum(content, name, 0)
    path = put(store, content, FileOptions(replication=2))
    url = f"{store.url}/{path}"
    cluster.wait_for_replication(url, 2)
    location = store.locate(path)
    bad = location.spans[0].replicas[0]
    (file,) = [
        one for one in cluster.replica_files(url) if one.datanode.plan.address == bad.datanode
    ]
    damage(file, offset=MIB + 17)
    checked = {}
    for replica in location.spans[0].replicas:
        out = bytearray(len(content))
        store.read(location, [Read(0, memoryview(out))], replica=replica)
        checked[replica.datanode] = segment_checksum(out, name, 0) == good
    assert checked == {bad.datanode: False, location.spans[0].replicas[1].datanode: True}

    with HdfsStore(store.url, store._settings, read_paths=[ReadPath.NATIVE]) as careful:
        out = bytearray(len(content))
        careful.read(location, [Read(0, memoryview(out))])
        assert out == content
    store.delete(path)


@pytest.mark.cluster
def test_a_replica_that_is_gone_asks_to_locate_again(
    store: HdfsStore, path: StorePath, reader: DataNodeReader
) -> None:
    (span,) = store.locate(path).spans
    for change in ({"block": span.access.block + 1000}, {"generation": span.access.generation + 1}):
        other = dataclasses.replace(span, access=dataclasses.replace(span.access, **change))
        with pytest.raises(StaleLocation, match=span.replicas[0].datanode):
            reader.read(span.replicas[0], other, [Read(0, memoryview(bytearray(9)))], soon())


@pytest.mark.cluster
def test_a_block_token_that_no_longer_holds_asks_to_locate_again(
    token_cluster: MiniCluster, reader: DataNodeReader
) -> None:
    with opened(token_cluster) as store:
        (span,) = store.locate(put(store, b"abc")).spans
        out = memoryview(bytearray(3))
        reader.read(span.replicas[0], span, [Read(0, out)], soon())
        assert bytes(out) == b"abc"
        token: BlockToken = span.access.token
        other_date = bytearray(token.identifier)
        other_date[3] ^= 1  # the date it expires comes first
        changed = dataclasses.replace(token, identifier=bytes(other_date))
        for other in (BlockToken(), changed):
            access = dataclasses.replace(span.access, token=other)
            stale = dataclasses.replace(span, access=access)
            with pytest.raises(StaleLocation, match="token"):
                reader.read(span.replicas[0], stale, [Read(0, out)], soon())


def test_a_read_outside_its_span_is_refused() -> None:
    span = Span(1000, 50, ())
    rubbish = memoryview(bytearray(GAP_BYTES))
    for offset, length in ((999, 2), (1049, 2), (0, 1)):
        with pytest.raises(TooLarge):
            list(plan_runs(span, [Read(offset, memoryview(bytearray(length)))], rubbish))


Answer = Callable[[socket.socket], None]


@contextlib.contextmanager
def lying_datanode(answer: Answer) -> Iterator[str]:
    """A DataNode that takes a request and answers as the test likes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client, contextlib.suppress(OSError):
                        client.recv(4096)
                        answer(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)


def read_from(datanode: str, timeout_s: float = LIMIT_S, stall_s: float = LIMIT_S) -> bytes:
    reader = DataNodeReader("test", stall_s=stall_s)
    out = bytearray(1024)
    span = Span(0, 4096, (), BlockAccess("BP-1", 1, 1, 4096))
    replica = Replica(datanode, "127.0.0.1")
    try:
        reader.read(replica, span, [Read(512, memoryview(out))], Deadline.after(timeout_s))
    finally:
        reader.close()
    return bytes(out)


def message(*packets: tuple[Packet, bytes], first_offset: int = 512, checksum: int = 0) -> bytes:
    info = b"\x0a\x05\x08" + bytes([checksum]) + b"\x10\x80\x04\x10" + varint(first_offset)
    said = b"\x08\x00\x22" + bytes([len(info)]) + info
    return varint(len(said)) + said + b"".join(wire.packet_header(p) + d for p, d in packets)


_LAST = (Packet(1536, 1, True, 0), b"")
_GOOD = message((Packet(512, 0, False, 1024), b"x" * 1024), _LAST)


def test_a_well_behaved_answer_is_read() -> None:
    with lying_datanode(lambda client: client.sendall(_GOOD)) as datanode:
        assert read_from(datanode) == b"x" * 1024


def test_a_read_that_outlasts_its_reader_leaves_no_connection() -> None:
    reader, out, is_ended = DataNodeReader("test"), bytearray(1024), threading.Event()

    def answer(client: socket.socket) -> None:
        reader.close()
        client.sendall(_GOOD)
        client.settimeout(LIMIT_S)
        while client.recv(16):  # that it has all of it
            pass
        is_ended.set()

    with lying_datanode(answer) as datanode:
        span = Span(0, 4096, (), BlockAccess("BP-1", 1, 1, 4096))
        reader.read(Replica(datanode, "127.0.0.1"), span, [Read(512, memoryview(out))], soon())
        assert out == b"x" * 1024
        assert is_ended.wait(5.0)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 64,
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4,
        _GOOD[:100],
        message(first_offset=600),
        message(first_offset=2**40),
        message(checksum=1),
        message(_LAST),
        message((Packet(512, 0, False, 8192), b"x" * 8192), (Packet(8704, 1, True, 0), b"")),
        message((Packet(512, 7, False, 1024), b"x" * 1024), _LAST),
        message((Packet(0, 0, False, 1024), b"x" * 1024), _LAST),
        message() + struct.pack(">IH", 2**31, 25) + bytes(64),
        message() + struct.pack(">IH", 1028, 60_000) + bytes(64),
    ],
    ids=range(13),
)
def test_a_datanode_that_lies_is_named_and_nothing_else_happens(answer: bytes) -> None:
    with (
        lying_datanode(lambda client: client.sendall(answer)) as datanode,
        pytest.raises(DataNodeFailed, match=datanode),
    ):
        read_from(datanode)


def test_ten_thousand_damaged_answers_are_errors_that_name_the_datanode_or_all_bytes(
    reader: DataNodeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[socket.socket] = []  # pairs, which are quicker than connections
    monkeypatch.setattr("weightyard.storage.hdfs.sockets.connected", lambda *_: connected.pop())
    chance = random.Random(4)
    begin = len(message()) + wire.PACKET_HEADER_BYTES
    heads = [*range(begin), *range(begin + 1024, len(_GOOD))]  # all but the data itself
    span = Span(0, 4096, (), BlockAccess("BP-1", 1, 1, 4096))
    refusals: dict[str, DataNodeFailed | StaleLocation] = {}
    for number in range(ROUNDS):
        raw = bytearray(_GOOD)
        for _ in range(chance.randint(1, 4)):
            raw[chance.choice(heads)] = chance.randrange(256)
        cut = chance.randint(1, len(raw)) if chance.random() < 0.3 else len(raw)
        ours, theirs = socket.socketpair()
        connected.append(ours)
        datanode = f"127.0.0.1:{10_000 + number}"
        out = bytearray(1024)
        with ours, theirs:
            theirs.sendall(raw[:cut])
            theirs.shutdown(socket.SHUT_WR)
            try:
                replica = Replica(datanode, "127.0.0.1")
                reader.read(replica, span, [Read(512, memoryview(out))], soon())
                assert out == b"x" * 1024
            except (DataNodeFailed, StaleLocation) as why:
                refusals[datanode] = why
    assert ROUNDS / 2 < len(refusals) < ROUNDS
    for datanode, why in refusals.items():
        assert datanode in str(why)
        assert isinstance(why, StaleLocation) or why.datanode == datanode


def test_a_datanode_that_trickles_is_stopped_by_the_deadline() -> None:
    sent = 0

    def trickle(client: socket.socket) -> None:
        nonlocal sent
        for byte in _GOOD:
            client.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)

    with lying_datanode(trickle) as datanode:
        with pytest.raises(DeadlineExceeded, match=datanode):
            read_from(datanode, timeout_s=0.5)
        assert sent < len(_GOOD) / 2, "not when it has ended"


def test_a_datanode_nobody_listens_at_is_named() -> None:
    with socket.socket() as taken:  # so that nobody else comes to listen there
        taken.bind(("127.0.0.1", 0))
        datanode = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DataNodeFailed, match=datanode):
            read_from(datanode)


def test_a_datanode_that_falls_silent_over_http_is_hung_up_on() -> None:
    is_hung_up = threading.Event()

    def fall_silent(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\n")
        if not client.recv(1):
            is_hung_up.set()

    class Redirecting:
        def open(self, *wanted: object) -> Any:
            return SimpleNamespace(headers={"Location": f"http://{datanode}/"}, close=lambda: None)

    location = Location(StorePath("packs/0a/0a0a"), 9, ())
    with lying_datanode(fall_silent) as datanode:
        # Kept: as long as somebody has the error, nothing is cleaned up by itself.
        with pytest.raises((StoreUnavailable, DeadlineExceeded), match=datanode) as caught:
            WebHdfsReads(cast(Any, Redirecting())).read(
                location, [Read(0, memoryview(bytearray(9)))], Deadline.after(0.3)
            )
        assert is_hung_up.wait(LIMIT_S / 4), caught.value


@pytest.fixture
def silent_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever asks for a name waits until the test is over; numbers need no asking."""
    over, ask = threading.Event(), socket.getaddrinfo

    def look_up(*wanted: Any, flags: int = 0, **options: Any) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            over.wait(LIMIT_S)
        return ask(*wanted, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield
    over.set()


@pytest.mark.usefixtures("silent_name_server")
@pytest.mark.parametrize("limits", [{"stall_s": 0.2}, {"timeout_s": 0.2}])
def test_a_datanode_whose_name_nobody_looks_up_is_named_in_time(limits: dict[str, float]) -> None:
    began = time.monotonic()
    with pytest.raises(DataNodeFailed, match="localhost:9866: cannot connect: looking up its name"):
        read_from("localhost:9866", **limits)
    assert time.monotonic() - began < LIMIT_S / 4


@pytest.mark.usefixtures("silent_name_server")
def test_an_address_in_numbers_is_not_looked_up() -> None:
    with lying_datanode(lambda client: client.sendall(_GOOD)) as datanode:
        assert read_from(datanode) == b"x" * 1024


@pytest.mark.parametrize("datanode", ["127.0.0.1:many", f"{'x' * 64}.example:9866"])
def test_a_datanode_without_an_address_is_named(datanode: str) -> None:
    with pytest.raises(DataNodeFailed, match=datanode):
        read_from(datanode)


def test_a_datanode_is_found_by_its_name() -> None:
    with lying_datanode(lambda client: client.sendall(_GOOD)) as datanode:
        assert read_from(datanode.replace("127.0.0.1", "localhost")) == b"x" * 1024
