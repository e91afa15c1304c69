"""NameNodes that lie, fall silent, want a proof, or are not the active one."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from weightyard.errors import AlreadyThere, StoreFull, StoreUnavailable, YardError
from weightyard.storage.hdfs import rpc, wire
from weightyard.storage.hdfs.native import _translated
from weightyard.storage.hdfs.new_files import Defaults, NewFile, NewFiles
from weightyard.storage.hdfs.protobuf import Malformed, bytes_field, delimited, varint_field
from weightyard.storage.hdfs.rpc import NameNodeCalls, NotServed
from weightyard.storage.hdfs.wire import BlockAccess

LIMIT_S = 60.0
FILE = NewFile("/f", 7, is_plain=True)


def answer(
    message: bytes, *, number: int = 0, status: int = 0, java: str = "", why: str = ""
) -> bytes:
    header = varint_field(1, number) + varint_field(2, status)
    header += bytes_field(4, java.encode()) + bytes_field(5, why.encode())
    body = delimited(header) + delimited(message)
    return struct.pack(">I", len(body)) + body


def located(datanodes: int = 2) -> bytes:
    """What a NameNode answers to addBlock."""
    extended = wire.extended_block(BlockAccess("BP-1", 11, 12, 0))
    token = b"".join(bytes_field(number, b"") for number in (1, 2, 3, 4))
    block = bytes_field(1, extended) + varint_field(2, 0)
    for number in range(datanodes):
        host = f"dn{number}".encode()
        id = bytes_field(1, b"10.0.0.1") + bytes_field(2, host) + varint_field(4, 9866)
        block += bytes_field(3, bytes_field(1, id))
    block += bytes_field(5, token)
    for number in range(datanodes):
        block += varint_field(7, 1) + bytes_field(8, f"DS-{number}".encode())
    return bytes_field(1, block)


def made_file() -> bytes:
    """What a NameNode answers to create."""
    status = varint_field(1, 2) + bytes_field(2, b"") + varint_field(3, 0)
    status += bytes_field(4, varint_field(1, 0o644)) + bytes_field(5, b"me") + bytes_field(6, b"us")
    return bytes_field(1, status + varint_field(10, 2) + varint_field(13, 16_411))


def server_defaults() -> bytes:
    """What a NameNode answers to getServerDefaults."""
    said = varint_field(1, 128 << 20) + varint_field(2, 512) + varint_field(3, 64 << 10)
    return bytes_field(1, said + varint_field(4, 3) + varint_field(5, 4096) + varint_field(6, 0))


@contextlib.contextmanager
def namenode(*answers: bytes | None) -> Iterator[str]:
    """Gives these answers, each on a connection of its own; None: none, and hangs up."""
    left = list(answers)
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    held.append(client)
                    with contextlib.suppress(OSError):
                        client.recv(65536)
                        said = left.pop(0) if left else b""
                        if said is None:
                            client.close()
                        else:
                            client.sendall(said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)
        for one in held:
            one.close()


@contextlib.contextmanager
def calls(*namenodes: str, answer_s: float = LIMIT_S) -> Iterator[NameNodeCalls]:
    made = NameNodeCalls(namenodes, "me", answer_s=answer_s)
    try:
        yield made
    finally:
        made.close()


def test_an_answer_is_given_as_it_came() -> None:
    with namenode(answer(b"yes")) as one, calls(one) as made:
        assert made.call("asking", "m", b"") == b"yes"


def test_a_standby_is_left_for_the_active_one_which_is_asked_first_from_then_on() -> None:
    standby = answer(b"", status=1, java="org.apache.hadoop.ipc.StandbyException", why="not here")
    with (
        namenode(standby) as idle,
        namenode(answer(b"yes")) as active,
        calls(idle, active) as made,
    ):
        assert made.call("asking", "m", b"") == b"yes"
        assert made._namenodes[made._asked] == active


def test_a_namenode_that_hung_up_is_asked_again_with_the_same_call() -> None:
    with namenode(None, answer(b"yes")) as one, calls(one) as made:
        assert made.call("asking", "m", b"") == b"yes"


def test_a_refusal_is_the_error_it_names() -> None:
    taken = "org.apache.hadoop.fs.FileAlreadyExistsException"
    refusal = answer(b"", status=1, java=taken, why="/f is there\n\tat a.b.C")
    said = r"asking: FileAlreadyExistsException: /f is there$"
    with namenode(refusal) as one, calls(one) as made, pytest.raises(AlreadyThere, match=said):
        made.call("asking", "m", b"")


def test_a_folder_with_all_the_files_that_hdfs_allows_is_full_whoever_says_so() -> None:
    java = "org.apache.hadoop.hdfs.protocol.FSLimitException$MaxDirectoryItemsExceededException"
    why = "The directory item limit of /yard/journal is exceeded: limit=1048576 items=1048576"
    said = rf"asking: MaxDirectoryItemsExceededException: {why}$"
    refusal = answer(b"", status=1, java=java, why=f"{why}\n\tat a.b.C")
    with namenode(refusal) as one, calls(one) as made, pytest.raises(StoreFull, match=said):
        made.call("asking", "m", b"")
    by_native = RuntimeError(f'RPCError("{java}", "{why}\\n\\tat a.b.C")')
    with pytest.raises(StoreFull, match=said):
        raise _translated("asking", by_native)


def test_who_wants_a_proof_is_told_apart_from_who_fails() -> None:
    secure = answer(b"", status=2, java="AccessControlException", why="SIMPLE is not enabled")
    with namenode(secure) as one, calls(one) as made, pytest.raises(NotServed, match="SIMPLE"):
        made.call("asking", "m", b"")


def test_a_namenode_that_is_too_busy_is_to_be_asked_again() -> None:
    busy = answer(
        b"",
        status=2,
        java="org.apache.hadoop.ipc.RetriableException",
        why="Server too busy - disconnecting",
    )
    with namenode(busy) as one, calls(one) as made, pytest.raises(StoreUnavailable, match="busy"):
        made.call("asking", "m", b"")


@pytest.mark.parametrize(
    "java", ["AuthorizationException", "RPC$VersionMismatch", "RpcNoSuchProtocolException"]
)
def test_who_does_not_serve_this_caller_or_protocol_says_so(java: str) -> None:
    refusal = answer(b"", status=2, java=f"org.apache.hadoop.ipc.{java}", why="no")
    with namenode(refusal) as one, calls(one) as made, pytest.raises(NotServed, match=r"no$"):
        made.call("asking", "m", b"")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(struct.pack(">I", 1 << 31), id="endless"),
        pytest.param(answer(b"yes", number=5), id="to another call"),
        pytest.param(answer(b"yes", status=9), id="of no status"),
        pytest.param(struct.pack(">I", 3) + b"\xff" * 3, id="no message"),
        pytest.param(None, id="hangs up"),
    ],
)
def test_a_namenode_that_lies_is_unavailable(said: bytes | None) -> None:
    with (
        namenode(*[said] * 5) as one,
        calls(one) as made,
        pytest.raises(StoreUnavailable, match=f"asking: NameNode {one}"),
    ):
        made.call("asking", "m", b"")


def test_a_namenode_that_says_nothing_holds_nobody_for_longer_than_told() -> None:
    with namenode() as silent, calls(silent, answer_s=0.3) as made:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"no answer for 0\.3 s"):
            made.call("asking", "m", b"")
        assert time.monotonic() - began < LIMIT_S / 2


def test_a_silent_namenode_leaves_time_for_the_next_which_is_asked_first_from_then_on() -> None:
    with (
        namenode() as silent,
        namenode(answer(b"yes")) as active,
        calls(silent, active, answer_s=1.0) as made,
    ):
        assert made.call("asking", "m", b"") == b"yes"
        assert made._namenodes[made._asked] == active


def test_while_all_namenodes_are_silent_each_is_asked_in_its_turn() -> None:
    with namenode() as one, namenode() as other, calls(one, other, answer_s=0.4) as made:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=f"NameNode {other}: no answer"):
                made.call("asking", "m", b"")
            assert made._namenodes[made._asked] == one


def test_datanodes_are_called_by_address_or_by_name() -> None:
    for by_hostname, names in ((True, ["dn0:9866", "dn1:9866"]), (False, ["10.0.0.1:9866"] * 2)):
        with namenode(answer(located())) as one, calls(one) as made:
            files = NewFiles(made, "me", by_hostname=by_hostname)
            block = files.add_block(FILE, None, (), 0)
            assert [target.datanode for target in block.targets] == names
            assert block.access == BlockAccess("BP-1", 11, 12, 0)


def test_what_a_namenode_says_of_files_and_defaults_is_understood() -> None:
    with namenode(answer(made_file())) as one, calls(one) as made:
        files = NewFiles(made, "me", by_hostname=True)
        assert files.create("/f", 0o644, 2, 1 << 20) == NewFile("/f", 16_411, is_plain=True)
    with namenode(answer(server_defaults())) as one, calls(one) as made:
        defaults = NewFiles(made, "me", by_hostname=True).defaults()
        assert defaults == Defaults(128 << 20, 3, encrypts_transfers=False)


@pytest.mark.parametrize(
    ("sample", "parse"),
    [
        (located(), lambda files, raw: files.add_block(FILE, None, (), 0)),
        (answer(b"yes", java="C", why="w")[4:], lambda files, raw: rpc._parse_answer(raw, 0, "x")),
        (
            varint_field(1, 4) + varint_field(2, 0) + varint_field(2, 0),
            lambda files, raw: wire.parse_ack(raw),
        ),
        (made_file(), lambda files, raw: files.create("/f", 0o644, 2, 1 << 20)),
        (server_defaults(), lambda files, raw: files.defaults()),
        (varint_field(1, True), lambda files, raw: files.complete(FILE, None, 0)),
    ],
    ids=["block", "answer", "acknowledgement", "file", "defaults", "completed"],
)
def test_ten_thousand_damaged_answers_give_nothing_but_typed_errors(
    sample: bytes, parse: Callable[[NewFiles, bytes], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    refused = 0
    with calls("127.0.0.1:9") as made:
        files = NewFiles(made, "me", by_hostname=True)
        for _ in range(10_000):
            raw = bytearray(sample)
            for _ in range(chance.randint(1, 4)):
                raw[chance.randrange(len(raw))] = chance.randrange(256)
            if chance.random() < 0.3:
                raw = raw[: chance.randrange(len(raw))] + chance.randbytes(9)
            damaged = bytes(raw)
            monkeypatch.setattr(NameNodeCalls, "call", lambda *asked, said=damaged: said)
            try:
                parse(files, damaged)
            except (Malformed, YardError):
                refused += 1
    assert refused > 1000
