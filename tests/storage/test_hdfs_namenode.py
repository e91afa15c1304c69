from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hostile import ROUNDS, changed_json
from waiting import eventually

from weightyard.errors import BadSetting, Cancelled, Retryable, StoreUnavailable
from weightyard.settings import Settings
from weightyard.storage.cancel import Cancel
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.fallbacks import NativeReads, WebHdfsReads
from weightyard.storage.hdfs.namenode import (
    STALE_S,
    NameNode,
    _decoded,
    _DefaultsAnswer,
    _StatusAnswer,
    parse_locations,
)
from weightyard.storage.hdfs.native import Namespace
from weightyard.storage.hdfs.wire import BlockAccess, BlockToken
from weightyard.storage.store import Location, Read, StorePath

_PATH = StorePath("packs/ab/x")
_HEARD_S = 1_794_794_699.8
_LIMIT_S = 60.0


def node(host: str, **changes: object) -> dict[str, Any]:
    return {
        "adminState": "NORMAL",
        "hostName": host,
        "ipAddr": "10.0.0.1",
        "infoPort": 9864,
        "lastUpdate": int(_HEARD_S * 1000),
        "networkLocation": "/rack-a",
        "xferPort": 9866,
        **changes,
    }


def block(offset: int, length: int, *nodes: dict[str, Any], **changes: object) -> dict[str, Any]:
    token = BlockToken(b"id", b"secret", "HDFS_BLOCK_TOKEN", "")
    return {
        "block": {
            "blockId": 1073741829,
            "blockPoolId": "BP-1807369563-10.0.0.1-1794794625998",
            "generationStamp": 1005,
            "numBytes": length,
            **changes,
        },
        "blockToken": {"urlString": token.to_url_string()},
        "isCorrupt": False,
        "locations": list(nodes),
        "startOffset": offset,
        "storageTypes": ["DISK"],
    }


def answer(length: int, *blocks: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {
        "LocatedBlocks": {
            "fileLength": length,
            "isLastBlockComplete": True,
            "isUnderConstruction": False,
            "locatedBlocks": list(blocks),
            **changes,
        }
    }


def parse(found: dict[str, Any], *, by_host: bool = False, now_s: float | None = None) -> Location:
    return parse_locations(json.dumps(found).encode(), _PATH, by_host, now_s)


_TWO = answer(
    700,
    block(0, 512, node("one"), node("two", xferPort=1)),
    block(512, 188, node("two", networkLocation="/rack-b", adminState="DECOMMISSION_INPROGRESS")),
)


def test_spans_say_where_each_byte_is_and_how_to_get_it() -> None:
    location = parse(_TWO)
    assert location.length == 700
    assert [(span.offset, span.length) for span in location.spans] == [(0, 512), (512, 188)]
    first, second = location.spans
    assert [replica.datanode for replica in first.replicas] == ["10.0.0.1:9866", "10.0.0.1:1"]
    assert [replica.host for replica in first.replicas] == ["one", "two"]
    assert second.replicas[0].rack == "/rack-b"
    assert second.replicas[0].state == "decommissioning"
    assert isinstance(first.access, BlockAccess)
    assert first.access.token.password == b"secret"
    assert "secret" not in repr(location)


def test_datanodes_are_reached_by_host_name_where_configured() -> None:
    assert parse(_TWO, by_host=True).spans[0].replicas[0].datanode == "one:9866"


@pytest.mark.parametrize(
    ("address", "datanode"),
    [
        ("10.0.0.1", "10.0.0.1:9866"),
        ("fd00::1", "[fd00::1]:9866"),
        ("fe80::1%eth0", "[fe80::1%eth0]:9866"),
        ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]:9866"),
        ("", "one:9866"),
    ],
)
def test_datanodes_are_reached_by_address_where_they_have_one(address: str, datanode: str) -> None:
    location = parse(answer(5, block(0, 5, node("one", ipAddr=address))))
    assert location.spans[0].replicas[0].datanode == datanode


def test_a_datanode_not_heard_of_is_marked_stale() -> None:
    now_s = _HEARD_S + STALE_S
    assert parse(_TWO, now_s=now_s - 2).spans[0].replicas[0].state == "normal"
    assert parse(_TWO, now_s=now_s + 2).spans[0].replicas[0].state == "stale"


def test_erasure_coded_blocks_are_not_for_direct_reads() -> None:
    striped = answer(5, block(0, 5, node("one"), blockId=-9223372036854775792))
    assert parse(striped).spans[0].access is None


def test_a_gateways_answer_without_block_ids_still_locates() -> None:
    gateway = answer(5, {"startOffset": 0, "length": 5, "hosts": ["one"], "names": ["one:9866"]})
    (span,) = parse(gateway).spans
    assert (span.offset, span.length, span.access) == (0, 5, None)


