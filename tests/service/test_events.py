"""Events, as they happen, over a real connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from service_world import LIMIT_S, World, push

from weightyard.names import AliasName, ModelName, TokenName
from weightyard.records import Event
from weightyard.registry.rows import record_event
from weightyard.service import events

BERT = ModelName("team", "bert")


@contextmanager
def listening(
    world: World, url: str, token: str = "reader", **headers: str
) -> Iterator[Iterator[str]]:
    shown = {"Authorization": f"Bearer {world.secrets[token]}", **headers}
    timeout = httpx.Timeout(LIMIT_S)
    with httpx.stream("GET", f"{url}/api/v1/events", headers=shown, timeout=timeout) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield answer.iter_lines()


def next_event(lines: Iterator[str]) -> Event:
    for line in lines:
        if line.startswith("data: "):
            return Event.model_validate_json(line[6:])
    raise AssertionError("the stream ended")


def test_a_listener_hears_what_happens_and_only_what_it_may(world: World, url: str) -> None:
    push(world.registry, world.store, "team/bert", b"before")
    with listening(world, url) as lines:
        assert next(lines).startswith("retry")
        push(world.registry, world.store, "other/gpt", b"secret")
        world.registry.move_alias(BERT, AliasName("prod"), 1, who="alice")
        heard = next_event(lines)
        assert (heard.kind, heard.subject) == ("alias.moved", "team/bert@prod")
        push(world.registry, world.store, "team/bert", b"two")
        assert next_event(lines).subject == "team/bert@v2"


def test_a_listener_that_was_away_misses_nothing(world: World, url: str) -> None:
    with listening(world, url) as lines:
        next(lines)
        push(world.registry, world.store, "team/bert", b"1")
        last = next_event(lines).id
    for i in range(5):
        push(world.registry, world.store, "team/bert", b"%d" % i)
    headers = {"Last-Event-ID": str(last)}
    with listening(world, url, **headers) as lines:
        assert [next_event(lines).subject for _ in range(5)] == [
            f"team/bert@v{number}" for number in range(2, 7)
        ]


def test_who_heard_more_than_there_is_hears_all_since_the_registry_was_rebuilt(
    world: World,
) -> None:
    push(world.registry, world.store, "team/bert", b"after the rebuild")
    heard = world.call("GET", "events?for_s=0", headers={"Last-Event-ID": "900"}).text
    assert "team/bert@v1" in heard
    newest = str(world.registry.newest_event())
    again = world.call("GET", "events?for_s=0", headers={"Last-Event-ID": newest}).text
    assert "team/bert@v1" not in again


def test_many_events_at_once_come_in_order(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_BATCH", 3)
    push(world.registry, world.store, "team/bert", b"one")
    for i in range(10):
        world.registry.move_alias(BERT, AliasName(f"a{i}"), 1)
    with listening(world, url, **{"Last-Event-ID": "0"}) as lines:
        ids = [next_event(lines).id for _ in range(11)]
    assert ids == sorted(ids)


def test_a_revoked_token_hears_no_more(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_SIGN_OF_LIFE_S", 0.1)
    monkeypatch.setattr(events, "_ASKED_AGAIN_S", 0.1)
    with listening(world, url) as lines:
        next(lines)
        world.registry.revoke_token(TokenName("reader"))
        assert sum(1 for _ in lines) < 1000, "it ends"


def test_a_revoked_token_hears_no_more_while_much_happens(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_ASKED_AGAIN_S", 0.1)
    push(world.registry, world.store, "team/bert", b"one")
    is_over = threading.Event()

    def keep_busy() -> None:
        for number in range(10_000):
            if is_over.wait(0.01):
                return
            world.registry.move_alias(BERT, AliasName(f"a{number % 10}"), 1)

    busy = threading.Thread(target=keep_busy)
    with listening(world, url) as lines:
        next(lines)
        busy.start()
        next_event(lines)
        world.registry.revoke_token(TokenName("reader"))
        try:
            assert sum(1 for _ in lines) < 3000, "it ends"
        finally:
            is_over.set()
            busy.join(LIMIT_S)


def test_a_project_is_not_heard_by_one_whose_name_differs_in_case_alone(any_world: World) -> None:
    push(any_world.registry, any_world.store, "Team/bert", b"secret")
    push(any_world.registry, any_world.store, "team_2/bert", b"secret")
    push(any_world.registry, any_world.store, "team/bert", b"ours")
    heard = any_world.registry.events(0, projects=["team"])
    assert [event.subject for event in heard] == ["team/bert@v1"]


def test_listeners_cost_one_question_however_many_they_are(world: World, url: str) -> None:
    push(world.registry, world.store, "team/bert", b"one")
    heard: list[str] = []

    def listen() -> None:
        with listening(world, url) as lines:
            next(lines)
            ready.release()
            heard.append(next_event(lines).subject)

    ready = threading.Semaphore(0)
    threads = [threading.Thread(target=listen) for _ in range(20)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert ready.acquire(timeout=LIMIT_S)
    assert world.service.listeners == 20
    push(world.registry, world.store, "team/bert", b"two")
    for thread in threads:
        thread.join(LIMIT_S)
    assert heard == ["team/bert@v2"] * 20


def test_a_last_event_that_is_not_one_is_refused(world: World) -> None:
    answer = world.call("GET", "events", headers={"Last-Event-ID": "x"})
    assert answer.status_code == 400


def test_an_event_that_cannot_be_written_out_is_left_out(world: World, url: str) -> None:
    push(world.registry, world.store, "team/bert", b"one")
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    kept = {"metadata": {"a": deep}}  # as it was taken before that was bounded
    world.registry.database.write(
        lambda tx: record_event(tx, "alice", "version.annotated", "team/bert@v1", kept)
    )
    world.registry.move_alias(BERT, AliasName("prod"), 1)
    with listening(world, url, **{"Last-Event-ID": "0"}) as lines:
        heard = [next_event(lines).kind for _ in range(2)]
    assert heard == ["version.published", "alias.moved"]
