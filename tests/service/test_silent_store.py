"""A service whose store says nothing: what needs only the database goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_world import LIMIT_S, World, make_world, push, served

from weightyard.storage.local import LocalStore
from weightyard.storage.store import Store
from weightyard.testing.faults import FaultyStore

PROMPT_S = 20.0
"""Less than a silent store holds a call up, and long for a busy machine."""
PROD = "models/team/bert/aliases/prod"


@dataclass
class Silence:
    """Where calls of a store wait while it is silent."""

    is_over: threading.Event = field(default_factory=threading.Event)

    def over(self, folder: Path) -> Store:
        self.is_over.set()
        return FaultyStore(LocalStore(folder), on_call=self._wait)

    def _wait(self, index: int, call: str) -> None:
        self.is_over.wait(LIMIT_S)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.is_over.clear()
        try:
            yield
        finally:
            self.is_over.set()


@pytest.fixture
def silence() -> Silence:
    return Silence()


@pytest.fixture
def quiet(tmp_path: Path, silence: Silence) -> Iterator[World]:
    """A service whose store can be silent, with two versions and an alias."""
    with make_world(tmp_path, store=silence.over(tmp_path / "store")) as world:
        push(world.registry, world.store, "team/bert", b"one", alias="prod")
        push(world.registry, world.store, "team/bert", b"two")
        yield world


def test_while_the_store_is_silent_aliases_resolve_and_move(quiet: World, silence: Silence) -> None:
    shown = {"Authorization": f"Bearer {quiet.secrets['boss']}"}

    with served(quiet.app) as url, silence(), ThreadPoolExecutor(40) as threads:

        def call(method: str, path: str, **options: Any) -> httpx.Response:
            target = f"{url}/api/v1/{path}"
            return httpx.request(method, target, headers=shown, timeout=PROMPT_S, **options)

        probes = [threads.submit(call, "GET", "ready") for _ in range(20)]
        asked = [threads.submit(call, "GET", "models/team/bert/versions/1/cost") for _ in range(10)]
        assert call("GET", "models/team/bert/resolve/prod").json()["number"] == 1
        moved = call("PUT", PROD, json={"version": 2})
        assert moved.status_code == 200, moved.text
        assert call("GET", "models/team/bert/resolve/prod").json()["number"] == 2
        for probe in probes:
            answer = probe.result()
            assert (answer.status_code, answer.json()) == (
                503, {"status": "unavailable", "database": True, "store": False},
            )  # fmt: skip
        silence.is_over.set()
        assert {one.result().status_code for one in asked} == {200}


def test_a_store_that_answers_again_is_said_to(quiet: World, silence: Silence) -> None:
    with silence():
        assert quiet.call("GET", "ready", token=None).status_code == 503
    quiet.service.readiness = None  # which is kept for a moment
    assert quiet.call("GET", "ready", token=None).json()["store"]