@pytest.mark.parametrize(
    "found",
    [
        answer(700, block(0, 512, node("one"))),
        answer(512, block(1, 511, node("one"))),
        answer(1024, block(0, 512), block(256, 768)),
        answer(512, block(0, 512, node("one", xferPort=70000))),
        answer(512, block(0, 512, node("o\nne"))),
        answer(512, block(0, 512, node("one", ipAddr="10.0.0.1@elsewhere"))),
        answer(512, block(0, 512, node("one", ipAddr="elsewhere.example"))),
        answer(512, block(0, 512, node("one", ipAddr=":" * 100))),
        answer(-1, block(0, -1)),
        answer(2**70, block(0, 2**70)),
        answer(512, block(0, 512), isUnderConstruction=True),
        {"RemoteException": {}},
        {"LocatedBlocks": None},
    ],
)
def test_an_answer_that_does_not_hold_together_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(StoreUnavailable):
        parse(found)


def test_ten_thousand_damaged_answers_give_nothing_but_typed_errors() -> None:
    chance = random.Random(2)
    whole = json.dumps(_TWO).encode()
    refused = 0
    for _ in range(10_000):
        raw = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(raw))
            raw[at : at + chance.randint(0, 3)] = chance.choice(
                [b"", b"9", b"-", b'"', b"]", b"{", b"null", b"\xff", b"1e400", b"9" * 25]
            )
        try:
            location = parse_locations(bytes(raw), _PATH, False, _HEARD_S)
        except StoreUnavailable:
            refused += 1
        else:
            assert location.length == sum(span.length for span in location.spans)
    assert refused > 5000


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (_StatusAnswer, {"FileStatus": {"length": 512, "encBit": True, "owner": "alice"}}),
        (_DefaultsAnswer, {"FsServerDefaults": {"encryptDataTransfer": "true", "replication": 3}}),
    ],
    ids=["status", "defaults"],
)
def test_ten_thousand_damaged_words_of_a_namenode_give_nothing_but_typed_errors(
    kind: type[Any], said: dict[str, Any]
) -> None:
    chance = random.Random(3)
    whole = json.dumps(said).encode()
    refused = 0
    for _ in range(ROUNDS):
        try:
            found = _decoded(changed_json(whole, chance), kind, _PATH)
        except StoreUnavailable:
            refused += 1
        else:
            assert isinstance(found, kind)
    assert ROUNDS / 4 < refused < ROUNDS
    for deep in (b'{"FileStatus":' * 100_000, b'{"x":' + b"[" * 100_000, b"\xff", b""):
        with pytest.raises(StoreUnavailable):
            _decoded(deep, kind, _PATH)


def test_deep_nesting_is_refused_without_a_crash() -> None:
    with pytest.raises(StoreUnavailable):
        parse_locations(b'{"LocatedBlocks":' * 100_000, _PATH, False)


class OldGateway(BaseHTTPRequestHandler):
    """Answers as HttpFS of Hadoop 3.3 does: no locations, and bytes without a redirect."""

    content = bytes(range(256)) * 10

    def do_GET(self) -> None:
        query = dict(parse_qsl(urlsplit(self.path).query))
        match query["op"]:
            case "GETFILESTATUS":
                status = {"length": len(self.content), "type": "FILE", "permission": "644"}
                self.answer(200, json.dumps({"FileStatus": status}).encode())
            case "OPEN":
                start = int(query["offset"])
                self.answer(200, self.content[start : start + int(query["length"])])
            case other:
                said = f"java.lang.IllegalArgumentException: No enum constant Operation.{other}"
                error = {"message": said, "exception": "QueryParamException"}
                self.answer(500, json.dumps({"RemoteException": error}).encode())

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class BreakingGateway(OldGateway):
    """Breaks off in the middle of what it said it would send."""

    def answer(self, code: int, body: bytes) -> None:
        if len(body) != 1000:
            super().answer(code, body)
            return
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:500])
        self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def behind(kind: type[OldGateway]) -> Iterator[NameNode]:
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{gateway.server_port}"
        settings = Settings(hadoop_conf_dir=None, webhdfs=(url,))
        namenode = NameNode(Cluster.of("hdfs://nn:8020/yard", settings))
        yield namenode
        namenode.close()
        gateway.shutdown()
        thread.join(_LIMIT_S)


def test_a_gateway_that_knows_no_locations_still_serves_bytes() -> None:
    with behind(OldGateway) as namenode:
        location = namenode.locate(_PATH, Deadline.after(_LIMIT_S))
        assert location.length == len(OldGateway.content)
        assert [(span.replicas, span.access) for span in location.spans] == [((), None)]
        out = bytearray(1000)
        WebHdfsReads(namenode).read(location, [Read(77, memoryview(out))], Deadline.after(_LIMIT_S))
        assert out == OldGateway.content[77:1077]


