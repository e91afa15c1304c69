"""Locations by the service: who is told what, and how often the store is asked for it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from service_world import API, LIMIT_S, World, make_world, push

from weightyard.errors import StoreUnavailable
from weightyard.format.block import KIB
from weightyard.service import locating
from weightyard.service.locating import Answer, Answers
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Location, StorePath
from weightyard.transfer import learned

BERT = "team/bert"
OF_V1 = f"models/{BERT}/versions/1/locations"


class AskedStore(LocalStore):
    """Counts how often it is asked where packs lie, and takes its time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        with self.lock:
            self.asked[path.text] += 1
        time.sleep(0.05)
        return super().locate(path, timeout_s=timeout_s)

    @property
    def asked_for_packs(self) -> int:
        return sum(times for path, times in self.asked.items() if path.startswith("packs/"))


@pytest.fixture
def store(tmp_path: Path) -> AskedStore:
    return AskedStore(tmp_path / "store")


@pytest.fixture
def world(tmp_path: Path, store: AskedStore) -> Iterator[World]:
    with make_world(tmp_path, store=store) as made:
        yield made


def packs_of(world: World, number: int, token: str = "reader") -> set[str]:
    placed = world.call("GET", f"models/{BERT}/versions/{number}/placements", token=token).json()
    return {layout.PACKS.text + f"/{pack['pack'][:2]}/{pack['pack']}" for pack in placed["packs"]}


