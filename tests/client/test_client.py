"""The client against a real service: what a Registry does, it does."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pushing
import pytest
from cutting import Cutting
from service_world import LIMIT_S, World, push, push_file, served

import weightyard
from weightyard.client.catalogue import HttpCatalogue
from weightyard.client.connection import LONG_ANSWER_S, Connection
from weightyard.client.upload import HttpUpload
from weightyard.errors import (
    AliasMoved,
    BadSetting,
    BlockMissing,
    Bug,
    Changed,
    Conflict,
    DeadlineExceeded,
    InvalidName,
    KeyReused,
    NoSuchThing,
    NotAllowed,
    Protected,
    QuotaExceeded,
    RegistryUnavailable,
    Retryable,
    Unauthenticated,
    Unsupported,
    UploadExpired,
    VersionMoved,
)
from weightyard.format import manifest as manifests
from weightyard.format.block import MIB
from weightyard.format.manifest import Manifest
from weightyard.names import AliasName, Digest, FilePath, ModelName, PackId, Ref, TokenName
from weightyard.records import Publication, Retention, Role
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.deadline import Deadline
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.folder import read_folder
from weightyard.transfer.publish import read_manifest, store_manifest
from weightyard.transfer.reader import Reader
from weightyard.wire import OpenedUpload

BERT = ModelName("team", "bert")
PROD = AliasName("prod")
IN_TIME_S = 15.0
"""Long for a busy machine, and half of what it would take by default."""


@pytest.fixture
def client(world: World, url: str) -> Iterator[HttpCatalogue]:
    with HttpCatalogue(url, world.secrets["boss"]) as made:
        yield made


def as_writer(world: World, url: str) -> HttpCatalogue:
    return HttpCatalogue(url, world.secrets["writer"], deadline_s=LIMIT_S)


def test_registry_and_client_are_the_same_catalogue(world: World, url: str) -> None:
    catalogues: list[Catalogue] = [world.registry, as_writer(world, url)]
    versions = [push(one, world.store, "team/bert", b"same") for one in catalogues]
    assert versions[0].digest == versions[1].digest
    for one in catalogues:
        assert one.resolve(Ref.parse("team/bert")).number == 2
    catalogues[1].close()


def test_a_push_through_the_client_is_read_through_the_client(
    any_world: World, tmp_path: Path
) -> None:
    world = any_world
    with served(world.app) as url, as_writer(world, url) as client:
        data = [os.urandom(3 * MIB), os.urandom(100), b"x" * MIB]
        version = push(client, world.store, "team/bert", *data, alias="prod", message="m")
        assert (version.author, version.aliases, version.message) == ("writer", ("prod",), "m")
        manifest = read_manifest(world.store, Digest(version.digest))
        assert client.manifest(version) == manifest
        read_folder(Reader(world.store, client), manifest, tmp_path / "out")
        blocks = [block.id for block in manifest.blocks]
        assert client.placements(blocks) == world.registry.placements(blocks)
        again = push(client, world.store, "team/bert", *data)
        assert again.digest == version.digest


def test_models_and_versions_come_in_any_number(world: World, url: str) -> None:
    with HttpCatalogue(url, world.secrets["boss"]) as client:
        for i in range(12):
            client.create_model(ModelName("team", f"m{i:02}"))
        names = [model.name for model in client.models()]
        assert names == [f"team/m{i:02}" for i in range(12)]
        assert [m.name for m in client.models(after=ModelName("team", "m09"))] == names[10:]
        assert [m.name for m in client.models(limit=5)] == names[:5]
        client.remove_model(ModelName("team", "m00"))
        assert client.models()[0].name == "team/m01"


def test_everything_a_registry_does_with_versions_and_aliases(
    world: World, client: HttpCatalogue
) -> None:
    push(client, world.store, "team/bert", b"one", alias="prod")
    push(client, world.store, "team/bert", b"two")
    assert [version.number for version in client.versions(BERT)] == [2, 1]
    assert [version.number for version in client.versions(BERT, before=2)] == [1]
    assert client.model(BERT).aliases == {"prod": 1}
    assert client.alias(BERT, PROD) == 1
    assert client.alias(BERT, AliasName("none")) is None
    before = datetime.now(UTC)
    time.sleep(0.01)
    moved = client.move_alias(BERT, PROD, 2, reason="better", expect=1)
    assert (moved.before, moved.after, moved.reason) == (1, 2, "better")
    assert client.rollback_alias(BERT, PROD, reason="worse").after == 1
    assert [move.reason for move in client.alias_log(BERT, PROD)] == [
        "worse",
        "better",
        "published",
    ]
    assert [move.after for move in client.alias_log(BERT, PROD, as_of=before)] == [1]
    client.move_alias(BERT, AliasName("new"), 2, expect=None)
    assert client.move_alias(BERT, AliasName("new"), None).after is None
    ref = Ref.parse("team/bert@prod")
    changed = client.annotate(ref, {"tags": {"a": "b"}}, expect=client.resolve(ref).etag)
    assert changed.tags == {"a": "b"}
    client.mark_used(ref)
    assert client.resolve(ref).last_used is not None
    client.set_retention(BERT, Retention(keep_last=3))
    assert client.model(BERT).retention == Retention(keep_last=3)
    client.set_retention(BERT, None)
    assert client.model(BERT).retention is None
    assert client.cost(ref).logical_bytes == 3
    assert client.remove(Ref.parse("team/bert@v2"), reason="bad").number == 2
    assert client.about().store == world.store.url


def test_tokens_and_quotas(world: World, url: str, client: HttpCatalogue) -> None:
    made = client.create_token(TokenName("ci@lab"), Role.READ, ["team"])
    with HttpCatalogue(url, made.secret) as reader:
        assert reader.models() == []
    names = [token.name for token in client.tokens()]
    assert "ci@lab" in names
    assert [token.name for token in client.tokens(limit=2)] == names[:2]
    following = client.tokens(after=TokenName(names[1]), limit=1)
    assert [token.name for token in following] == names[2:3]
    assert client.revoke_token(TokenName("ci@lab")).revoked is not None
    assert client.set_quota("team", stored_bytes=None, versions=1).versions == 1
    assert client.quota("team").used_versions == 0
    assert client.audit(limit=1)[0].action == "quota.set"


def test_errors_come_back_as_what_they_were(world: World, url: str, client: HttpCatalogue) -> None:
    push(client, world.store, "team/bert", b"one", alias="prod")
    with pytest.raises(NoSuchThing, match="no model"):
        client.model(ModelName("team", "none"))
    with pytest.raises(NoSuchThing):
        client.alias(ModelName("team", "none"), PROD)
    for to in (1, None):
        with pytest.raises(AliasMoved) as moved:
            client.move_alias(BERT, PROD, to, expect=None)
        assert moved.value.current == 1
    with pytest.raises(VersionMoved) as newer:
        push(client, world.store, "team/bert", b"two", expect_latest=0)
    assert newer.value.current == 1
    with pytest.raises(Protected, match="alias prod"):
        client.remove(Ref.parse("team/bert@v1"))
    with pytest.raises(Changed):
        client.annotate(Ref.parse("team/bert@v1"), {"tags": {}}, expect="00")
    with as_writer(world, url) as writer:
        with pytest.raises(NotAllowed, match="role"):
            writer.remove(Ref.parse("team/bert@v1"))
        with pytest.raises(NotAllowed, match="other"):
            writer.open_upload(ModelName("other", "gpt"), Publication())
        client.set_quota("team", stored_bytes=None, versions=1)
        with pytest.raises(QuotaExceeded):
            writer.open_upload(BERT, Publication())
        client.set_quota("team", stored_bytes=None, versions=None)
        upload = writer.open_upload(BERT, Publication())
        manifest = read_manifest(world.store, Digest(world.registry.versions(BERT)[0].digest))
        with pytest.raises(BlockMissing):
            upload.commit(
                Digest(world.registry.versions(BERT)[0].digest), manifest, Publication(), "k"
            )
        upload.abandon()
        upload.abandon()
        for call in (upload.heartbeat, lambda: upload.begin_pack(PackId.new())):
            with pytest.raises(UploadExpired):
                call()
    with HttpCatalogue(url, "wy_nonsense") as nobody, pytest.raises(Unauthenticated):
        nobody.models()


def test_the_same_key_for_other_content_is_an_error(world: World, client: HttpCatalogue) -> None:
    push(client, world.store, "team/bert", b"one", key="key")
    with pytest.raises(KeyReused):
        push(client, world.store, "team/bert", b"two", key="key")


def test_a_file_is_fetched_whatever_its_name_is(world: World, client: HttpCatalogue) -> None:
    data = os.urandom(2 * MIB + 7)
    push_file(world, "team/bert", "deep/%C3%A4%20b.bin", data)
    out = io.BytesIO()
    assert client.fetch_file(Ref(BERT), FilePath("deep/ä b.bin"), out) == len(data)
    assert out.getvalue() == data


def test_a_lost_answer_is_asked_for_again(
    world: World, client: HttpCatalogue, cutting: Cutting
) -> None:
    digest, manifest = written(upload := client.open_upload(BERT, Publication()), world)
    cutting.cut_after_bytes = [0, 10]
    with HttpCatalogue(cutting.url, world.secrets["boss"], deadline_s=LIMIT_S) as unlucky:
        again = reopened(unlucky, upload)
        version = again.commit(digest, manifest, Publication(), "key")
    assert version.number == 1
    assert cutting.connections == 3
    assert len(world.registry.versions(BERT)) == 1


class Losing(httpx.HTTPTransport):
    """Loses the first answer to a commit, as if it had been waited for long enough."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s: list[float] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.url.path.endswith("/commit"):
            self.waited_s.append(request.extensions["timeout"]["read"])
            if len(self.waited_s) == 1:
                response.close()
                raise httpx.ReadTimeout("", request=request)
        return response


