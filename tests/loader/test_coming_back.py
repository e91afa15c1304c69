"""A yard that was away when it was opened is used again as soon as it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from loader_world import BERT, noise, our_threads, reserved_port, same, saved, sharded, yard_in
from service_world import World, make_world, served
from waiting import SOON_S, eventually

from weightyard import away
from weightyard.away import AwayCatalogue, Opened
from weightyard.errors import NotOnNode, RegistryUnavailable, Retryable, Unauthenticated
from weightyard.loader.remembered import Remembered
from weightyard.names import Ref
from weightyard.records import RememberedVersion
from weightyard.yard import Yard

PROD = f"{BERT}@prod"


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((32, 32), float(number)), "bias": torch.full((32,), float(number))}


@pytest.fixture(autouse=True)
def looked_after_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "AGAIN_S", 0.1)


@contextmanager
def opened_while_away(folder: Path, url: str, **settings: Any) -> Iterator[Yard]:
    with yard_in(folder, url, deadline_s=0.3, on_unavailable="cached", **settings) as yard:
        yield yard


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path / "service") as made:
        yield made


@pytest.fixture
def port() -> Iterator[int]:
    """Where the service is, and is again."""
    with reserved_port() as reserved:
        yield reserved


@contextmanager
def back_at(world: World, url: str) -> Iterator[None]:
    """The service answers again, where it was."""
    port = urlsplit(url).port
    assert port is not None
    with served(world.app, port=port, timeout_graceful_shutdown=1):
        yield


def database_lost(folder: Path) -> Callable[[], object]:
    """An embedded yard's database cannot be opened any more; returns what brings it back, at once.

    Who looked while there is none would make one.
    """
    database, kept = folder / "store" / "registry.db", folder / "kept"
    database.rename(kept)
    database.symlink_to(folder, target_is_directory=True)
    return lambda: kept.replace(database)


def left_with_a_snapshot(world: World, node: Path, port: int) -> str:
    """Where a service was that has gone; the node has a snapshot of what it had."""
    with (
        served(world.app, port=port, timeout_graceful_shutdown=1) as url,
        yard_in(node, url, token=world.secrets["writer"]) as yard,
    ):
        yard.push(state(1), BERT, alias="prod")
        yard.snapshot(PROD)
    return url


def test_a_yard_opened_while_its_service_was_away_uses_it_when_it_is_back(
    world: World, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "weightyard")
    node = tmp_path / "node"
    url = left_with_a_snapshot(world, node, port)
    with opened_while_away(node, url, token=world.secrets["writer"]) as yard:
        old = yard.load(PROD)
        assert same(old, state(1))
        assert isinstance(old.version, RememberedVersion)
        with pytest.raises(RegistryUnavailable):
            yard.load(PROD, on_unavailable="fail")
        with back_at(world, url):
            with yard_in(tmp_path / "trainer", url, token=world.secrets["writer"]) as trainer:
                trainer.push(state(2), BERT, alias="prod")
            eventually(lambda: yard.resolve(PROD).number == 2)
            new = yard.load(PROD, on_unavailable="fail")
            assert same(new, state(2))
            assert not isinstance(new.version, RememberedVersion)
            assert not new.report.from_snapshot, "it was read from the store"
            assert [one.name for one in yard.models()] == [BERT]
            assert f"yard.back yard={url}" in caplog.text
    eventually(lambda: "weightyard-away" not in our_threads())


def test_a_yard_opened_while_its_database_was_away_uses_it_when_it_is_back(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        yard.push(state(1), BERT, alias="prod")
        yard.snapshot(PROD)
        block_bytes = yard.block_bytes
    bring_back = database_lost(tmp_path)
    with opened_while_away(tmp_path, str(tmp_path / "store")) as yard:
        assert isinstance(yard.load(PROD).version, RememberedVersion)
        with pytest.raises(NotOnNode, match="needs the yard"):
            yard.push(state(2), BERT)
        bring_back()
        eventually(lambda: not isinstance(yard.resolve(PROD), RememberedVersion))
        assert yard.block_bytes == block_bytes
        yard.push(state(2), BERT, alias="prod")
        assert same(yard.load(PROD), state(2))
        assert yard.is_embedded


def test_who_follows_from_an_outage_on_gets_the_versions_that_come_after_it(
    world: World, tmp_path: Path, port: int
) -> None:
    node, net = tmp_path / "node", torch.nn.Linear(32, 32)
    url = left_with_a_snapshot(world, node, port)
    with opened_while_away(node, url, token=world.secrets["writer"]) as yard:
        yard.load_into(net, PROD)
        with yard.follow(PROD, net, applied=PROD) as follower:
            eventually(lambda: isinstance(follower.failure, Retryable))
            with back_at(world, url):
                with yard_in(tmp_path / "trainer", url, token=world.secrets["writer"]) as trainer:
                    trainer.push(state(2), BERT, alias="prod")
                found = follower.wait(SOON_S)
                assert found is not None
                assert found.number == 2
                eventually(lambda: follower.failure is None)
                follower.apply()
                assert bool((net.weight == 2).all())


def test_a_model_of_several_files_is_followed_from_an_outage_on_too(tmp_path: Path) -> None:
    first, second = {"a": noise(300, 300)}, {"b": noise(300, 300, seed=2)}
    folder = sharded(tmp_path / "model", first, second)
    with yard_in(tmp_path) as yard:
        yard.push(folder, BERT, alias="prod")
        yard.snapshot(PROD)
    bring_back = database_lost(tmp_path)
    with opened_while_away(tmp_path, str(tmp_path / "store"), poll_s=0.1) as yard:
        weights = yard.load(PROD)
        with yard.follow(PROD, weights) as follower:
            eventually(lambda: isinstance(follower.failure, Retryable))
            bring_back()
            saved(folder / "model-00002-of-00002.safetensors", {"b": -second["b"]})
            with yard_in(tmp_path) as trainer:
                trainer.push(folder, BERT, alias="prod")
            assert follower.wait(SOON_S) is not None
            assert follower.report is not None
            assert follower.report.raw_bytes == second["b"].nbytes
            follower.apply()
            assert same(weights, {"a": first["a"], "b": -second["b"]})


class Looks:
    """Opens a yard again: is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.count = 0
        self.may_answer = threading.Event()
        self.error: Exception = RegistryUnavailable("still away")
        self.opened: Opened | None = None

    def __call__(self) -> Opened:
        self.count += 1
        self.may_answer.wait(SOON_S)
        if self.opened is None:
            raise self.error
        return self.opened