def told(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    return {file["path"] for file in answer.json()["files"]}


def test_one_answer_tells_of_all_packs_of_a_version_and_of_no_other(world: World) -> None:
    shared = os.urandom(100 * KIB)
    push(world.registry, world.store, BERT, shared, os.urandom(90 * KIB))
    push(world.registry, world.store, BERT, shared, os.urandom(80 * KIB))
    push(world.registry, world.store, "other/secret", os.urandom(70 * KIB))
    first, second = (
        told(world.call("GET", f"models/{BERT}/versions/{number}/locations", token="reader"))
        for number in (1, 2)
    )
    assert (first, second) == (packs_of(world, 1), packs_of(world, 2))
    assert (len(first), len(second), len(first & second)) == (1, 2, 1)
    refused = world.call("GET", "models/other/secret/versions/1/locations", token="reader")
    assert refused.status_code == 403
    assert world.call("GET", "about/location", token="reader").json()["files"][0]["path"] == (
        layout.YARD.text
    )


def test_an_answer_is_compressed_and_nobody_may_keep_it(world: World) -> None:
    push(world.registry, world.store, BERT, os.urandom(100 * KIB))
    plain = world.call("GET", OF_V1, headers={"Accept-Encoding": "identity"})
    small = world.call("GET", OF_V1)
    assert small.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert small.json() == plain.json()
    for answer in (plain, small):
        assert answer.headers["cache-control"] == "no-store"
        assert "etag" not in answer.headers


def test_a_service_that_is_told_to_keeps_locations_to_itself(tmp_path: Path) -> None:
    with make_world(tmp_path, tell_locations=False) as world:
        push(world.registry, world.store, BERT, b"1")
        for path in (OF_V1, "about/location"):
            answer = world.call("GET", path)
            assert (answer.status_code, answer.json()["code"]) == (422, "unsupported")
    assert Settings().tell_locations


def test_a_pack_that_is_gone_is_left_out_and_the_others_are_told(world: World) -> None:
    push(world.registry, world.store, BERT, os.urandom(100 * KIB))
    push(world.registry, world.store, BERT, os.urandom(80 * KIB))
    gone = packs_of(world, 1).pop()
    world.store.delete(StorePath(gone))
    assert told(world.call("GET", OF_V1)) == set()
    assert told(world.call("GET", f"models/{BERT}/versions/2/locations")) == packs_of(world, 2)


def test_a_crowd_of_readers_asks_the_store_once_for_a_pack(
    world: World, store: AskedStore, url: str
) -> None:
    contents = [os.urandom(100 * KIB) for _ in range(4)]
    for until in range(1, 5):  # each version adds a pack to what it shares with those before
        push(world.registry, world.store, BERT, *contents[:until])
    store.asked.clear()

    def ask(number: int) -> int:
        token = world.secrets[("boss", "reader", "writer")[number % 3]]
        version = f"{url}{API}/models/{BERT}/versions/{4 if number < 15 else 3}/locations"
        with httpx.Client(trust_env=False, timeout=LIMIT_S) as client:
            answer = client.get(version, headers={"Authorization": f"Bearer {token}"})
        return len(told(answer))

    with ThreadPoolExecutor(20) as threads:
        counts = Counter(threads.map(ask, range(20)))
    assert counts == {4: 15, 3: 5}
    # Answers of other readers or versions that are made at the same moment may ask too.
    assert store.asked_for_packs <= 2 * 4 + 2 * 3
    asked = store.asked_for_packs
    for number in range(20):
        ask(number)
    assert store.asked_for_packs == asked


def test_stale_locations_are_asked_for_again_once_for_all_and_not_too_often(
    world: World, store: AskedStore, url: str
) -> None:
    push(world.registry, world.store, BERT, os.urandom(100 * KIB))
    shown = {"Authorization": f"Bearer {world.secrets['reader']}"}

    def ask(stale: str | None = None) -> str:
        params = {} if stale is None else {"stale": stale}
        answer = httpx.get(
            f"{url}{API}/{OF_V1}", params=params, headers=shown, trust_env=False, timeout=LIMIT_S
        )
        assert len(told(answer)) == 1
        return str(answer.json()["stamp"])

    began = time.monotonic()
    first = ask()
    assert ask() == first
    asked = store.asked_for_packs
    with ThreadPoolExecutor(8) as threads:
        (second,) = set(threads.map(ask, [first] * 8))
    assert second != first
    assert store.asked_for_packs == asked + 1
    assert ask(first) == second, "what is newer than what was stale is good"
    third = ask(second)
    assert third != second
    assert store.asked_for_packs == asked + 2
    assert time.monotonic() - began > 2 * locating._LEAST_REST_S, "one after each answer"


def test_a_stamp_that_is_none_is_refused(world: World) -> None:
    push(world.registry, world.store, BERT, b"1")
    assert world.call("GET", OF_V1, params={"stale": "a/../b"}).status_code == 422


class Maker:
    """Makes answers as large as asked, counting."""

    def __init__(self, length: int = 10, life_s: float = 100.0) -> None:
        self.length, self.life_s = length, life_s
        self.made: list[bool] = []
        self.fails = False
        self.now = 0.0

    async def __call__(self, is_forced: bool) -> Answer:
        await asyncio.sleep(0.01)
        self.made.append(is_forced)
        if self.fails:
            raise StoreUnavailable("the NameNode is away")
        stamp = f"{len(self.made):x}"
        return Answer(stamp, b"x" * self.length, self.now + self.life_s, self.now)


def test_answers_end_before_the_tokens_in_them_do() -> None:
    make = Maker(life_s=5)
    answers = Answers(clock=lambda: make.now)

    async def story() -> None:
        first = await answers.get("v1", make)
        make.now = 4.9
        assert await answers.get("v1", make) is first
        make.now = 5.1
        assert await answers.get("v1", make) is not first

    asyncio.run(story())
    assert make.made == [False, False]


def test_who_gives_up_waiting_takes_the_answer_from_nobody() -> None:
    make = Maker()
    answers = Answers()

    async def story() -> None:
        first = asyncio.create_task(answers.get("v1", make))
        await asyncio.sleep(0)
        others = [asyncio.create_task(answers.get("v1", make)) for _ in range(5)]
        await asyncio.sleep(0)
        first.cancel()
        assert len({(await one).stamp for one in others}) == 1
        with suppress(asyncio.CancelledError):
            await first

    asyncio.run(story())
    assert make.made == [False]


def test_a_failure_is_told_to_all_who_wait_and_not_kept() -> None:
    make = Maker()
    answers = Answers()

    async def story() -> None:
        make.fails = True
        found = await asyncio.gather(
            *(answers.get("v1", make) for _ in range(5)), return_exceptions=True
        )
        assert all(isinstance(one, StoreUnavailable) for one in found)
        make.fails = False
        assert (await answers.get("v1", make)).stamp == "2"

    asyncio.run(story())


def test_what_is_kept_is_bounded_in_number_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locating, "MOST_ANSWERS", 3)
    monkeypatch.setattr(locating, "MOST_BYTES", 100)
    make = Maker(length=20)
    answers = Answers(clock=lambda: make.now)

    async def ask(*keys: str) -> int:
        before = len(make.made)
        for key in keys:
            await answers.get(key, make)
        return len(make.made) - before

    async def story() -> None:
        assert await ask("a", "b", "c", "a", "d") == 4
        assert await ask("a", "c", "d") == 0, "b was used longest ago"
        assert await ask("b") == 1
        make.length = 30
        assert await ask("large", "large") == 2, "one that would push out most others is not kept"
        monkeypatch.setattr(locating, "MOST_ANSWERS", 30)
        make.length = 25
        assert await ask("e", "f", "g", "h", "i") == 5
        assert await ask("f", "g", "h", "i", "e") == 1

    asyncio.run(story())


def test_locations_of_another_life_are_not_taken_from_what_the_process_knows(
    world: World, store: AskedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "_of_store", {})
    push(world.registry, world.store, BERT, os.urandom(100 * KIB))
    pack = StorePath(packs_of(world, 1).pop())
    locating.make_answer(store, [pack], False)
    asked = store.asked_for_packs
    locating.make_answer(store, [pack], False)
    assert store.asked_for_packs == asked
    monkeypatch.setattr(locating, "_life_s", lambda locations: locating.LIFE_S)
    short = locating.make_answer(store, [pack], False)
    assert store.asked_for_packs == asked + 1, "its token would end too soon"
    assert short.until - time.monotonic() <= locating.LIFE_S / 2
