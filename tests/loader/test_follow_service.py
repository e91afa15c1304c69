"""Following an alias through a service, which says when it moves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from loader_world import BERT, left_threads, noise, reserved_port, same, saved, sharded, yard_in
from service_world import World, make_world, served
from starlette.types import Send
from waiting import SOON_S, eventually

from weightyard.errors import Retryable
from weightyard.service.sending import SentFile
from weightyard.yard import Yard

PROD = f"{BERT}@prod"
NEVER_S = 3600.0
"""A pace of asking at which nothing would be noticed in time."""
CLOSING_S = 20.0
"""Who closes a follower whose threads do not end waits for longer."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path / "service") as made:
        yield made


@pytest.fixture
def url(world: World) -> Iterator[str]:
    with served(world.app, timeout_graceful_shutdown=1) as found:
        yield found
    assert left_threads() == []


@pytest.fixture
def yard(world: World, url: str, tmp_path: Path) -> Iterator[Yard]:
    """A yard behind a service."""
    with yard_in(tmp_path, url, token=world.secrets["writer"]) as opened:
        yield opened


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((32, 32), float(number)), "bias": torch.full((32,), float(number))}


def test_a_move_is_told_not_asked_for(yard: Yard) -> None:
    net = torch.nn.Linear(32, 32)
    with yard.follow(PROD, net, poll_s=NEVER_S) as follower:
        for number in (1, 2, 3):
            yard.push(state(number), BERT, alias="prod")
            eventually(lambda number=number: (f := follower.ready()) and f.number == number)
            follower.apply()
            assert bool((net.weight == number).all())
        yard.push(state(9), "team/other", alias="prod")
        assert follower.wait(0.5) is None
        began = time.monotonic()
    assert time.monotonic() - began < CLOSING_S


def test_where_the_service_has_no_room_for_listeners_it_is_asked(yard: Yard, world: World) -> None:
    world.service.listeners = 1000
    yard.push(state(1), BERT, alias="prod")
    with yard.follow(PROD, poll_s=0.1) as follower:
        assert follower.wait(SOON_S) is not None
        assert len(dict(follower.changed())) == 2
        yard.push(state(2), BERT, alias="prod")
        found = follower.wait(SOON_S)
        assert found is not None
        assert found.number == 2
    world.service.listeners = 0


@pytest.fixture
def far(world: World, url: str, tmp_path: Path) -> Iterator[Yard]:
    """The same yard, for a host that reaches the service and nothing else."""
    token = world.secrets["reader"]
    with yard_in(tmp_path / "far", url, token=token, via="service") as opened:
        yield opened


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> list[SentFile]:
    """The answers under way: bytes are counted when they are sent, which a client may be told of
    sooner."""
    under_way: list[SentFile] = []
    answer = SentFile.__call__

    async def seen(sent: SentFile, *connection: Any) -> None:
        under_way.append(sent)
        try:
            await answer(sent, *connection)
        finally:
            under_way.remove(sent)

    monkeypatch.setattr(SentFile, "__call__", seen)
    return under_way


def test_a_host_that_reaches_only_the_service_follows_and_only_what_differs_comes(
    yard: Yard, far: Yard, world: World, sending: list[SentFile]
) -> None:
    first = {"trunk": noise(512, 512), "head": noise(64, 1024, seed=1)}
    second = first | {"head": first["head"].clone()}
    second["head"][3, 5] += 1  # the store has that as a delta, of which a host out here has no use
    yard.push(first, BERT, alias="prod")
    weights = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    with far.follow(PROD, weights, poll_s=NEVER_S) as follower:
        assert follower.wait(SOON_S) is not None
        follower.apply()
        assert same(weights, first)
        eventually(lambda: not sending)
        sent = through_service(world)
        yard.push(second, BERT, alias="prod", parent=PROD, delta="also")
        found = follower.wait(SOON_S)
        assert found is not None
        assert found.number == 2
        assert follower.report is not None
        assert follower.report.raw_bytes == second["head"].nbytes
        eventually(lambda: not sending)
        assert through_service(world) == sent + second["head"].nbytes
        follower.apply()
        assert same(weights, second)
        assert follower.failure is None
    assert far.snapshots.listed() == [], "nothing is left on the node"


def test_a_model_of_several_files_is_followed_through_the_service(
    yard: Yard, far: Yard, tmp_path: Path
) -> None:
    shards = {"a": noise(300, 300)}, {"b": noise(300, 300, seed=2)}
    folder = sharded(tmp_path / "model", *shards)
    yard.push(folder, BERT, alias="prod")
    weights = far.load(PROD)
    with far.follow(PROD, weights, verify="full") as follower:
        saved(folder / "model-00002-of-00002.safetensors", {"b": -shards[1]["b"]})
        yard.push(folder, BERT, alias="prod")
        assert follower.wait(SOON_S) is not None
        assert follower.report is not None
        assert follower.report.raw_bytes == shards[1]["b"].nbytes
        follower.apply()
        assert same(weights, {"a": shards[0]["a"], "b": -shards[1]["b"]})


def test_closing_does_not_wait_for_blocks_that_a_service_stopped_sending(
    yard: Yard, far: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.push({"weight": noise(1024, 1024)}, BERT, alias="prod")
    stuck, go_on = threading.Event(), threading.Event()

    async def stalled(answer: SentFile, window: memoryview, send: Send) -> None:
        await send({"type": "http.response.body", "body": bytes(window[:100]), "more_body": True})
        stuck.set()
        while not go_on.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(SentFile, "_send", stalled)
    with far.follow(PROD):
        assert stuck.wait(SOON_S)
        began = time.monotonic()
    assert time.monotonic() - began < CLOSING_S
    go_on.set()


def through_service(world: World) -> float:
    return float(world.service.metrics.bytes.labels("out")._value.get())


@contextmanager
def running(home: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The service as a process of its own; killed at the end."""
    command = [str(Path(sys.executable).with_name("weightyard")), "serve", "--port", str(port)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTYARD_")}
    environment = kept | {"WEIGHTYARD_HOME": str(home), "WEIGHTYARD_CACHE": str(home / "cache")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/api/v1/health", timeout=5).raise_for_status()
                break
            except httpx.TransportError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait(30)


def test_who_follows_a_service_that_is_killed_catches_up_when_it_is_back(tmp_path: Path) -> None:
    home, net = tmp_path / "home", torch.nn.Linear(32, 32)
    with ExitStack() as opened:
        port = opened.enter_context(reserved_port())
        service = opened.enter_context(running(home, port))
        yard = opened.enter_context(
            yard_in(tmp_path / "client", f"http://127.0.0.1:{port}", deadline_s=3)
        )
        yard.push(state(1), BERT, alias="prod")
        follower = opened.enter_context(yard.follow(PROD, net, poll_s=0.5))
        assert follower.wait(SOON_S) is not None
        follower.apply()
        service.kill()
        service.wait(SOON_S)
        eventually(lambda: isinstance(follower.failure, Retryable))
        with yard_in(tmp_path / "direct", str(home / "store")) as direct:
            direct.push(state(2), BERT, alias="prod")
        assert follower.ready() is None
        assert bool((net.weight == 1).all())
        opened.enter_context(running(home, port))
        found = follower.wait(SOON_S)
        assert found is not None
        assert found.number == 2
        follower.apply()
        eventually(lambda: follower.failure is None)
        assert bool((net.weight == 2).all())
    assert left_threads() == []