def test_a_commit_is_waited_for_and_asked_for_again_when_the_deadline_is_over(
    world: World, client: HttpCatalogue, url: str
) -> None:
    digest, manifest = written(upload := client.open_upload(BERT, Publication()), world)
    losing = Losing()
    with HttpCatalogue(url, world.secrets["boss"], deadline_s=0.0, transport=losing) as late:
        version = reopened(late, upload).commit(digest, manifest, Publication(), "key")
    assert version.number == 1
    assert len(world.registry.versions(BERT)) == 1
    assert losing.waited_s == [LONG_ANSWER_S, LONG_ANSWER_S]


def written(upload: HttpUpload, world: World) -> tuple[Digest, Manifest]:
    """All that comes before the commit."""
    manifest = pushing.write(upload, world.store, b"one")
    digest, stored = manifests.encode(manifest)
    store_manifest(world.store, upload, digest, stored, None, min_replicas=1)
    return digest, manifest


def reopened(client: HttpCatalogue, upload: HttpUpload) -> HttpUpload:
    opened = OpenedUpload(id=upload.id.hex, model=str(BERT), lease_s=1, block_bytes=MIB)
    return HttpUpload(client.connection, opened)


def test_what_must_not_happen_twice_is_not_tried_twice(world: World, cutting: Cutting) -> None:
    push(world.registry, world.store, "team/bert", b"one")
    push(world.registry, world.store, "team/bert", b"two")
    cutting.cut_after_bytes = [0]
    with HttpCatalogue(cutting.url, world.secrets["boss"], deadline_s=LIMIT_S) as client:
        with pytest.raises(RegistryUnavailable):
            client.move_alias(BERT, PROD, 1)
        assert client.alias(BERT, PROD) == 1, "read back: it had happened"
    assert len(world.registry.alias_log(BERT, PROD)) == 1


