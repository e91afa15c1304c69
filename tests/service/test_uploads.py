"""Publishing through the service."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save
from service_world import LIMIT_S, World, make_world, push, push_file

from weightyard.errors import BlockMissing
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import BlockId, ModelName, PackId, UploadId
from weightyard.records import Publication
from weightyard.registry.uploads import Reading
from weightyard.service import uploads
from weightyard.service.spool import Spool
from weightyard.storage import layout
from weightyard.transfer.gather import gather_files
from weightyard.transfer.publish import publish
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, Writer
from weightyard.wire import ReceivedFile, entries_of

BERT = ModelName("team", "bert")


def begin(world: World, model: str = "team/bert", token: str = "writer", **said: object) -> str:
    answer = world.call("POST", f"models/{model}/uploads", token=token, json=said)
    assert answer.status_code == 201, answer.text
    return f"uploads/{answer.json()['id']}"


def test_files_become_a_version_that_is_visible_only_when_whole(any_world: World) -> None:
    world = any_world
    weights = save({"layer": np.arange(100_000, dtype=np.float32), "bias": np.ones(3, np.float32)})
    config = json.dumps({"layers": 1}).encode()
    upload = begin(world, alias="prod", message="first", metrics={"loss": 0.5})
    for path, data in (("model.safetensors", weights), ("config.json", config)):
        sent = world.call("PUT", f"{upload}/files/{path}", token="writer", content=data)
        assert (sent.status_code, sent.json()["bytes"]) == (200, len(data)), sent.text
    assert world.call("GET", "models/team/bert").status_code == 404
    done = world.call("POST", f"{upload}/commit", token="writer")
    version = done.json()
    assert done.status_code == 201
    assert done.headers["location"] == "/api/v1/models/team/bert/versions/1"
    assert (version["author"], version["message"]) == ("writer", "first")
    assert (version["aliases"], version["tensors"], version["files"]) == (["prod"], 2, 2)
    assert version["structure"]["config"] == {"layers": 1}
    for path, data in (("model.safetensors", weights), ("config.json", config)):
        answer = world.call("GET", f"models/team/bert/versions/1/files/{path}", token="reader")
        assert answer.content == data


@pytest.mark.parametrize(
    "config",
    [
        b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": "\\u0000"}', b"[1]", b"{", b"[" * 9999,
        b'{"model_max_length": 1000000000000000019884624838656}', b'{"a": [%s]}' % (b"9" * 4000),
    ],
)  # fmt: skip
def test_a_config_that_no_database_keeps_is_a_file_like_any_other(
    any_world: World, config: bytes, tmp_path: Path
) -> None:
    world = any_world
    assert push_file(world, "team/bert", "config.json", config) == 1
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(config)
    with gather_files(tmp_path / "model", MIB) as gathered:
        assert gathered.config is None
    version = world.call("GET", "models/team/bert/versions/1").json()
    assert version["structure"].get("config") is None
    assert world.call("GET", "models/team/bert/versions/1/files/config.json").content == config


def test_a_commit_may_be_repeated_with_its_key(world: World) -> None:
    upload = begin(world)
    world.call("PUT", f"{upload}/files/a", token="writer", content=b"one")
    by = {"token": "writer", "headers": {"Idempotency-Key": "k1"}}
    first = world.call("POST", f"{upload}/commit", **by)
    again = world.call("POST", f"{upload}/commit", **by)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert world.call("GET", "models/team/bert").json()["versions"] == 1


def test_a_commit_asked_for_again_while_it_goes_on_gives_the_same_version(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a proxy does that waits for less long than a large version takes."""
    upload = begin(world)
    world.call("PUT", f"{upload}/files/a", token="writer", content=b"one")
    shown = {"Authorization": f"Bearer {world.secrets['writer']}", "Idempotency-Key": "k1"}
    answers: list[httpx.Response] = []

    def commit() -> None:
        target = f"{url}/api/v1/{upload}/commit"
        answers.append(httpx.post(target, headers=shown, timeout=LIMIT_S))

    def assemble(received: Any) -> Any:
        monkeypatch.undo()
        commit()  # all of the other, while the first has only begun
        return uploads.assemble(received)

    monkeypatch.setattr(uploads, "assemble", assemble)
    commit()
    assert [answer.status_code for answer in answers] == [201, 201], answers[-1].text
    assert answers[0].json() == answers[1].json()
    assert world.call("GET", "models/team/bert").json()["versions"] == 1


