"""Hostile names, bodies and headers: each kind that got through somewhere once."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_world import API, LIMIT_S, World, push_file
from sqlalchemy import update
from waiting import eventually

from weightyard.errors import Refused
from weightyard.names import Ref
from weightyard.records import MAX_LEVELS
from weightyard.registry import schema
from weightyard.service import limits
from weightyard.transfer.gather import parsed_config
from weightyard.transfer.publish import checked_publication
from weightyard.wire import Annotation
from weightyard.wire import body as body_of

TRAVERSALS = [
    "../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "%252e%252e%252fetc%252fpasswd",
    "%25252e%25252e%25252fetc",
    "..%5c..%5cwindows",
    "a%5c..%5cb",
    "..;/etc/passwd",
    "%2e%2e;x=y/etc",
    "a;..%2fb",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "%2f%2fhost%2fshare",
    "C:%5cwindows",
    "c:/windows",
    "file:%2f%2f%2fetc%2fpasswd",
    "a%00.bin",
    "a%0d%0aX-Evil:1",
    "a%23b",
    "%23..%2f",
    "a%3fb=..%2f",
    "%e2%80%a4%e2%80%a4/etc",  # ONE DOT LEADER, twice
    "%ef%bc%8e%ef%bc%8e%ef%bc%8fetc",  # full-width dots and slash
    "%ef%bc%85%32%65",  # full-width percent
    "a%e2%80%8bb",  # zero width space
    "%e2%80%aegnp.exe",  # right-to-left override
    "%c0%ae%c0%ae%c0%afetc",  # overlong UTF-8
    "%ff%fe",
    ".",
    "..",
    "a/./b",
    "a//b",
    "a/",
    "aux",
    "con.txt",
    "trailing.",
    "trailing%20",
    "e%cc%81",  # not NFC
    "%ed%a0%80",  # half a surrogate pair
    "x" * 1025,
    "/".join(["d" * 10] * 120),
]


def raw(url: str, request: bytes) -> bytes:
    """An answer to bytes that no client library would send."""
    parts = urlsplit(url)
    answer = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=LIMIT_S) as connection:
        # Who refuses a request before its end has answered when it hangs up on the rest of it.
        with suppress(ConnectionError):
            connection.sendall(request)
        with suppress(ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
    return answer


def request(world: World, method: str, target: str, body: bytes = b"") -> bytes:
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Authorization: Bearer {world.secrets['boss']}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.fixture
def upload(world: World) -> str:
    return str(world.call("POST", "models/team/bert/uploads").json()["id"])


def test_no_hostile_path_becomes_a_file(world: World, url: str, upload: str) -> None:
    for path in TRAVERSALS:
        answer = raw(url, request(world, "PUT", f"{API}/uploads/{upload}/files/{path}", b"evil"))
        assert status(answer) in (400, 404, 414, 422), (path, answer[:300])
        assert b"Traceback" not in answer
    assert world.call("POST", f"uploads/{upload}/commit").status_code == 400, "none was taken"


def test_no_hostile_path_reads_anything(world: World, url: str) -> None:
    push_file(world, "team/bert", "w.bin", b"weights")
    for path in TRAVERSALS:
        target = f"{API}/models/team/bert/versions/1/files/{path}"
        answer = raw(url, request(world, "GET", target))
        assert status(answer) in (400, 404, 414, 422), (path, answer[:300])
        assert b"root:" not in answer


@pytest.mark.parametrize(
    "template",
    ["models/{}/bert", "models/team/{}", "models/team/bert/aliases/{}",
     "models/team/bert/resolve/{}", "uploads/{}/heartbeat", "tokens/{}", "quotas/{}",
     "models/team/{}/versions/1"],
)  # fmt: skip
def test_no_hostile_name_gets_anywhere(world: World, url: str, template: str) -> None:
    method = "POST" if "heartbeat" in template else "DELETE" if "tokens" in template else "GET"
    for name in TRAVERSALS:
        answer = raw(url, request(world, method, f"{API}/{template.format(name)}"))
        harmless = name in ("aux", "con.txt") and template == "quotas/{}"
        assert status(answer) in (200 if harmless else 400, 400, 404, 405, 422), (
            name,
            answer[:300],
        )


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(min_size=1, max_size=30))
def test_any_text_as_a_path_is_refused_or_comes_back_as_it_was(world: World, text: str) -> None:
    upload = world.call("POST", "models/team/any/uploads").json()["id"]
    path = "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))
    sent = world.call("PUT", f"uploads/{upload}/files/{path}", content=b"x")
    assert sent.status_code in (200, 400, 404)
    if sent.status_code == 200:
        assert sent.json()["path"] == text
        number = world.call("POST", f"uploads/{upload}/commit").json()["number"]
        answer = world.call("GET", f"models/team/any/versions/{number}/files/{path}")
        assert answer.content == b"x"


async def _endless(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 65536 + 1):
        yield b" " * 65536


def test_a_body_is_measured_as_it_comes_not_by_what_it_announces(world: World) -> None:
    streamed = world.call("POST", "models", content=_endless(4 * limits.MAX_BODY_BYTES))
    assert (streamed.status_code, streamed.json()["code"]) == (413, "too-large")
    long = world.call("POST", "models", content=b" " * (limits.MAX_BODY_BYTES + 1))
    assert long.status_code == 413


def test_chunked_bodies_have_the_same_limit(world: World, url: str) -> None:
    head = (
        f"POST {API}/models HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        f"Connection: close\r\nAuthorization: Bearer {world.secrets['boss']}\r\n\r\n"
    ).encode()
    chunks = (b"10000\r\n" + b" " * 65536 + b"\r\n") * 17
    assert status(raw(url, head + chunks)) == 413


def test_more_ids_than_a_request_takes_are_refused(world: World, upload: str) -> None:
    body = {"blocks": ["00" * 32] * 10_001}
    assert world.call("POST", f"uploads/{upload}/claims", json=body).status_code == 422
    body["blocks"].pop()
    assert world.call("POST", f"uploads/{upload}/claims", json=body).status_code == 200


def test_pages_have_an_end(world: World) -> None:
    assert world.call("GET", "models?limit=1001").status_code == 422
    assert world.call("GET", "models?limit=0").status_code == 422


@pytest.mark.parametrize("after", ["x", "9" * 30, "-1", "team/bert\0", "../..", "١"])
def test_a_page_that_was_not_given_out_is_refused(world: World, after: str) -> None:
    world.call("POST", "models", json={"name": "team/bert"})
    for path in ("audit", "models/team/bert/versions", "models"):
        answer = world.call("GET", path, params={"after": after})
        assert answer.status_code == 400


def test_a_page_after_more_than_there_can_be_is_the_first(any_world: World) -> None:
    world = any_world
    push_file(world, "team/bert", "a", b"a")
    world.call("PUT", "models/team/bert/aliases/prod", json={"version": 1})
    for path in ("audit", "models/team/bert/versions", "models/team/bert/aliases/prod/log"):
        answer = world.call("GET", path, params={"after": "9" * 18})
        assert answer.status_code == 200, answer.text
        assert answer.json()["items"]


def test_long_headers_and_targets_are_refused(world: World) -> None:
    assert world.call("GET", "models", headers={"X-Long": "x" * 40_000}).status_code == 413
    many = {f"X-{i}": "x" for i in range(200)}
    assert world.call("GET", "models", headers=many).status_code == 413
    assert world.call("GET", "models?after=" + "x" * 9000).status_code == 413


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"null", b"\xff", b'{"name": NaN}', b'{"name": "a\\ud800/b"}', b"[" * 100_000,
     b'{"name": "team/\\u0000"}', b'{"name": 1e999}', b'{"name": "team/bert", "extra": 1}',
     b'{"name": "team/bert", "name": 5}', b""],
)  # fmt: skip
def test_a_body_that_is_not_what_it_should_be_is_the_callers_fault(
    world: World, body: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = world.call("POST", "models", content=body, headers=headers)
    assert answer.status_code in (400, 422)
    assert answer.json()["code"] in ("refused", "invalid-name")


UNKEEPABLE = [
    b'{"metrics": {"loss": NaN}}',
    b'{"metrics": {"loss": 1e999}}',
    b'{"metadata": {"a": NaN}}',
    b'{"message": "a\\u0000b"}',
    b'{"metadata": {"a": {"b": ["\\u0000"]}}}',
    b'{"message": "\\ud800"}',
    b'{"alias": "latest"}',
    b'{"alias": "../x"}',
    b'{"parent": "nonsense"}',
    b'{"replication": 0}',
    b'{"expect_latest": -5}',
    b'{"tags": {"\\u0000": "x"}}',
    b'{"policy": "\\u0000"}',
    b'{"metadata": {"a": [18446744073709551616]}}',
    b'{"config": {"a": {"b": -9223372036854775809}}}',
    b'{"metadata": {"a": %s}}' % (b"9" * 4000),
]


def test_what_a_database_could_not_keep_is_refused(any_world: World) -> None:
    headers = {"Content-Type": "application/json"}
    for said in UNKEEPABLE:
        answer = any_world.call("POST", "models/team/bert/uploads", content=said, headers=headers)
        assert answer.status_code in (400, 422), (said, answer.text)
    push_file(any_world, "team/bert", "a", b"a")
    version = "models/team/bert/versions/1"
    for said in (said for said in UNKEEPABLE if said[2:6] in (b"meta", b"mess", b"tags", b"metr")):
        answer = any_world.call("PATCH", version, content=said, headers=headers)
        assert answer.status_code in (400, 422), (said, answer.text)
    assert any_world.call("DELETE", f"{version}?reason=a%00b").status_code in (400, 422)
    any_world.call("PUT", "models/team/bert/aliases/prod", json={"version": 1})
    alias = "models/team/bert/aliases/prod"
    assert any_world.call("DELETE", f"{alias}?reason=a%00b").status_code in (400, 422)
    assert any_world.call("GET", alias).status_code == 200, "nothing was done"


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 300, 900])
def test_metadata_from_before_its_depth_was_bounded_are_told_and_can_be_replaced(
    any_world: World, levels: int
) -> None:
    world = any_world
    push_file(world, "team/bert", "a", b"a")
    kept = {"metadata": {**nested(levels), "b": [1]}, "structure": {"config": nested(levels)}}
    world.registry.database.write(lambda tx: tx.execute(update(schema.versions).values(kept)))
    version = "models/team/bert/versions/1"
    for path in (version, "models/team/bert/versions", "models/team/bert/resolve/latest"):
        assert world.call("GET", path).status_code == 200, path
    told = world.call("GET", version).json()["metadata"]
    assert told["b"] == [1]
    text = "[" * (levels - 1) + "]" * (levels - 1)
    assert told["a"] == (json.loads(text) if levels < 200 else text)
    assert world.registry.check(world.store).is_clean
    world.registry.flush_outbox(world.store)
    changed = world.call("PATCH", version, json={"metadata": {"a": 1}})
    assert changed.json()["metadata"] == {"a": 1}


def nested(levels: int) -> dict[str, Any]:
    """Metadata of so many levels."""
    inner: list[Any] = []
    for _ in range(levels - 2):
        inner = [inner]
    return {"a": inner}


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 300])
def test_what_nests_deeper_than_can_be_told_again_is_refused_by_every_way_in(
    world: World, levels: int
) -> None:
    push_file(world, "team/bert", "a", b"a")
    newest = world.registry.newest_event()
    version, deep = "models/team/bert/versions/1", nested(levels)
    said = {"metadata": deep}
    for method, path, body in (
        ("PATCH", version, said),
        ("POST", "models/team/bert/uploads", said),
        ("POST", "models/team/bert/uploads", {"config": deep}),
    ):
        answer = world.call(method, path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "refused"), path
    with pytest.raises(Refused, match=r"metadata: .*it nests deeper"):
        body_of(Annotation, **said)
    with pytest.raises(Refused, match=r"metadata: .*it nests deeper"):
        checked_publication(said)
    with pytest.raises(Refused, match=r"metadata: .*it nests deeper"):
        world.registry.annotate(Ref.parse("team/bert@v1"), said)
    assert parsed_config(json.dumps(deep).encode()) is None, "a push goes on without it"
    assert world.registry.newest_event() == newest
    assert world.call("GET", version).json()["metadata"] == {}


def test_what_nests_as_deep_as_it_may_comes_back(world: World) -> None:
    deep = nested(MAX_LEVELS)
    opened = world.call("POST", "models/team/bert/uploads").json()
    upload = f"uploads/{opened['id']}"
    world.call("PUT", f"{upload}/files/a", content=b"a")
    said = {"publication": {"metadata": deep, "config": deep}}
    assert world.call("POST", f"{upload}/commit", json=said).status_code == 201
    version = "models/team/bert/versions/1"
    assert world.call("GET", version).json()["metadata"] == deep
    assert world.call("PATCH", version, json={"metadata": deep}).json()["metadata"] == deep


def test_a_body_that_stops_coming_is_not_waited_for(
    world: World, url: str, upload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "IDLE_S", 0.2)
    head = request(world, "PUT", f"{API}/uploads/{upload}/files/a").replace(
        b"Content-Length: 0", b"Content-Length: 100"
    )
    assert status(raw(url, head)) == 408


def test_a_client_that_goes_away_leaves_nothing(world: World, url: str, upload: str) -> None:
    parts = urlsplit(url)
    head = request(world, "PUT", f"{API}/uploads/{upload}/files/a").replace(
        b"Content-Length: 0", b"Content-Length: 10000000"
    )
    spool = world.service.spool
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head + os.urandom(2_000_000))
        eventually(lambda: spool.used_bytes > 0)
    eventually(lambda: spool.used_bytes == 0)
    assert world.call("POST", f"uploads/{upload}/commit").status_code == 400
