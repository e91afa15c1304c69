"""Replicas of this host, read from the files that a real DataNode hands out."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from patience import be_patient
from waiting import SOON_S

from weightyard.errors import ClusterFailed, Damaged, DeadlineExceeded, Retryable
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.storage.deadline import NEVER
from weightyard.storage.hdfs.pieces import Piece
from weightyard.storage.hdfs.protobuf import delimited, varint, varint_field
from weightyard.storage.hdfs.short_circuit import _MOST_FILES, ShortCircuit
from weightyard.storage.hdfs.store import HdfsStore
from weightyard.storage.hdfs.wire import BlockAccess, Status
from weightyard.storage.retry import RetryingStore
from weightyard.storage.store import (
    Location,
    Read,
    ReadPath,
    Replica,
    Span,
    Store,
    StorePath,
)
from weightyard.testing.cluster import MiniCluster, damage
from weightyard.testing.cluster.native import library_folder
from weightyard.testing.store_contract import StoreContract, put

pytestmark = pytest.mark.cluster

_PACKS = StorePath("packs")
CONTENT = os.urandom(3 << 20)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture(scope="module")
def here(own_cluster: Callable[..., MiniCluster]) -> Iterator[MiniCluster]:
    """An HDFS whose only DataNode hands out files, to those who have a block token."""
    _require_library()
    with own_cluster(racks=("a",), block_tokens=True, short_circuit=True) as started:
        yield started


def _require_library() -> None:
    try:
        library_folder(Settings().cache)
    except ClusterFailed as why:
        pytest.skip(f"DataNodes cannot hand out files: {why}")


def opened(cluster: MiniCluster, conf_dir: Path | None = None) -> HdfsStore:
    return HdfsStore(cluster.fresh_dir(), Settings(hadoop_conf_dir=conf_dir or cluster.conf_dir))


@pytest.fixture
def store(here: MiniCluster) -> Iterator[HdfsStore]:
    with opened(here) as store:
        store.init()
        yield store


def read(store: Store, location: Location, **more: object) -> tuple[bytes, ReadPath]:
    out = bytearray(location.length)
    served = store.read(location, [Read(0, memoryview(out))], **more)  # type: ignore[arg-type]
    return bytes(out), served.path


class TestShortCircuitStore(StoreContract):
    @pytest.fixture
    def store(self, here: MiniCluster) -> Iterator[Store]:
        with opened(here) as store:
            yield store


def test_a_replica_of_this_host_is_read_from_its_file(store: HdfsStore) -> None:
    location = store.locate(put(store, CONTENT))
    (replica,) = location.spans[0].replicas
    assert read(store, location) == (CONTENT, ReadPath.SHORT_CIRCUIT)
    assert read(store, location, replica=replica) == (CONTENT, ReadPath.SHORT_CIRCUIT)
    middle = bytearray(1000)
    served = store.read(location, [Read(1 << 20, memoryview(middle))])
    assert served.replica == replica
    assert middle == CONTENT[1 << 20 :][:1000]


def test_a_file_that_was_handed_out_serves_on_when_its_datanode_is_dead(
    here: MiniCluster, store: HdfsStore
) -> None:
    location, other = store.locate(put(store, CONTENT)), store.locate(put(store, b"not asked for"))
    read(store, location)
    here.datanodes[0].kill()
    try:
        assert read(store, location) == (CONTENT, ReadPath.SHORT_CIRCUIT)
        with pytest.raises(Retryable, match=here.datanodes[0].plan.host):
            read(store, other)
    finally:
        here.restart(here.datanodes[0])


def test_a_read_without_time_ends_though_the_file_is_here(store: HdfsStore) -> None:
    location = store.locate(put(store, CONTENT))
    with pytest.raises(DeadlineExceeded):
        read(store, location, timeout_s=1e-6)


def test_no_more_than_a_few_files_stay_open(store: HdfsStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(_MOST_FILES + 3):
        assert read(store, store.locate(put(store, b"%d" % number))) == (
            b"%d" % number,
            ReadPath.SHORT_CIRCUIT,
        )
    kept = [one for one in _open_files() if "/blk_" in one]
    assert len(kept) == _MOST_FILES
    store.close()
    assert not [one for one in _open_files() if "/blk_" in one]
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_read_that_outlasts_its_store_leaves_no_file_open(store: HdfsStore) -> None:
    location = store.locate(put(store, CONTENT))
    store.close()
    assert read(store, location) == (CONTENT, ReadPath.SHORT_CIRCUIT)
    assert not [one for one in _open_files() if "/blk_" in one]


def _open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except OSError:
            continue
    return found


def test_a_damaged_replica_is_found_by_those_who_load_it(here: MiniCluster, tmp_path: Path) -> None:
    settings = Settings(
        home=tmp_path / "home", cache=tmp_path / "cache", hadoop_conf_dir=here.conf_dir
    )
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights.bin").write_bytes(CONTENT)
    with open_yard(here.fresh_dir(), settings=settings) as yard:
        yard.push(source, "team/bert", codec="raw", replication=1)
        (pack,) = (one.path for one in yard.store.list(_PACKS) if one.length > len(CONTENT) // 2)
        damage(here.replica_files(f"{yard.store.url}/{pack}")[0], offset=1 << 20)
        with pytest.raises(Damaged):
            yard.pull("team/bert", tmp_path / "pulled")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="nobody-listens"),
        pytest.param(b"", id="hangs-up"),
        pytest.param(b"\x02\x08", id="falls-silent"),
        pytest.param(b"\xff" * 10, id="no-length"),
        pytest.param(varint(1 << 30), id="too-long"),
        pytest.param(b"\x02\x08\x01", id="refuses"),
        pytest.param(b"\x02\x08\x00\x00", id="passes-no-file"),
    ],
)
def test_what_a_datanode_does_not_hand_out_comes_over_the_network(
    here: MiniCluster, tmp_path: Path, answer: bytes | None
) -> None:
    conf_dir, where = tmp_path / "conf", tmp_path / "s"
    shutil.copytree(here.conf_dir, conf_dir)
    site = conf_dir / "hdfs-site.xml"
    own = here.client_properties["dfs.domain.socket.path"]
    site.write_text(site.read_text().replace(own, str(where)))
    with socket.socket(socket.AF_UNIX) as listening, opened(here, conf_dir) as store:
        listening.bind(str(where))
        if answer is not None:
            listening.listen()
            threading.Thread(target=_answer, args=(listening, answer), daemon=True).start()
        store.init()
        assert read(store, store.locate(put(store, CONTENT))) == (CONTENT, ReadPath.DIRECT)


@pytest.mark.parametrize(
    ("refusal", "is_asked_again"),
    [
        (Status.ERROR, True),
        (Status.ERROR_ACCESS_TOKEN, True),
        (Status.ERROR_INVALID, True),
        (Status.ERROR_UNSUPPORTED, False),
    ],
)
def test_a_datanode_that_refuses_one_block_is_asked_for_others(
    tmp_path: Path, refusal: Status, is_asked_again: bool
) -> None:
    replica, out = Replica("127.0.0.1:9866", "127.0.0.1"), bytearray(len(CONTENT))
    refused, served = (
        Piece(
            Span(0, len(CONTENT), (replica,), access=BlockAccess("BP-1", block, 1, len(CONTENT))),
            (Read(0, memoryview(out)),),
        )
        for block in (1, 2)
    )
    with socket.socket(socket.AF_UNIX) as listening, (tmp_path / "b").open("wb+") as file:
        file.write(CONTENT)
        file.flush()
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        datanode = threading.Thread(
            target=_refuse_then_serve, args=(listening, refusal, file.fileno()), daemon=True
        )
        datanode.start()
        with closing(ShortCircuit(str(tmp_path / "s"))) as short_circuit:
            assert short_circuit.read([refused], replica, NEVER) is None
            found = short_circuit.read([served], replica, NEVER)
        listening.shutdown(socket.SHUT_RDWR)  # it may still wait for one who does not ask again
        datanode.join(SOON_S)
    assert (found is not None and bytes(out) == CONTENT) == is_asked_again


def _refuse_then_serve(listening: socket.socket, refusal: Status, file: int) -> None:
    _answer(listening, delimited(varint_field(1, refusal)))
    try:
        asking, _ = listening.accept()
    except OSError:
        return  # nobody asks any more
    with asking:
        asking.recv(4096)
        asking.sendall(delimited(varint_field(1, Status.SUCCESS)))
        socket.send_fds(asking, [b"\0"], [file, file])
        asking.recv(1)


def _answer(listening: socket.socket, answer: bytes) -> None:
    asking, _ = listening.accept()
    with asking:
        asking.recv(4096)
        asking.sendall(answer)
        if answer:
            asking.recv(1)  # until who asks has enough of it


@pytest.mark.long
def test_files_are_handed_out_where_datanodes_send_nothing_in_the_clear(
    own_cluster: Callable[..., MiniCluster],
) -> None:
    _require_library()
    encrypting = own_cluster(racks=("a",), encrypt=True, short_circuit=True)
    with encrypting as cluster, RetryingStore(opened(cluster)) as store:
        store.init()
        location = store.locate(put(store, CONTENT))
        assert read(store, location) == (CONTENT, ReadPath.SHORT_CIRCUIT)