def test_an_admin_of_the_project_finishes_what_a_writer_began(any_world: World) -> None:
    """A commit takes the blocks its upload wrote, whoever of those who may does it."""
    upload, contents = begin(any_world), {"a": os.urandom(70_000), "b": os.urandom(70_000)}
    for token, (path, data) in zip(("writer", "lead"), contents.items(), strict=True):
        sent = any_world.call("PUT", f"{upload}/files/{path}", token=token, content=data)
        assert sent.status_code == 200, sent.text
    done = any_world.call("POST", f"{upload}/commit", token="lead")
    assert done.status_code == 201, done.text
    for path, data in contents.items():
        answer = any_world.call("GET", f"models/team/bert/versions/1/files/{path}", token="reader")
        assert answer.content == data


def test_a_key_of_one_upload_is_not_that_of_another(world: World) -> None:
    for expected in (201, 409):
        upload = begin(world)
        world.call("PUT", f"{upload}/files/a", token="writer", content=os.urandom(9))
        answer = world.call(
            "POST", f"{upload}/commit", token="writer", headers={"Idempotency-Key": "k"}
        )
        assert answer.status_code == expected
    assert answer.json()["code"] == "key-reused"
    assert "take a new one" in answer.json()["detail"]


def test_keys_of_other_callers_are_not_told(world: World) -> None:
    secret = begin(world, "other/gpt", "stranger")
    world.call("PUT", f"{secret}/files/a", token="stranger", content=b"one")
    key = {"Idempotency-Key": "k"}
    world.call("POST", f"{secret}/commit", token="stranger", headers=key)
    mine = begin(world)
    world.call("PUT", f"{mine}/files/a", token="writer", content=b"two")
    assert world.call("POST", f"{mine}/commit", token="writer", headers=key).status_code == 201


def test_an_upload_without_files_cannot_commit(world: World) -> None:
    answer = world.call("POST", f"{begin(world)}/commit", token="writer")
    assert (answer.status_code, answer.json()["code"]) == (400, "refused")


def test_a_file_sent_again_replaces_the_one_before(world: World) -> None:
    upload = begin(world)
    for data in (b"one", b"two"):
        world.call("PUT", f"{upload}/files/a", token="writer", content=data)
    world.call("POST", f"{upload}/commit", token="writer")
    assert world.call("GET", "models/team/bert/versions/1/files/a").content == b"two"


@pytest.mark.parametrize("header", [{"Content-Range": "bytes 3-5/6"}, {"Content-Encoding": "gzip"}])
def test_a_part_of_a_file_or_what_has_to_be_unpacked_first_is_not_taken_for_the_file(
    world: World, header: dict[str, str]
) -> None:
    upload = begin(world)
    world.call("PUT", f"{upload}/files/a", token="writer", content=b"whole!")
    answer = world.call("PUT", f"{upload}/files/a", token="writer", content=b"le!", headers=header)
    assert answer.status_code == 400, answer.text
    assert next(iter(header)) in answer.json()["detail"]
    world.call("POST", f"{upload}/commit", token="writer")
    assert world.call("GET", "models/team/bert/versions/1/files/a").content == b"whole!"


def test_an_upload_that_was_published_is_not_said_to_need_another_push(world: World) -> None:
    upload = begin(world)
    world.call("PUT", f"{upload}/files/a", token="writer", content=b"x")
    world.call("POST", f"{upload}/commit", token="writer", headers={"Idempotency-Key": "k"})
    again = world.call("POST", f"{upload}/commit", token="writer").json()
    assert (again["status"], again["code"]) == (410, "upload-expired")
    assert again["detail"].endswith("is over: its version was published")


