"""Watching what a ref means, through a service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from cutting import Cutting
from hypothesis import given
from hypothesis import strategies as st
from service_world import LIMIT_S, World, push

from weightyard.client.catalogue import HttpCatalogue
from weightyard.client.connection import ANSWER_S
from weightyard.client.events import events, parsed
from weightyard.errors import NoSuchThing, RegistryUnavailable, Retryable
from weightyard.names import AliasName, ModelName, Ref
from weightyard.records import Event, Version
from weightyard.service import events as service_events
from weightyard.storage.cancel import Cancel

BERT = ModelName.parse("team/bert")
PROD = Ref.parse("team/bert@prod")
NEVER_S = 3600.0
EVENT = b"""id: 7
event: alias.moved
data: {"id": 7, "at": "2026-01-01T00:00:00Z", "kind": "alias.moved", "subject": "team/bert@prod"}

"""


@pytest.fixture
def catalogue(world: World, url: str) -> Iterator[HttpCatalogue]:
    with HttpCatalogue(url, world.secrets["writer"], deadline_s=LIMIT_S) as opened:
        yield opened
    world.service.wake.end()


def numbers(seen: Iterator[object], last: int) -> list[object]:
    """What is seen until a version: numbers, and the classes of errors."""
    found: list[object] = []
    for one in seen:
        found.append(one.number if isinstance(one, Version) else type(one))
        if found[-1] == last:
            return found
    raise AssertionError(found)


def test_a_watch_sees_every_move_soon_after_it_happened(
    world: World, catalogue: HttpCatalogue
) -> None:
    stop = Cancel()
    seen = catalogue.watch(PROD, poll_s=NEVER_S, stop=stop)
    assert isinstance(next(seen), NoSuchThing)
    push(catalogue, world.store, "team/bert", b"one", alias="prod")
    numbers(seen, 1)
    push(catalogue, world.store, "team/bert", b"two", alias="prod")
    numbers(seen, 2)
    catalogue.move_alias(BERT, AliasName("prod"), 1)
    assert numbers(seen, 1)
    stop.cancel()
    assert list(seen) == []


def test_events_go_on_after_the_last_one_heard(world: World, catalogue: HttpCatalogue) -> None:
    first = push(catalogue, world.store, "team/bert", b"one", alias="prod")
    start = world.registry.newest_event()
    push(catalogue, world.store, "team/bert", b"two", alias="prod")
    heard = (one for one in events(catalogue.connection, start, Cancel()) if one is not None)
    kinds = {next(heard).subject, next(heard).subject}
    assert kinds == {"team/bert@v2", "team/bert@prod"}
    assert first.number == 1


def test_a_watch_goes_on_when_its_stream_is_cut(world: World, cutting: Cutting) -> None:
    with HttpCatalogue(cutting.url, world.secrets["writer"], deadline_s=LIMIT_S) as catalogue:
        push(catalogue, world.store, "team/bert", b"one", alias="prod")
    with HttpCatalogue(cutting.url, world.secrets["writer"], deadline_s=LIMIT_S) as catalogue:
        stop = Cancel()
        cutting.cut_after_bytes = [2000, 100]  # the stream amid its events, the next one's answer
        seen = catalogue.watch(PROD, poll_s=NEVER_S, stop=stop)
        numbers(seen, 1)
        push(catalogue, world.store, "team/bert", b"two", alias="prod")
        numbers(seen, 2)
        push(catalogue, world.store, "team/bert", b"three", alias="prod")
        numbers(seen, 3)
        stop.cancel()
        assert list(seen) == []
    world.service.wake.end()


def test_a_service_that_is_away_is_an_error_seen_at_once_and_again() -> None:
    with socket.socket() as taken:  # so that nobody comes to listen there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        errors_seen_at_once_and_again(url)


def errors_seen_at_once_and_again(url: str) -> None:
    with HttpCatalogue(url, deadline_s=LIMIT_S) as catalogue:
        stop = Cancel()
        seen = catalogue.watch(PROD, poll_s=0.01, stop=stop)
        began = time.monotonic()
        assert all(isinstance(next(seen), Retryable) for _ in range(3))
        assert time.monotonic() - began < LIMIT_S / 2, "not each time when time was up"
        stop.cancel()
        assert list(seen) == []


def test_a_watch_that_waits_for_events_ends_when_it_is_stopped(
    world: World, catalogue: HttpCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_events, "_SIGN_OF_LIFE_S", NEVER_S)  # which it would be ended by
    push(catalogue, world.store, "team/bert", b"one", alias="prod")
    stop = Cancel()
    seen = catalogue.watch(PROD, poll_s=NEVER_S, stop=stop)
    next(seen)
    threading.Timer(0.3, stop.cancel).start()
    began = time.monotonic()
    assert all(isinstance(one, Version) for one in seen)
    assert time.monotonic() - began < ANSWER_S / 2


@given(st.integers(1, len(EVENT)))
def test_an_event_is_the_same_however_the_network_cuts_it(at: int) -> None:
    text = b"retry: 2000\n: hello\n\n" + EVENT
    pieces = [text[start : start + at] for start in range(0, len(text), at)]
    hello, event = parsed(pieces)
    assert hello is None
    assert isinstance(event, Event)
    assert (event.id, event.subject) == (7, "team/bert@prod")


def test_a_stream_cannot_make_its_listener_take_more_and_more_memory() -> None:
    with pytest.raises(RegistryUnavailable, match="line"):
        list(parsed(b"data: " + b"x" * 65536 for _ in range(1 << 20)))
    with pytest.raises(RegistryUnavailable, match="event of over"):
        list(parsed(b"data: " + b"x" * 65536 + b"\n" for _ in range(1 << 20)))
    with pytest.raises(RegistryUnavailable, match="not weightyard"):
        list(parsed([b"data: {}\n\n"]))