def test_a_fetch_goes_on_where_it_broke_off(world: World, cutting: Cutting) -> None:
    data = os.urandom(6 * MIB)
    push_file(world, "team/bert", "a", data)
    cutting.cut_after_bytes = [2 * MIB, 3 * MIB]
    with HttpCatalogue(cutting.url, world.secrets["boss"]) as client:
        out = io.BytesIO()
        client.fetch_file(Ref(BERT, 1), FilePath("a"), out)
    assert out.getvalue() == data


def test_a_service_that_is_not_there_is_an_error_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    with (
        socket.socket() as taken,  # so that nobody comes to listen there
        HttpCatalogue(unanswered(taken), deadline_s=1) as client,
        pytest.raises((RegistryUnavailable, DeadlineExceeded), match=r"127\.0\.0\.1"),
    ):
        client.models()
    assert time.monotonic() - began < IN_TIME_S


def unanswered(taken: socket.socket) -> str:
    """The URL of a port that is taken and at which nobody listens."""
    taken.bind(("127.0.0.1", 0))
    return f"http://127.0.0.1:{taken.getsockname()[1]}"


def answering(
    *answers: httpx.Response | Exception,
) -> tuple[httpx.MockTransport, list[httpx.Request]]:
    seen: list[httpx.Request] = []
    rest = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        found = rest.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return httpx.MockTransport(answer), seen


