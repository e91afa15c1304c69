"""Loading where the store cannot be reached: through the service, once for the node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from loader_world import BERT, left_threads, noise, same, saved, sharded, yard_in
from safetensors.torch import load_file
from service_world import World, make_world, served
from torch import nn

from weightyard.client.connection import ANSWER_S, Connection
from weightyard.errors import DeadlineExceeded, Unsupported
from weightyard.yard import Yard

STATE = {
    **{f"layers.{number}.weight": noise(256, 256, seed=number) for number in range(4)},
    "mask": torch.tensor([True, False]),
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path / "service") as made:
        yield made


@pytest.fixture
def yard(world: World, tmp_path: Path) -> Iterator[Yard]:
    """A yard of a host that reaches the service and nothing else."""
    with served(world.app, timeout_graceful_shutdown=1) as url:
        with yard_in(tmp_path / "trainer", url, token=world.secrets["writer"]) as near:
            near.push(STATE, BERT, alias="prod")
        token = world.secrets["writer"]
        with yard_in(tmp_path / "server", url, token=token, via="service") as opened:
            yield opened
    assert left_threads() == []


def test_a_state_dict_is_loaded_by_a_host_that_reaches_only_the_service(yard: Yard) -> None:
    told: list[int] = []
    weights = yard.load(f"{BERT}@prod", progress=told.append)
    assert same(weights, STATE)
    assert weights.report.from_snapshot
    assert weights.report.stages["snapshot"] > 0
    assert sum(told) == weights.report.bytes, "as they came, and not again"
    assert weights.report.read_paths == {"service": weights.report.bytes}
    again = yard.load(f"{BERT}@prod", progress=told.append)
    assert "snapshot" not in again.report.stages, "it came once"
    assert again.report.read_paths == {}
    assert sum(told) == 2 * weights.report.bytes


def test_what_the_node_has_already_did_not_come_through_the_service(
    yard: Yard, tmp_path: Path
) -> None:
    first, second = {"a": noise(1000, seed=1)}, {"b": noise(2000, seed=2)}
    sharded(tmp_path / "model", first, second)
    yard.push(tmp_path / "model", BERT)
    yard.load(BERT)
    changed = saved(tmp_path / "model" / "model-00002-of-00002.safetensors", {"b": -second["b"]})
    yard.push(tmp_path / "model", BERT)
    report = yard.load(BERT).report
    assert report.read_paths == {"service": changed.stat().st_size}


class Silent:
    """A service that takes connections and says nothing, once it is told so."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_silent = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.create_connection((self._target.hostname, self._target.port))
                self._sockets += [inner, outer]
                for ends in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                if not self.is_silent.is_set():
                    sink.sendall(piece)

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            one.close()


@pytest.fixture
def silent(world: World) -> Iterator[Silent]:
    with served(world.app, timeout_graceful_shutdown=1) as url:
        proxy = Silent(url)
        yield proxy
        proxy.close()


def silence_at(said: str, silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first request on whose path has this, the service says nothing."""
    ask, stream = Connection.ask, Connection.stream

    def asked(connection: Connection, method: str, path: str, **how: Any) -> Any:
        if f"/{said}" in path:
            silent.is_silent.set()
        return ask(connection, method, path, **how)

    def streamed(connection: Connection, path: str, headers: Any, **how: Any) -> Any:
        if f"/{said}" in path:
            silent.is_silent.set()
        return stream(connection, path, headers, **how)

    monkeypatch.setattr(Connection, "ask", asked)
    monkeypatch.setattr(Connection, "stream", streamed)


@pytest.mark.parametrize(
    ("silent_at", "via"),
    [
        ("resolve", "service"),
        ("used", "service"),
        ("manifest", "service"),
        ("leases", "service"),
        ("blocks", "service"),
        ("placements", "store"),
    ],
)
def test_a_load_ends_when_its_time_is_up_though_the_service_says_nothing(
    world: World,
    silent: Silent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    silent_at: str,
    via: str,
) -> None:
    token = world.secrets["writer"]
    with yard_in(tmp_path / "server", silent.url, token=token, via=via) as yard:
        yard.push(STATE, BERT)
        silence_at(silent_at, silent, monkeypatch)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            yard.load(BERT, timeout=4.0)
        assert 3.9 < time.monotonic() - began < ANSWER_S - 5
        assert silent.is_silent.is_set()
        assert yard.snapshots.listed() == []


@pytest.mark.parametrize("silent_at", ["resolve", "used"])
def test_what_the_node_has_is_loaded_in_time_though_the_service_says_nothing(
    world: World,
    silent: Silent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    silent_at: str,
) -> None:
    token = world.secrets["writer"]
    with yard_in(tmp_path / "server", silent.url, token=token, via="service") as yard:
        yard.push(STATE, BERT)
        yard.load(BERT)
    with yard_in(tmp_path / "server", silent.url, token=token, via="service") as yard:
        silence_at(silent_at, silent, monkeypatch)
        began = time.monotonic()
        weights = yard.load(BERT, timeout=4.0, on_unavailable="cached")
        assert time.monotonic() - began < 4.0
        assert silent.is_silent.is_set()
        assert same(weights, STATE)


def test_closing_does_not_wait_for_a_service_that_went_away(
    world: World, silent: Silent, tmp_path: Path
) -> None:
    with yard_in(tmp_path / "server", silent.url, token=world.secrets["writer"]) as yard:
        yard.push(STATE, BERT)
        with yard.safe_open(BERT) as weights:
            assert same({"mask": weights.get_tensor("mask")}, {"mask": STATE["mask"]})
            silent.is_silent.set()
            began = time.monotonic()
        assert time.monotonic() - began < ANSWER_S - 5


def test_every_way_to_load_works_and_the_files_are_there_too(yard: Yard, tmp_path: Path) -> None:
    assert same(dict(yard.stream(BERT)), STATE)
    with yard.safe_open(BERT) as lazy:
        assert torch.equal(lazy.get_slice("layers.1.weight")[3], STATE["layers.1.weight"][3])
    module = nn.ModuleDict(
        {"layers": nn.ModuleList(nn.Linear(256, 256, False).bfloat16() for _ in range(4))}
    )
    yard.load_into(module, BERT, tensors="layers.*")
    assert torch.equal(module.state_dict()["layers.2.weight"], STATE["layers.2.weight"])
    assert same(load_file(yard.snapshot(BERT) / "model.safetensors"), STATE)
    assert same(load_file(yard.pull(BERT, tmp_path / "out") / "model.safetensors"), STATE)


@pytest.mark.parametrize("how", [{"cache": False}, {"verify": "full"}])
def test_what_needs_the_store_itself_says_so(yard: Yard, how: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match="WEIGHTYARD_VIA=service"):
        yard.load(BERT, **how)  # type: ignore[arg-type]
