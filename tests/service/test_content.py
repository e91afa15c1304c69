"""A version's content over REST."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from contextlib import ExitStack

import httpx
import msgspec
import pytest
from blake3 import blake3
from service_world import LIMIT_S, World, push, push_file
from sqlalchemy import update
from waiting import eventually

from weightyard.errors import NotAllowed, RegistryUnavailable, StoreFull, YardError
from weightyard.format.block import MIB, block_id
from weightyard.names import Digest, PackId
from weightyard.registry import schema
from weightyard.registry.schema import Dedup
from weightyard.service import manifests, sending
from weightyard.service.ranges import Span, wanted_span
from weightyard.storage import layout
from weightyard.testing.faults import FaultyStore
from weightyard.wire import Placed, placements_by_block

FILE = "models/team/bert/versions/1/files/w.bin"


@pytest.fixture
def data(world: World) -> bytes:
    content = os.urandom(3 * MIB + 12345)
    assert push_file(world, "team/bert", "w.bin", content) == 1
    return content


def test_a_file_comes_back_bit_for_bit(world: World, data: bytes) -> None:
    answer = world.call("GET", FILE, token="reader")
    assert answer.content == data
    assert answer.headers["content-length"] == str(len(data))
    assert answer.headers["content-disposition"] == "attachment", "it may be anyone's HTML"


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [("0-0", 0, 1), ("5-9", 5, 10), ("3145728-", 3 * MIB, None), ("-10", -10, None),
     (f"{MIB - 3}-{2 * MIB + 3}", MIB - 3, 2 * MIB + 4), ("100-99999999999", 100, None)],
)  # fmt: skip
def test_a_range_is_exactly_what_was_asked_for(
    world: World, data: bytes, asked: str, start: int, end: int | None
) -> None:
    answer = world.call("GET", FILE, headers={"Range": f"bytes={asked}"})
    assert (answer.status_code, answer.content) == (206, data[start:end])
    first = start % len(data)
    assert answer.headers["content-range"] == (
        f"bytes {first}-{first + len(answer.content) - 1}/{len(data)}"
    )


def test_a_range_the_file_does_not_have_is_refused_with_its_length(
    world: World, data: bytes
) -> None:
    answer = world.call("GET", FILE, headers={"Range": f"bytes={len(data)}-"})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(data)}"


def test_one_range_a_request(world: World, data: bytes) -> None:
    many = "bytes=" + ",".join(f"{i}-{i}" for i in range(1000))
    assert world.call("GET", FILE, headers={"Range": many}).status_code == 416


@pytest.mark.parametrize("header", [None, "bytes=-", "bytes=9-5", "lines=1-2", "bytes=a-b", "x"])
def test_a_range_that_is_not_well_formed_does_not_count(header: str | None) -> None:
    assert wanted_span(header, 100) is None


def test_a_range_of_the_last_bytes_is_never_longer_than_the_file() -> None:
    assert wanted_span("bytes=-500", 100) == Span(0, 100)


def test_what_the_client_has_is_not_sent_again(world: World, data: bytes) -> None:
    tag = world.call("GET", FILE).headers["etag"]
    again = world.call("GET", FILE, headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    other = world.call("GET", FILE, headers={"Range": "bytes=0-9", "If-Range": '"another"'})
    assert (other.status_code, other.content) == (200, data)


def test_a_file_can_be_looked_at_without_being_sent(world: World, data: bytes) -> None:
    sent, seen = world.call("GET", FILE), world.call("HEAD", FILE, token="reader")
    assert (seen.status_code, seen.content) == (200, b"")
    for name in ("content-length", "etag", "accept-ranges", "content-type", "cache-control"):
        assert seen.headers[name] == sent.headers[name]
    tag = {"If-None-Match": seen.headers["etag"]}
    assert world.call("HEAD", FILE, headers=tag).status_code == 304
    ranged = world.call("HEAD", FILE, headers={"Range": "bytes=0-9"})
    assert (ranged.status_code, ranged.headers["content-length"]) == (200, str(len(data)))
    assert world.call("HEAD", FILE + "x").status_code == 404


def test_looking_at_a_file_reads_none_of_it_and_is_no_use(world: World, url: str) -> None:
    push_file(world, "team/bert", "w.bin", os.urandom(1000))
    for pack in list(world.store.list(layout.PACKS)):
        world.store.delete(pack.path)
    headers = {"Authorization": f"Bearer {world.secrets['reader']}"}
    seen = httpx.head(f"{url}/api/v1/{FILE}", headers=headers, timeout=LIMIT_S)
    assert (seen.status_code, seen.headers["content-length"]) == (200, "1000")
    assert world.call("GET", "models/team/bert/versions/1").json()["last_used"] is None


def test_an_empty_file_is_a_file(world: World) -> None:
    push_file(world, "team/bert", "empty", b"")
    answer = world.call("GET", "models/team/bert/versions/1/files/empty")
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_file_the_version_does_not_have_is_not_found(world: World, data: bytes) -> None:
    answer = world.call("GET", "models/team/bert/versions/1/files/other")
    assert (answer.status_code, answer.json()["code"]) == (404, "no-such-thing")


def test_a_large_file_passes_through_little_memory(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "WINDOW_BYTES", MIB)
    data = os.urandom(MIB) * 40
    push_file(world, "team/bert", "w.bin", data)
    headers = {"Authorization": f"Bearer {world.secrets['reader']}"}
    digest = blake3()
    tracemalloc.start()
    with httpx.stream("GET", f"{url}/api/v1/{FILE}", headers=headers, timeout=LIMIT_S) as answer:
        for piece in answer.iter_bytes(65536):
            digest.update(piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert digest.digest() == blake3(data).digest()
    assert peak < 20 * MIB


def test_more_files_at_once_than_there_is_room_for_are_asked_to_wait(
    world: World, data: bytes
) -> None:
    with ExitStack() as taken:
        for _ in range(32):
            taken.enter_context(world.service.turnstile.passed("reader"))
        busy = world.call("GET", FILE, token="reader")
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        assert world.call("GET", FILE, token="writer").content == data, "others are served"
    assert world.call("GET", FILE, token="reader").content == data


def test_a_file_is_not_read_on_for_a_client_that_is_gone(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "WINDOW_BYTES", MIB)
    push_file(world, "team/bert", "w.bin", os.urandom(MIB) * 64)
    read = sending.FileBody._read
    inside = world.service.turnstile._inside
    starts: list[int] = []
    gone = threading.Event()

    def slow(self: sending.FileBody, window: Span) -> memoryview:
        starts.append(window.start)
        if window.start >= 2 * MIB:
            assert gone.wait(LIMIT_S)
            time.sleep(0.05)  # so that there is time to see it
        return read(self, window)

    monkeypatch.setattr(sending.FileBody, "_read", slow)
    headers = {"Authorization": f"Bearer {world.secrets['reader']}"}
    with httpx.stream("GET", f"{url}/api/v1/{FILE}", headers=headers, timeout=LIMIT_S) as answer:
        next(answer.iter_raw())
        eventually(lambda: 2 * MIB in starts)
        assert inside["reader"] == 1
    gone.set()
    eventually(lambda: not inside)
    assert len(starts) < 32


def test_damaged_bytes_are_a_problem_and_never_an_answer(world: World, data: bytes) -> None:
    (pack,) = world.store.list(layout.PACKS)
    file = world.store.folder / pack.path.text  # type: ignore[attr-defined]
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    answer = world.call("GET", FILE)
    assert (answer.status_code, answer.json()["code"]) == (500, "block-corrupt")


def test_bytes_damaged_further_on_break_the_answer_off(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "WINDOW_BYTES", MIB)
    push_file(world, "team/bert", "w.bin", os.urandom(8 * MIB))
    (pack,) = world.store.list(layout.PACKS)
    file = world.store.folder / pack.path.text  # type: ignore[attr-defined]
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[6 * MIB] ^= 1
    file.write_bytes(content)
    headers = {"Authorization": f"Bearer {world.secrets['reader']}"}
    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
        httpx.get(f"{url}/api/v1/{FILE}", headers=headers, timeout=LIMIT_S)


def test_the_manifest_is_the_one_the_digest_names(world: World, data: bytes) -> None:
    version = world.call("GET", "models/team/bert/versions/1").json()
    answer = world.call("GET", "models/team/bert/versions/1/manifest")
    assert blake3(answer.content).hexdigest() == version["digest"]
    assert answer.headers["etag"] == f'"{version["digest"]}"'


def test_manifests_are_kept_as_long_as_they_are_few_entries_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_MOST_ENTRIES", 10)
    digests = [
        Digest(push(world.registry, world.store, "team/bert", *parts).digest)
        for parts in ([b"one"], [b"two"], [b"1", b"2", b"3", b"4"], [b"%d" % i for i in range(9)])
    ]
    store = FaultyStore(world.store)
    kept = manifests.Manifests(store)

    def is_read(number: int) -> bool:
        before = store.calls.count("read")
        kept.get(digests[number])
        return store.calls.count("read") > before

    assert [is_read(number) for number in (0, 1, 0, 2, 0, 1)] == [
        True, True, False, True, False, True,
    ]  # fmt: skip
    assert [is_read(number) for number in (3, 3, 0)] == [True, True, False], "too many for itself"


def test_placements_say_where_every_block_lies_page_by_page(world: World) -> None:
    push(world.registry, world.store, "team/bert", *(os.urandom(70_000) for _ in range(5)))
    path = "models/team/bert/versions/1/placements"
    found: dict[object, object] = {}
    after: str | None = None
    for _ in range(3):
        params = {"limit": 2} | ({"after": after} if after else {})
        answer = Placed.model_validate_json(world.call("GET", path, params=params).content)
        found |= placements_by_block(answer)
        after = answer.next
    assert after is None
    manifest = msgspec.json.decode(
        world.call("GET", "models/team/bert/versions/1/manifest").content
    )
    assert {block.hex for block in found} == {hex for hex, _ in manifest["blocks"]}  # type: ignore[attr-defined]


def test_blocks_of_other_projects_are_not_placed(world: World) -> None:
    push(world.registry, world.store, "other/gpt", b"secret" * 20_000)
    push(world.registry, world.store, "team/bert", b"ours" * 20_000)
    manifests = [
        msgspec.json.decode(world.call("GET", f"models/{name}/versions/1/manifest").content)
        for name in ("other/gpt", "team/bert")
    ]
    (theirs,), (ours,) = ([hex for hex, _ in one["blocks"]] for one in manifests)
    body = {"blocks": [theirs, ours, "00" * 32]}
    answer = Placed.model_validate_json(
        world.call("POST", "placements", token="reader", json=body).content
    )
    assert {block.hex for block in placements_by_block(answer)} == {ours}
    everything = Placed.model_validate_json(world.call("POST", "placements", json=body).content)
    assert {block.hex for block in placements_by_block(everything)} == {theirs, ours}


def test_where_projects_share_nothing_a_version_tells_of_its_own_packs_only(
    any_world: World,
) -> None:
    apart = update(schema.registry).values(dedup=Dedup.PROJECT)
    any_world.registry.database.write(lambda tx: tx.execute(apart))
    for model in ("other/gpt", "team/bert"):
        push(any_world.registry, any_world.store, model, b"equal" * 20_000)
    version = "models/team/bert/versions/1"

    def told(token: str) -> tuple[int, int]:
        placed = any_world.call("GET", f"{version}/placements", token=token).json()["packs"]
        located = any_world.call("GET", f"{version}/replicas", token=token).json()["items"]
        return len(placed), len(located)

    assert told("reader") == (1, 1)
    assert told("boss") == (2, 2)


def test_nobody_asks_what_uploads_of_a_project_find_that_he_may_not_read(
    any_world: World,
) -> None:
    """Where projects share nothing it would tell that the project has the same content."""
    apart = update(schema.registry).values(dedup=Dedup.PROJECT)
    any_world.registry.database.write(lambda tx: tx.execute(apart))
    guessed = b"secret" * 20_000
    for model in ("team/bert", "other/guess"):
        push(any_world.registry, any_world.store, model, guessed)
    body = {"blocks": [block_id(guessed).hex]}

    def ask(token: str, project: str) -> tuple[int, int]:
        answer = any_world.call("POST", f"placements?for_project={project}", token=token, json=body)
        return answer.status_code, len(answer.json().get("packs", ()))

    assert ask("stranger", "other") == (200, 1)
    assert ask("stranger", "team") == (403, 0)
    assert ask("reader", "team") == (200, 1)
    assert ask("boss", "other") == (200, 1)


def test_replicas_name_the_datanodes(world: World, data: bytes) -> None:
    (found,) = world.call("GET", "models/team/bert/versions/1/replicas").json()["items"]
    assert PackId(found["pack"])
    assert found["replicas"][0]["datanode"] == "localhost"


def test_packs_that_gc_rewrites_between_two_pages_of_replicas_shift_no_page(world: World) -> None:
    contents = [bytes([number]) * 300_000 for number in range(6)]
    for content in contents:  # a pack for each
        push(world.registry, world.store, "team/bert", content)
    push(world.registry, world.store, "team/bert", *contents)
    path = "models/team/bert/versions/7/replicas?limit=2"
    before = [pack["pack"] for pack in world.call("GET", f"{path}00").json()["items"]]
    assert before == sorted(before)
    first = world.call("GET", path).json()
    gone = update(schema.packs).where(schema.packs.c.name == before[0])
    world.registry.database.write(lambda tx: tx.execute(gone.values(state="deleting")))
    second = world.call("GET", path, params={"limit": 2, "after": first["next"]}).json()
    assert [pack["pack"] for pack in first["items"] + second["items"]] == before[:4]
    last = world.call("GET", path, params={"limit": 2, "after": second["next"]}).json()
    assert ([pack["pack"] for pack in last["items"]], last["next"]) == (before[4:], None)


def test_reading_a_file_is_a_use_of_the_version(world: World, data: bytes) -> None:
    version = "models/team/bert/versions/1"
    assert world.call("GET", version).json()["last_used"] is None
    world.call("GET", FILE)
    assert world.call("GET", version).json()["last_used"] is not None


@pytest.mark.parametrize("why", [RegistryUnavailable, NotAllowed, StoreFull])
def test_a_use_that_cannot_be_noted_keeps_nobody_from_reading(
    world: World, data: bytes, monkeypatch: pytest.MonkeyPatch, why: type[YardError]
) -> None:
    def fail(*values: object) -> None:
        raise why("database: it is read-only for now")

    monkeypatch.setattr(world.registry, "note_token_use", fail)
    monkeypatch.setattr(world.registry, "mark_used", fail)
    assert world.call("GET", FILE, token="reader").content == data