def test_a_service_that_says_nothing_is_waited_for_no_longer_than_one_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with HttpCatalogue(url) as client, pytest.raises(RegistryUnavailable):
            client.locator(Settings()).locate(layout.YARD, Deadline.after(0.3))
    assert time.monotonic() - began < IN_TIME_S


def test_an_answer_of_unknown_length_is_never_taken_for_a_file() -> None:
    endless = httpx.Response(200, content=iter([b"some", b"thing"]))
    transport, seen = answering(endless)
    with (
        HttpCatalogue("http://yard", transport=transport) as client,
        pytest.raises(Unsupported, match="length"),
    ):
        client.fetch_file(Ref(BERT, 1), FilePath("a"), io.BytesIO())
    assert seen[0].headers["accept-encoding"] == "identity"


def test_a_pause_that_is_asked_for_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    me, sleep = threading.current_thread(), time.sleep

    def noted(seconds: float) -> None:
        if threading.current_thread() is me:
            pauses.append(seconds)
        else:  # of another test, perhaps
            sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    busy = httpx.Response(503, headers={"Retry-After": "7"}, json={"code": "registry-unavailable"})
    transport, seen = answering(busy, httpx.Response(200, json={"items": [], "next": None}))
    with HttpCatalogue("http://yard", transport=transport, deadline_s=60) as client:
        assert client.models() == []
    assert len(seen) == 2
    assert pauses[0] >= 7


def test_a_pause_longer_than_the_deadline_is_not_waited_for() -> None:
    busy = httpx.Response(503, headers={"Retry-After": "60"}, json={"code": "store-unavailable"})
    transport, seen = answering(busy)
    with (
        HttpCatalogue("http://yard", transport=transport, deadline_s=1) as client,
        pytest.raises(Retryable),
    ):
        client.models()
    assert len(seen) == 1


def test_the_token_stays_behind_when_the_host_changes() -> None:
    transport, seen = answering(
        httpx.Response(302, headers={"Location": "http://evil.example/steal"}),
        httpx.Response(404),
    )
    with (
        HttpCatalogue("http://yard", "wy_secret", transport=transport) as client,
        pytest.raises(NoSuchThing),
    ):
        client.models()
    assert seen[0].headers["authorization"] == "Bearer wy_secret"
    assert "authorization" not in seen[1].headers
    assert seen[1].url.host == "evil.example"