@pytest.fixture
def looks() -> Iterator[Looks]:
    made = Looks()
    yield made
    made.may_answer.set()
    eventually(lambda: "weightyard-away" not in our_threads())


@pytest.fixture
def catalogue(tmp_path: Path, looks: Looks) -> AwayCatalogue:
    """Of a yard in which only a look shows that it is still away; one is due."""
    with yard_in(tmp_path) as yard:
        yard.push(state(1), BERT, alias="prod")
        yard.snapshot(PROD)
    known = Remembered(tmp_path / "cache", str(tmp_path / "store"))
    made = AwayCatalogue("yard", known, RegistryUnavailable("away"), looks)
    time.sleep(0.15)
    return made


def test_a_load_waits_half_a_second_at_most_for_a_yard_that_says_nothing(
    catalogue: AwayCatalogue, looks: Looks
) -> None:
    began = time.monotonic()
    assert catalogue.resolve(Ref.parse(PROD)).number == 1
    first_s = time.monotonic() - began
    for _ in range(100):
        catalogue.resolve(Ref.parse(PROD))
    assert away.WAIT_S == 0.5
    assert 0.4 < first_s < SOON_S / 2
    assert time.monotonic() - began - first_s < 25, "nobody waits for a look that another began"
    assert looks.count == 1


def test_looks_that_find_nothing_are_apart_however_often_one_asks(
    catalogue: AwayCatalogue, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away, "AGAIN_S", 1000.0)
    looks.may_answer.set()
    for _ in range(50):
        catalogue.resolve(Ref.parse(PROD))
    assert looks.count == 1


def test_what_a_yard_says_when_it_answers_is_not_taken_for_silence(
    catalogue: AwayCatalogue, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away, "WAIT_S", SOON_S)
    looks.error = Unauthenticated("the token was revoked")
    looks.may_answer.set()
    with pytest.raises(Unauthenticated, match="revoked"):
        catalogue.resolve(Ref.parse(PROD))


def test_what_answers_after_it_was_closed_is_closed_too(
    catalogue: AwayCatalogue, looks: Looks
) -> None:
    closed: list[str] = []

    class Closed:
        is_service = True

        def __init__(self, name: str) -> None:
            self._name = name

        def close(self) -> None:
            closed.append(self._name)

    given: Any = Closed
    looks.opened = Opened(given("via"), given("catalogue"), 1)
    catalogue.resolve(Ref.parse(PROD))
    began = time.monotonic()
    catalogue.close()
    assert time.monotonic() - began < SOON_S / 2
    assert closed == []
    looks.may_answer.set()
    eventually(lambda: closed == ["catalogue", "via"])