def test_an_upload_that_was_given_up_is_gone(world: World) -> None:
    upload = begin(world)
    for _ in range(2):
        assert world.call("DELETE", upload, token="writer").status_code == 204
    answer = world.call("PUT", f"{upload}/files/a", token="writer", content=b"x")
    assert (answer.status_code, answer.json()["code"]) == (410, "upload-expired")
    unknown = world.call("POST", f"uploads/{UploadId.new()}/heartbeat", token="writer")
    assert (unknown.status_code, unknown.json()["code"]) == (410, "upload-expired")


def test_what_the_store_has_is_not_stored_again(world: World) -> None:
    data = os.urandom(MIB)
    push_file(world, "team/bert", "a", data)
    packs = list(world.store.list(layout.PACKS))
    upload = begin(world)
    sent = world.call("PUT", f"{upload}/files/b", token="writer", content=data).json()
    assert (sent["new_bytes"], sent["stored_bytes"]) == (0, 0)
    assert list(world.store.list(layout.PACKS)) == packs


def test_a_file_longer_than_the_temporary_space_is_refused_whatever_it_announced(
    tmp_path: Path,
) -> None:
    with make_world(tmp_path, spool_bytes=MIB) as world:
        upload = begin(world)

        async def pieces(total: int):  # type: ignore[no-untyped-def]
            for _ in range(total // 65536):
                yield bytes(65536)

        path = f"{upload}/files/a"
        announced = world.call("PUT", path, token="writer", content=bytes(MIB + 1))
        streamed = world.call("PUT", path, token="writer", content=pieces(4 * MIB))
        for answer in (announced, streamed):
            assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
        assert world.service.spool.used_bytes == 0
        assert list((tmp_path / "spool").iterdir()) == []
        fits = world.call("PUT", path, token="writer", content=pieces(MIB))
        assert fits.status_code == 200


def test_a_file_being_received_has_no_name_that_a_killed_service_would_leave(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path / "spool", MIB)
    with spool.open(None) as file:
        file.write(b"half of it")
        assert list((tmp_path / "spool").iterdir()) == []
        assert file.finish().read_bytes() == b"half of it"
    assert spool.used_bytes == 0


def test_temporary_space_in_use_asks_to_come_back(world: World) -> None:
    upload = begin(world)
    world.service.spool.take(64 * MIB, 0)
    answer = world.call("PUT", f"{upload}/files/a", token="writer", content=b"x")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_a_claim_answers_only_for_blocks_the_token_may_read(any_world: World) -> None:
    world = any_world
    theirs, ours = b"secret" * 20_000, b"ours" * 20_000
    push(world.registry, world.store, "other/gpt", theirs)
    push(world.registry, world.store, "team/bert", ours)
    ids = [block_id(theirs).hex, block_id(ours).hex]
    answer = world.call("POST", f"{begin(world)}/claims", token="writer", json={"blocks": ids})
    assert [len(pack["entries"]) for pack in answer.json()["packs"]] == [1]
    boss = begin(world, token="boss")
    both = world.call("POST", f"{boss}/claims", json={"blocks": ids}).json()
    assert sum(len(pack["entries"]) for pack in both["packs"]) == 2


def test_a_commit_cannot_name_blocks_that_only_lie_beside_those_it_holds(
    any_world: World,
) -> None:
    """One pack has a block of both projects; holding it for the one gives no right to the other."""
    world = any_world
    shared, secret = b"shared" * 20_000, b"secret" * 20_000
    push(world.registry, world.store, "other/gpt", shared, secret)
    push(world.registry, world.store, "team/bert", shared)
    assert len(list(world.store.list(layout.PACKS))) == 1
    registry = world.registry
    opened = registry.open_upload(ModelName("team", "thief"), Publication(), who="writer")
    reading = Reading(("team",), "writer")
    upload = registry.resume_upload(opened.id, Publication(), reading=reading)
    assert list(upload.claim([block_id(shared), block_id(secret)])) == [block_id(shared)]
    split = split_state([StateTensor("t", DType.U8, (len(secret),))], MIB)
    manifest = manifest_of([split], [[block_id(secret)]])
    with pytest.raises(BlockMissing):
        publish(world.store, upload, manifest, Publication(), "k")


def test_a_push_that_was_interrupted_finds_what_it_wrote(any_world: World) -> None:
    world = any_world
    data = os.urandom(MIB)
    first = begin(world)
    world.call("PUT", f"{first}/files/a", token="writer", content=data)
    world.call("DELETE", first, token="writer")
    second = begin(world)
    sent = world.call("PUT", f"{second}/files/a", token="writer", content=data).json()
    assert sent["new_bytes"] == 0
    other = begin(world, "other/gpt", "stranger")
    sent = world.call("PUT", f"{other}/files/a", token="stranger", content=data).json()
    assert sent["new_bytes"] == MIB, "to another token it is as if it were not there"


class TestPacks:
    """What a client that reaches the store says of the packs it wrote."""

    @pytest.fixture
    def written(self, world: World) -> tuple[str, PackId, int, list[str]]:
        upload = begin(world)
        told: list[tuple[PackId, int, list[str]]] = []

        class Telling:
            id = UploadId(upload.rpartition("/")[2])

            def claim(self, blocks: list[BlockId]) -> dict[BlockId, list[object]]:
                return {}

            def begin_pack(self, pack: PackId) -> None:
                body = {"begin": [pack.hex]}
                answer = world.call("POST", f"{upload}/packs", token="writer", json=body)
                assert answer.status_code == 204, answer.text

            def add_pack(self, pack: PackId, size: int, placements: list[object]) -> None:
                told.append((pack, size, entries_of(placements)))  # type: ignore[arg-type]

        split = split_state([StateTensor("t", DType.U8, (MIB,))], MIB)
        source = MemorySource(os.urandom(MIB))
        Writer(world.store, Telling()).write([Content(split, [source])])  # type: ignore[arg-type]
        ((pack, size, entries),) = told
        return upload, pack, size, entries

    def add(self, world: World, upload: str, **added: object) -> tuple[int, str | None]:
        answer = world.call("POST", f"{upload}/packs", token="writer", json={"add": [added]})
        code = answer.json()["code"] if answer.content else None
        return answer.status_code, code

    def test_a_pack_as_it_lies_in_the_store_is_taken(
        self, world: World, written: tuple[str, PackId, int, list[str]]
    ) -> None:
        upload, pack, size, entries = written
        for _ in range(2):  # a lost answer
            assert self.add(world, upload, pack=pack.hex, bytes=size, entries=entries)[0] == 204

    def test_another_length_or_content_than_the_stores_is_refused(
        self, world: World, written: tuple[str, PackId, int, list[str]]
    ) -> None:
        upload, pack, size, entries = written
        said = {"pack": pack.hex, "bytes": size, "entries": entries}
        assert self.add(world, upload, **said | {"bytes": size + 1}) == (422, "pack-invalid")
        assert self.add(world, upload, **said | {"entries": []}) == (422, "pack-invalid")
        assert self.add(world, upload, **said | {"entries": ["!"]}) == (400, "refused")
        assert self.add(world, upload, **said | {"entries": ["AAAA"]}) == (422, "pack-invalid")

    def test_a_pack_that_is_not_there_or_not_begun_is_refused(
        self, world: World, written: tuple[str, PackId, int, list[str]]
    ) -> None:
        _, pack, size, entries = written
        other = begin(world)
        absent = PackId.new().hex
        assert self.add(world, other, pack=absent, bytes=9, entries=[]) == (422, "file-missing")
        said = {"pack": pack.hex, "bytes": size, "entries": entries}
        assert self.add(world, other, **said) == (410, "upload-expired")

    def test_a_manifest_that_is_not_in_the_store_is_refused(self, world: World) -> None:
        upload = begin(world)
        answer = world.call("POST", f"{upload}/commit", token="writer", json={"digest": "00" * 32})
        assert (answer.status_code, answer.json()["code"]) == (422, "file-missing")

    def test_a_manifest_with_blocks_the_upload_does_not_hold_is_refused(self, world: World) -> None:
        version = push(world.registry, world.store, "other/gpt", b"secret" * 1000)
        upload = begin(world)
        body = {"digest": version.digest, "stored_bytes": 100}
        world.call("POST", f"{upload}/manifest", token="writer", json=body)
        answer = world.call(
            "POST", f"{upload}/commit", token="writer", json={"digest": version.digest}
        )
        assert (answer.status_code, answer.json()["code"]) == (422, "block-missing")


def test_a_parent_must_be_one_the_caller_may_read(world: World) -> None:
    push(world.registry, world.store, "other/gpt", b"secret")
    answer = world.call(
        "POST", "models/team/bert/uploads", token="writer", json={"parent": "other/gpt@v1"}
    )
    assert answer.status_code == 403


class TestQuotas:
    def test_versions_over_the_quota_are_refused_and_leave_nothing(self, any_world: World) -> None:
        world = any_world
        push_file(world, "team/bert", "a", b"one")
        world.call("PUT", "quotas/team", json={"versions": 2})
        late = begin(world)
        push_file(world, "team/gpt", "a", b"two")
        world.call("PUT", f"{late}/files/a", token="writer", content=b"three")
        answer = world.call("POST", f"{late}/commit", token="writer")
        assert (answer.status_code, answer.json()["code"]) == (403, "quota-exceeded")
        early = world.call("POST", "models/team/bert/uploads", token="writer")
        assert early.json()["code"] == "quota-exceeded", "told before anything is sent"
        assert world.call("GET", "quotas/team").json()["used_versions"] == 2
        world.call("PUT", "quotas/team", json={})
        assert world.call("POST", f"{late}/commit", token="writer").status_code == 201

    def test_bytes_over_the_quota_are_refused(self, any_world: World) -> None:
        world = any_world
        world.call("PUT", "quotas/team", json={"stored_bytes": 100_000})
        push_file(world, "team/bert", "a", os.urandom(60_000))
        upload = begin(world)
        world.call("PUT", f"{upload}/files/a", token="writer", content=os.urandom(60_000))
        answer = world.call("POST", f"{upload}/commit", token="writer")
        assert answer.json()["code"] == "quota-exceeded"
        assert "120" in answer.json()["detail"]
        assert world.call("GET", "models/team/bert").json()["versions"] == 1

    def test_other_projects_are_not_counted(self, world: World) -> None:
        world.call("PUT", "quotas/team", json={"versions": 0})
        push_file(world, "other/gpt", "a", b"x")


@pytest.mark.parametrize("policy", ["A" * 65, "A/B", ""])
def test_a_policy_that_is_no_name_is_refused(any_world: World, policy: str) -> None:
    answer = any_world.call("POST", "models/team/bert/uploads", json={"policy": policy})
    assert (answer.status_code, answer.json()["code"]) == (422, "refused")


def test_commits_and_downloads_do_not_wait_for_files_being_received(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_file(world, "team/bert", "w.bin", b"weights")
    opened = world.registry.open_upload(BERT, Publication(), who="boss")
    assert world.call("PUT", f"uploads/{opened.id}/files/w", content=b"2").status_code == 200
    storing, may_end = threading.Semaphore(0), threading.Event()

    def store_slowly(*received: Any) -> ReceivedFile:
        storing.release()
        assert may_end.wait(LIMIT_S)
        return ReceivedFile(path="w", bytes=1, new_bytes=1, stored_bytes=1)

    monkeypatch.setattr(uploads, "store_file", store_slowly)
    shown = {"Authorization": f"Bearer {world.secrets['boss']}"}

    def call(method: str, path: str, content: bytes | None = None) -> int:
        target = f"{url}/api/v1/{path}"
        return httpx.request(
            method, target, content=content, headers=shown, timeout=LIMIT_S
        ).status_code

    def send(_: int) -> int:
        upload = world.registry.open_upload(BERT, Publication(), who="boss")
        return call("PUT", f"uploads/{upload.id}/files/w", b"3")

    with ThreadPoolExecutor(8) as threads:
        sent = [threads.submit(send, number) for number in range(8)]
        assert storing.acquire(timeout=LIMIT_S)
        try:
            assert call("POST", f"uploads/{opened.id}/commit") == 201
            assert call("GET", "models/team/bert/versions/1/files/w.bin") == 200
        finally:
            may_end.set()
        assert {one.result() for one in sent} == {200}