def test_a_change_is_never_redirected() -> None:
    transport, seen = answering(
        httpx.Response(307, headers={"Location": "http://evil.example/steal"})
    )
    with (
        HttpCatalogue("http://yard", "wy_secret", transport=transport) as client,
        pytest.raises(BadSetting),
    ):
        client.create_model(BERT)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(httpx.Response(200, text="<html>"), RegistryUnavailable),
     (httpx.Response(502, text="bad gateway"), RegistryUnavailable),
     (httpx.Response(418, text="tea"), Exception),
     (httpx.Response(409, json={"code": "from-the-future"}), Conflict),
     (httpx.Response(400, json={"code": "invalid-name", "detail": 5}), InvalidName),
     (httpx.Response(409, json={"code": "conflict", "args": "x", "__cause__": "y"}), Conflict),
     (httpx.Response(500, json=[1, 2]), Bug)],
)  # fmt: skip
def test_answers_of_others_are_understood_as_far_as_they_can_be(
    answer: httpx.Response, kind: type[Exception]
) -> None:
    transport, _ = answering(answer)
    with (
        HttpCatalogue("http://yard", transport=transport, deadline_s=0) as client,
        pytest.raises(kind),
    ):
        client.models()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://yard", "yard", "http://", "http://user:pw@yard", "http://yard/?token=x",
        "http://yard:port", "http://yard:99999", "http://[::1", "http://[yard]", "http://ya\trd",
        "http://a..b", "http://xn--a", f"http://{'a' * 70}.example",
    ],
)  # fmt: skip
def test_a_url_that_is_no_service_is_refused(url: str) -> None:
    with pytest.raises(BadSetting, match="URL"):
        Connection(url)
    Connection("http://[::1]:8600").close()
    Connection("https://yärd.example/below").close()


def test_a_token_with_odd_characters_never_reaches_a_header() -> None:
    with pytest.raises(Unauthenticated):
        Connection("http://yard", "wy_x\r\nX-Evil: 1")


def test_secrets_are_not_shown_by_the_client(world: World, url: str) -> None:
    with HttpCatalogue(url, "wy_canary") as client:
        with pytest.raises(Unauthenticated) as why:
            client.models()
        assert "canary" not in str(why.value) + repr(client) + repr(client.connection)


def test_many_clients_at_once_publish_consecutive_numbers(world: World, url: str) -> None:
    wrong: list[BaseException] = []

    def work(i: int) -> None:
        try:
            with as_writer(world, url) as client:
                push(client, world.store, "team/bert", b"%d" % i * 1000)
        except BaseException as why:  # noqa: BLE001 - told to the test
            wrong.append(why)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert wrong == []
    numbers = [version.number for version in world.registry.versions(BERT)]
    assert numbers == list(range(8, 0, -1))


def test_two_services_on_one_database_are_one(world: World, url: str, tmp_path: Path) -> None:
    from weightyard.service.app import create_app
    from weightyard.service.serving import open_service

    second = open_service(world.store, world.registry.database, world.service.settings, "127.0.0.1")
    with served(create_app(second)) as other, as_writer(world, url) as first:
        digest, manifest = written(upload := first.open_upload(BERT, Publication()), world)
        with as_writer(world, other) as client:
            again = reopened(client, upload)
            version = again.commit(digest, manifest, Publication(message="both"), "k")
        assert (version.message, first.resolve(Ref(BERT))) == ("both", version)


def test_a_yard_opened_by_its_service_pushes_and_pulls(
    world: World, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(os.urandom(200_000))
    (folder / "config.json").write_text('{"layers": 2}')
    with weightyard.open(url, token=world.secrets["writer"]) as yard:
        pushed = yard.push(folder, "team/bert", alias="prod", message="over http")
        assert (pushed.author, pushed.structure["config"]) == ("writer", {"layers": 2})
        yard.pull("team/bert@prod", tmp_path / "out")
        again = yard.push(folder, "team/bert")
        assert (again.new_bytes, again.number) == (0, 2)
    for name in ("w.bin", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
