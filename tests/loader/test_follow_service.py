"""Following an alias through a service, which says when it moves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from loader_world import BERT, our_threads, yard_in
from service_world import World, make_world, served

from weightyard.errors import Retryable
from weightyard.yard import Yard

PROD = f"{BERT}@prod"
SOON_S = 20.0
NEVER_S = 3600.0
"""A pace of asking at which nothing would be noticed in time."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path / "service") as made:
        yield made


@pytest.fixture
def yard(world: World, tmp_path: Path) -> Iterator[Yard]:
    """A yard behind a service."""
    with (
        served(world.app, timeout_graceful_shutdown=1) as url,
        yard_in(tmp_path, url, token=world.secrets["writer"]) as opened,
    ):
        yield opened
    assert our_threads() == []


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((32, 32), float(number)), "bias": torch.full((32,), float(number))}


def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
    assert time.monotonic() - began < 5


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home, net = tmp_path / "home", torch.nn.Linear(32, 32)
    with ExitStack() as opened:
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
        assert follower.failure is None
        assert bool((net.weight == 2).all())
    assert our_threads() == []
