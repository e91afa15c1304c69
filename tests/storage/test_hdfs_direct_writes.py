"""Files sent to DataNodes without a client library: whole on every one, or written elsewhere."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from over_webhdfs import ask
from patience import be_patient
from waiting import eventually

from weightyard.errors import AlreadyThere, DataNodeFailed, FileMissing
from weightyard.names import UploadId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.hdfs import direct_writes, pipeline
from weightyard.storage.hdfs.direct_writes import DirectWrites
from weightyard.storage.hdfs.lookup import Lookup
from weightyard.storage.hdfs.new_files import NewBlock, Target
from weightyard.storage.hdfs.pipeline import CHECKSUM_BYTES, PACKET_BYTES
from weightyard.storage.hdfs.protobuf import delimited, varint_field
from weightyard.storage.hdfs.rpc import NameNodeCalls
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.hdfs.wire import BlockAccess, Status
from weightyard.storage.retry import RetryingStore
from weightyard.storage.store import FileOptions, Read, ReadPath, Stage, StorePath
from weightyard.testing.cluster import Daemon, MiniCluster
from weightyard.testing.store_contract import get, put

MIB = 1 << 20
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def store(cluster: MiniCluster) -> Iterator[HdfsStore]:
    with HdfsStore(cluster.fresh_dir(), Settings(hadoop_conf_dir=cluster.conf_dir)) as store:
        store.init()
        yield store


def staging() -> StorePath:
    return layout.staging(UploadId.new(), "f")


def pipeline_of(stage: Stage) -> pipeline.Pipeline:
    """The block being written of a stage of an HdfsStore."""
    return stage._writing._sink._pipeline  # type: ignore[attr-defined]


def daemon_of(cluster: MiniCluster, datanode: str) -> Daemon:
    return next(one for one in cluster.datanodes if one.plan.address == datanode)


@contextlib.contextmanager
def ended(cluster: MiniCluster, daemon: Daemon, end: str) -> Iterator[None]:
    getattr(daemon, end)()
    try:
        yield
    finally:
        cluster.bring_back(daemon)


@pytest.mark.cluster
def test_hdfs_holds_checksums_of_what_was_written_directly(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    """Every file of a replica says how many bytes each of its checksums is about."""
    content = os.urandom(3 * CHECKSUM_BYTES + 1)
    path = put(store, content, FileOptions(replication=2))
    for file in cluster.replica_files(f"{store.url}/{path}"):
        (meta,) = file.path.parent.glob(f"{file.path.name}_*.meta")
        version, kind, about = struct.unpack(">HBI", meta.read_bytes()[:7])
        assert (version, kind, about) == (1, 2, CHECKSUM_BYTES)
        assert len(meta.read_bytes()) == 7 + 4 * 4


@pytest.mark.cluster
@pytest.mark.parametrize("way", [ReadPath.DIRECT, ReadPath.NATIVE, ReadPath.WEBHDFS])
def test_pieces_of_any_length_are_one_file_to_every_reader(store: HdfsStore, way: ReadPath) -> None:
    chance = random.Random(5)
    edges = [0, 1, 15, CHECKSUM_BYTES - 1, CHECKSUM_BYTES, CHECKSUM_BYTES + 1]
    edges += [PACKET_BYTES - 1, PACKET_BYTES, PACKET_BYTES + 1, MIB - 1, MIB, 3 * MIB + 7]
    for _ in range(4):
        pieces = [chance.randbytes(chance.choice(edges)) for _ in range(20)]
        with store.stage(staging(), FileOptions(replication=1, planned_bytes=5 * MIB)) as stage:
            for piece in pieces:
                stage.write(piece)
            staged = stage.close()
        content = b"".join(pieces)
        assert staged.length == len(content)
        with HdfsStore(store.url, store._settings, read_paths=[way]) as reader:
            location = reader.locate(staged.path)
            assert len(location.spans) == -(-len(content) // (5 * MIB))
            out = bytearray(len(content))
            reader.read(location, [Read(0, memoryview(out))])
            assert out == content


@pytest.mark.cluster
@pytest.mark.parametrize("end", ["kill", "pause"])
@pytest.mark.parametrize("place", [0, 1], ids=["first", "behind"])
def test_a_datanode_that_dies_in_the_middle_is_named_and_the_file_written_without_it(
    cluster: MiniCluster,
    store: HdfsStore,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    place: int,
) -> None:
    monkeypatch.setattr(direct_writes, "STALL_S", 2.0)
    content = os.urandom(24 * MIB)
    with RetryingStore(store).stage(staging(), FileOptions(replication=2)) as stage:
        stage.write(content[:MIB])
        first = stage._stage  # type: ignore[attr-defined]
        victim = pipeline_of(first)._targets[place].datanode
        avoided: list[DataNodeFailed] = []
        avoid = DirectWrites.avoid

        def noted(writes: DirectWrites, why: pipeline.BadDataNode) -> None:
            avoided.append(why)
            avoid(writes, why)

        monkeypatch.setattr(DirectWrites, "avoid", noted)
        with ended(cluster, daemon_of(cluster, victim), end):
            stage.write(content[MIB:])
            staged = stage.close()
            assert avoided[0].datanode == victim
            assert stage._stage is not first  # type: ignore[attr-defined]
            assert get(store, staged.path) == content
            (span,) = store.locate(staged.path).spans
            assert victim not in [replica.datanode for replica in span.replicas]


@pytest.mark.cluster
def test_a_datanode_that_dies_in_the_middle_of_a_write_by_hdfs_native_costs_no_byte(
    cluster: MiniCluster,
) -> None:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir)
    content = os.urandom(24 * MIB)
    with RetryingStore(HdfsStore(cluster.fresh_dir(), settings, writes_directly=False)) as store:
        store.init()
        with store.stage(staging(), FileOptions(replication=2)) as stage:
            stage.write(content[: 8 * MIB])
            path = stage._stage._writing._path  # type: ignore[attr-defined]
            ((victim, *_),) = cluster.replicas(path)
            with ended(cluster, victim, "kill"):
                stage.write(content[8 * MIB :])
                staged = stage.close()
                assert get(store, staged.path) == content


@pytest.mark.cluster
@pytest.mark.parametrize("end", ["kill", "pause"])
def test_a_datanode_that_is_dead_already_is_left_out_from_the_first_byte(
    cluster: MiniCluster, store: HdfsStore, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(direct_writes, "STALL_S", 2.0)
    victim = cluster.datanodes[0]
    with ended(cluster, victim, end):
        path = put(store, b"x" * 1000, FileOptions(replication=3))
        assert get(store, path) == b"x" * 1000
        (span,) = store.locate(path).spans
        assert victim.plan.address not in [replica.datanode for replica in span.replicas]
        began = time.monotonic()
        put(store, b"y" * 1000, FileOptions(replication=3))  # is not tried again so soon
        assert time.monotonic() - began < LIMIT_S / 2


@pytest.mark.cluster
def test_a_writer_that_takes_its_time_keeps_the_datanodes_waiting(
    store: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_BEAT_S", 0.0)
    monkeypatch.setattr(direct_writes, "_BEAT_EVERY_S", 0.02)
    sent: list[int] = []
    send = pipeline.Pipeline._send

    def noted(self: pipeline.Pipeline, packet: pipeline.Packet, *more: object) -> None:
        sent.append(packet.sequence)
        send(self, packet, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline.Pipeline, "_send", noted)
    content = os.urandom(2 * PACKET_BYTES)
    with store.stage(staging()) as stage:
        stage.write(content[:PACKET_BYTES])
        while sent.count(-1) < 10:
            time.sleep(0.01)
        stage.write(content[PACKET_BYTES:])
        staged = stage.close()
    assert get(store, staged.path) == content
    eventually(lambda: "weightyard-beats" not in [one.name for one in threading.enumerate()])


@contextlib.contextmanager
def _datanode(nonsense: bytes) -> Iterator[tuple[Target, list[bytes]]]:
    """Takes a block, and says some nonsense and hangs up if there is any. What it was sent."""
    sent: list[bytes] = []

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(delimited(varint_field(1, Status.SUCCESS)))
            while part := connection.recv(1 << 16):
                sent.append(part)
                if nonsense:
                    connection.sendall(nonsense)
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        yield Target(where, (where,), b"", 0, ""), sent
        thread.join(LIMIT_S)


def test_a_datanode_that_talks_nonsense_costs_no_other_writer_its_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "_BEAT_S", 0.0)
    monkeypatch.setattr(direct_writes, "_BEAT_EVERY_S", 0.02)
    beats, lookup, access = direct_writes._Beats(), Lookup(), BlockAccess("BP-1", 1, 1, 0)
    with _datanode(delimited(b"\xff")) as (odd, _), _datanode(b"") as (sound, sent):
        blocks = [
            pipeline.Pipeline(NewBlock(access, (one,)), "client", lookup, stall_s=LIMIT_S)
            for one in (odd, sound)
        ]
        for block in blocks:
            beats.add(block)
        # Who writes to a socket that was closed learns that by the second write, and then looks
        # what was said last.
        eventually(lambda: len(sent) > 10, LIMIT_S / 4)
        for block in blocks:
            beats.remove(block)
            block.close()
    lookup.close()


@pytest.mark.cluster
def test_a_file_that_is_given_up_leaves_no_thread_no_socket_and_no_file(store: HdfsStore) -> None:
    put(store, b"x")  # what is kept for the next file is there now

    def open_sockets() -> int:
        links = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
        return sum(os.path.exists(one) and "socket:" in os.readlink(one) for one in links)

    before = open_sockets()
    path = staging()
    with store.stage(path) as stage:
        stage.write(bytes(2 * MIB))
    with pytest.raises(FileMissing):
        store.stat(path)
    assert open_sockets() == before


class _Cut:
    """Stands before a NameNode; on demand it loses an answer that was given."""

    def __init__(self, namenode: str) -> None:
        host, _, port = namenode.rpartition(":")
        self._behind = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.answers_to_lose = 0
        self.lost = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                behind = socket.create_connection(self._behind)
                for way in ((client, behind, False), (behind, client, True)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(65536):
                if is_answer and self.answers_to_lose:
                    self.answers_to_lose -= 1
                    self.lost += 1
                    target.shutdown(socket.SHUT_RDWR)
                    return
                target.sendall(data)


@pytest.mark.cluster
@pytest.mark.parametrize("method", ["create", "addBlock", "complete"])
def test_a_call_whose_answer_is_lost_is_made_once(
    cluster: MiniCluster, store: HdfsStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    cut = _Cut(urlsplit(cluster.url).netloc)
    call = NameNodeCalls.call

    def losing(calls: NameNodeCalls, doing: str, called: str, message: bytes) -> bytes:
        calls._namenodes = [cut.address]
        cut.answers_to_lose = int(called == method)
        return call(calls, doing, called, message)

    monkeypatch.setattr(NameNodeCalls, "call", losing)
    path = put(store, b"x" * 1000)
    assert cut.lost == 1
    assert get(store, path) == b"x" * 1000
    cut.close()


@pytest.mark.cluster
def test_a_name_that_is_taken_stays_with_whoever_has_it(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    path = staging()
    with store.stage(path) as stage:
        stage.write(b"first")
        with HdfsStore(store.url, store._settings) as other, pytest.raises(AlreadyThere):
            other.stage(path)
        assert get(store, stage.close().path) == b"first"
    status = ask(cluster, "GET", f"{store.url}/{path}", op="GETFILESTATUS")["FileStatus"]
    assert isinstance(status, dict)
    assert status["length"] == 5


@pytest.mark.cluster
def test_a_file_that_is_to_be_erasure_coded_is_left_to_hdfs_native(
    cluster: MiniCluster, store: HdfsStore
) -> None:
    policy, folder = "XOR-2-1-1024k", f"{urlsplit(store.url).path}/staging"
    ask(cluster, "PUT", "/", op="ENABLEECPOLICY", ecpolicy=policy)
    ask(cluster, "PUT", folder, op="SETECPOLICY", ecpolicy=policy)
    content = os.urandom(3 * MIB)
    with store.stage(staging(), FileOptions(replication=1)) as stage:
        stage.write(content)
        staged = stage.close()
    assert "erasure-coded" in (store.why_not_written_directly() or "")
    assert [span.access for span in store.locate(staged.path).spans] == [None]
    assert get(store, staged.path) == content
