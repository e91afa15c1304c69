"""Packs and manifests through the service: hostile until every byte was held against its name."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pushing import made_pack
from service_world import World, push

from weightyard.codec import encode
from weightyard.format import manifest as manifests
from weightyard.format.assembly import manifest_of
from weightyard.format.block import MIB, block_id
from weightyard.format.dtypes import DType
from weightyard.format.pack import PackBuilder
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import PackId
from weightyard.service import limits
from weightyard.storage import layout
from weightyard.wire import entries_of

KIB = 1024
DATA = random.Random(7).randbytes(66 * KIB)


@pytest.fixture
def upload(world: World) -> str:
    return begin(world)


def begin(world: World, model: str = "team/bert", token: str = "writer") -> str:
    answer = world.call("POST", f"models/{model}/uploads", token=token)
    return f"uploads/{answer.json()['id']}"


def said(answer) -> tuple[int, str | None]:  # type: ignore[no-untyped-def]
    return answer.status_code, answer.json()["code"] if answer.content else None


def begin_pack(world: World, upload: str, pack: PackId) -> None:
    body = {"begin": [pack.hex]}
    assert world.call("POST", f"{upload}/packs", token="writer", json=body).status_code == 204


def put(world: World, upload: str, pack: PackId, content: bytes) -> tuple[int, str | None]:
    path = f"{upload}/packs/{pack}"
    return said(world.call("PUT", path, token="writer", content=content))


def add(world: World, upload: str, pack: PackBuilder) -> tuple[int, str | None]:
    entries = entries_of(pack.placements)
    body = {"add": [{"pack": pack.pack.hex, "bytes": pack.pack_bytes, "entries": entries}]}
    return said(world.call("POST", f"{upload}/packs", token="writer", json=body))


def files(world: World) -> list[str]:
    folders = (layout.PACKS, layout.MANIFESTS, layout.STAGING)
    return [file.path.text for folder in folders for file in world.store.list(folder)]


def test_a_pack_and_a_manifest_become_a_version_whatever_is_sent_twice(any_world: World) -> None:
    world = any_world
    upload = begin(world)
    pack, content = made_pack((DATA, None))
    begin_pack(world, upload, pack.pack)
    split = split_state([StateTensor("t", DType.U8, (len(DATA),))], MIB)
    digest, stored = manifests.encode(manifest_of([split], [[block_id(DATA)]]))
    for _ in range(2):
        assert put(world, upload, pack.pack, content) == (204, None)
    for _ in range(2):
        assert add(world, upload, pack) == (204, None)
    assert put(world, upload, pack.pack, content) == (204, None), "its answer was lost long ago"
    for _ in range(2):
        path = f"{upload}/manifests/{digest}"
        assert world.call("PUT", path, token="writer", content=stored).status_code == 204
    body = {"digest": digest.hex}
    done = world.call("POST", f"{upload}/commit", token="writer", json=body)
    assert (done.status_code, done.json()["digest"]) == (201, digest.hex)
    assert world.registry.check(world.store, read_data=True).is_clean
    got = world.call("GET", f"models/team/bert/versions/1/blocks/{block_id(DATA)}", token="reader")
    assert got.content == DATA


def spoiled() -> Iterator[tuple[str, PackId, bytes, str]]:
    """Packs that are none, or not what they say."""
    pack, content = made_pack((DATA, None), (bytes(200 * KIB), None))
    yield "empty", pack.pack, b"", "pack-invalid"
    yield "noise", pack.pack, os.urandom(100_000), "pack-invalid"
    yield "cut short", pack.pack, content[:-1], "pack-invalid"
    yield "without its head", pack.pack, content[1:], "pack-invalid"
    yield "another's name", PackId.new(), content, "pack-invalid"
    for name, at in (("header", 3), ("footer", -100), ("trailer", -20)):
        changed = bytearray(content)
        changed[at] ^= 1
        yield f"a bit of the {name}", pack.pack, bytes(changed), "pack-invalid"
    changed = bytearray(content)
    changed[5000] ^= 1
    yield "a bit of a block", pack.pack, bytes(changed), "block-corrupt"
    yield "a lie", *lying_pack(), "block-corrupt"


def lying_pack() -> tuple[PackId, bytes]:
    """Well made in all but this: its block has the name of other bytes."""
    other = block_id(b"what everyone would get from then on")
    pack, _ = made_pack((DATA, None))
    (placement,) = pack.placements
    encoded = encode(DATA, block=other)  # checksums are seeded by the name, so these fit it
    liar = PackBuilder(pack.pack)
    liar.add(replace(encoded.encoding, block=other))
    content = made_pack()[1][:16] + bytes(encoded.stored) + liar.finish()
    assert len(content) == liar.pack_bytes
    assert placement.encoding.block != other
    return pack.pack, content


@pytest.mark.parametrize("case", list(spoiled()), ids=lambda case: case[0])
def test_a_pack_that_is_not_what_it_says_is_refused_and_leaves_nothing(
    world: World, upload: str, case: tuple[str, PackId, bytes, str]
) -> None:
    _, pack, content, code = case
    begin_pack(world, upload, pack)
    assert put(world, upload, pack, content) == (422, code)
    assert files(world) == []
    assert world.service.spool.used_bytes == 0


def test_a_pack_that_was_not_begun_is_refused(world: World, upload: str) -> None:
    pack, content = made_pack((DATA, None))
    assert put(world, upload, pack.pack, content) == (410, "upload-expired")
    begin_pack(world, begin(world), pack.pack)
    assert put(world, upload, pack.pack, content) == (410, "upload-expired"), "it is another's"
    assert put(world, upload, "..%2f..%2fyard.json", content)[0] in (400, 404)  # type: ignore[arg-type]
    assert files(world) == []


def test_a_pack_of_the_same_name_never_replaces_what_is_there(world: World, upload: str) -> None:
    pack, content = made_pack((DATA, None))
    other, _ = made_pack((DATA[::-1], None))
    begin_pack(world, upload, pack.pack)
    assert put(world, upload, pack.pack, content) == (204, None)
    renamed = PackBuilder(pack.pack)
    for placement in other.placements:
        renamed.add(placement.encoding)
    another = content[:16] + DATA[::-1] + renamed.finish()
    assert put(world, upload, pack.pack, another) == (422, "pack-invalid")
    assert add(world, upload, pack) == (204, None)
    assert world.registry.check(world.store, read_data=True).is_clean


def test_a_base_must_be_a_block_the_caller_may_read(any_world: World) -> None:
    world = any_world
    base = DATA
    delta = bytes(1000) + base[1000:]
    push(world.registry, world.store, "other/gpt", base)
    before = files(world)
    upload = begin(world)
    pack, content = made_pack((delta, base))
    begin_pack(world, upload, pack.pack)
    assert put(world, upload, pack.pack, content) == (422, "block-missing")
    assert files(world) == before
    push(world.registry, world.store, "team/ours", base)
    assert put(world, upload, pack.pack, content) == (204, None)


def test_a_delta_whose_base_has_another_length_is_refused(world: World, upload: str) -> None:
    base, delta = DATA[:-64], bytes(1000) + DATA[1000:]
    push(world.registry, world.store, "team/ours", base)
    whole, _ = made_pack((delta, DATA))
    (placement,) = whole.placements
    pack = PackBuilder(whole.pack)
    pack.add(replace(placement.encoding, base=block_id(base)))
    stored = bytes(placement.encoding.stored_bytes)
    begin_pack(world, upload, pack.pack)
    content = made_pack()[1][:16] + stored + pack.finish()
    assert put(world, upload, pack.pack, content) == (422, "block-missing")


def test_a_manifest_that_is_not_what_its_name_says_is_refused(world: World, upload: str) -> None:
    split = split_state([StateTensor("t", DType.U8, (9,))], MIB)
    digest, stored = manifests.encode(manifest_of([split], [[block_id(bytes(9))]]))
    other = f"{'00' * 32}"
    for name, content in ((digest.hex, stored[:-1]), (digest.hex, b""), (other, stored)):
        answer = world.call("PUT", f"{upload}/manifests/{name}", token="writer", content=content)
        assert said(answer) == (422, "manifest-invalid")
    assert files(world) == []


def test_bodies_longer_than_a_pack_or_manifest_may_be_are_refused(
    world: World, upload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [(pattern, limit and min(limit, MIB)) for pattern, limit in limits._LONGER_BODIES]
    monkeypatch.setattr(limits, "_LONGER_BODIES", short)
    pack = PackId.new()
    begin_pack(world, upload, pack)
    assert put(world, upload, pack, bytes(MIB + 1))[0] == 413
    path = f"{upload}/manifests/{'00' * 32}"
    assert world.call("PUT", path, token="writer", content=bytes(MIB + 1)).status_code == 413
    assert world.service.spool.used_bytes == 0


class TestBlocks:
    """What tensors in no file consist of."""

    def test_a_block_comes_whole_or_in_part_to_those_who_may_read_the_version(
        self, world: World
    ) -> None:
        push(world.registry, world.store, "team/bert", DATA)
        path = f"models/team/bert/versions/1/blocks/{block_id(DATA)}"
        whole = world.call("GET", path, token="reader")
        assert (whole.status_code, whole.content) == (200, DATA)
        part = world.call("GET", path, token="reader", headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, DATA[10:20])
        same = world.call("GET", path, headers={"If-None-Match": whole.headers["etag"]})
        assert same.status_code == 304
        assert world.call("GET", path, token="stranger").status_code == 403

    def test_a_block_of_another_version_is_not_given(self, world: World) -> None:
        push(world.registry, world.store, "team/bert", DATA)
        push(world.registry, world.store, "other/gpt", DATA[::-1])
        path = f"models/team/bert/versions/1/blocks/{block_id(DATA[::-1])}"
        assert said(world.call("GET", path)) == (404, "no-such-thing")
        assert world.call("GET", "models/team/bert/versions/1/blocks/..%2fx").status_code in (
            400,
            404,
        )