def test_a_gateway_that_breaks_off_is_unavailable_and_named() -> None:
    with behind(BreakingGateway) as namenode:
        location = namenode.locate(_PATH, Deadline.after(_LIMIT_S))
        read = Read(77, memoryview(bytearray(1000)))
        with pytest.raises(StoreUnavailable, match="by WebHDFS"):
            WebHdfsReads(namenode).read(location, [read], Deadline.after(_LIMIT_S))


def test_a_namenode_that_is_not_there_is_named_with_where_its_address_comes_from() -> None:
    with behind(OldGateway) as namenode:
        (url,) = namenode._cluster.webhdfs
    with pytest.raises(
        StoreUnavailable, match=r"127\.0\.0\.1:\d+ by WebHDFS.*HADOOP_CONF_DIR"
    ) as told:
        namenode.locate(_PATH, Deadline.after(_LIMIT_S))
    assert urlsplit(url).netloc in str(told.value)


class Trickling(OldGateway):
    """Sends a byte now and then: there is always one before a time-out."""

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(4 * len(body)))
        self.end_headers()
        with suppress(OSError):  # whoever asked is gone
            for byte in body * 4:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)


class TricklingDataNode(Trickling):
    """The same behind a NameNode, which redirects."""

    def do_GET(self) -> None:
        if "/webhdfs/" in self.path:
            self.send_response(307)
            self.send_header("Location", f"http://{self.headers['Host']}/datanode")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.answer(200, self.content)


class Silent(OldGateway):
    """Lets connect and takes the question."""

    def do_GET(self) -> None:
        self.connection.settimeout(_LIMIT_S)
        with suppress(OSError):
            self.rfile.read(1)


class SilentDataNode(TricklingDataNode):
    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.connection.settimeout(_LIMIT_S)
        with suppress(OSError):
            self.rfile.read(1)


_WHOLE = Location(_PATH, len(OldGateway.content), ())


def read_by_webhdfs(namenode: NameNode, deadline: Deadline) -> None:
    WebHdfsReads(namenode).read(_WHOLE, [Read(0, memoryview(bytearray(2560)))], deadline)


def locate(namenode: NameNode, deadline: Deadline) -> None:
    namenode.locate(_PATH, deadline)


@pytest.mark.parametrize(
    ("kind", "ask"),
    [
        (Trickling, locate),
        (Trickling, read_by_webhdfs),
        (TricklingDataNode, read_by_webhdfs),
        (Silent, locate),
        (Silent, read_by_webhdfs),
        (SilentDataNode, read_by_webhdfs),
    ],
)
def test_however_slowly_bytes_come_the_deadline_holds(
    kind: type[OldGateway], ask: Callable[[NameNode, Deadline], None]
) -> None:
    with behind(kind) as namenode:
        began = time.monotonic()
        with pytest.raises(Retryable):
            ask(namenode, Deadline.after(0.3))
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", [TricklingDataNode, SilentDataNode])
def test_a_read_by_webhdfs_can_be_cancelled_while_a_datanode_sends(kind: type[OldGateway]) -> None:
    with behind(kind) as namenode:
        cancel = Cancel()
        later = threading.Timer(0.3, cancel.cancel)
        later.start()
        began = time.monotonic()
        with pytest.raises(Cancelled):
            read_by_webhdfs(namenode, Deadline.after(_LIMIT_S, cancel))
        assert time.monotonic() - began < 5
        later.join()


def test_a_read_by_hdfs_native_ends_in_time_though_the_namenode_says_nothing() -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"hdfs://127.0.0.1:{silent.getsockname()[1]}/yard"
        cluster = Cluster.of(url, Settings(hadoop_conf_dir=None))
        with closing(Namespace(cluster, limit_s=_LIMIT_S)) as namespace:
            began = time.monotonic()
            with pytest.raises(Retryable):
                NativeReads(cluster, namespace).read(_WHOLE, [], Deadline.after(0.3))
            assert time.monotonic() - began < 5
    # The call that was given up on ends by itself. A thread in it at exit would end the process.
    eventually(lambda: not {one for one in threading.enumerate() if one not in before})


def test_where_kerberos_is_wanted_and_missing_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", None)
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>hadoop.security.authentication</name>"
        "<value>kerberos</value></property></configuration>"
    )
    cluster = Cluster.of("hdfs://nn:8020/yard", Settings(hadoop_conf_dir=tmp_path))
    with pytest.raises(BadSetting, match=r"weightyard\[kerberos\].*libkrb5-dev"):
        NameNode(cluster)
