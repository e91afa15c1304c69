"""What is on this node works without service, database and store, and says how old it is."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from loader_world import reserved_port
from snapshot_world import BERT, content, settings_in, write_model, yard_in

import weightyard
from weightyard.errors import BadSetting, NotOnNode, RegistryUnavailable, Retryable
from weightyard.loader import remembered as module
from weightyard.loader.remembered import Remembered
from weightyard.names import Digest, Ref
from weightyard.opening import open_yard
from weightyard.records import RememberedVersion
from weightyard.settings import Settings
from weightyard.yard import Yard

WEIGHTYARD = Path(sys.executable).with_name("weightyard")


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTYARD_")}
    return {
        **kept,
        "WEIGHTYARD_HOME": str(folder / "home"),
        "WEIGHTYARD_CACHE": str(folder / "cache"),
        "WEIGHTYARD_DEADLINE_S": "2",
        **more,
    }


@pytest.fixture
def port() -> Iterator[int]:
    """Where a service is, or was: nobody else answers there."""
    with reserved_port() as reserved:
        yield reserved


@contextmanager
def serving(folder: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    log = folder / "service.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [WEIGHTYARD, "serve", "--port", str(port)], env=environment(folder), stderr=out
        )
    try:
        end = time.monotonic() + 90
        while not (found := re.search(r" on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        while True:
            try:
                httpx.get(f"{found[1]}/api/v1/health", timeout=5).raise_for_status()
                break
            except httpx.TransportError:
                assert time.monotonic() < end
        yield found[1], process
    finally:
        process.kill()
        process.wait(30)


SECOND_PROCESS = """
import json, logging, sys, weightyard
logging.basicConfig(stream=sys.stderr)
with weightyard.open() as yard:
    weights = yard.load("team/bert@prod", files="shards/*")
    path = yard.snapshot("team/bert@prod")
print(json.dumps({
    "sum": float(sum(tensor.double().sum() for tensor in weights.values())),
    "tensors": sorted(weights), "path": str(path), "version": weights.version.ref,
    "age_s": weights.version.age_s, "report": weights.report.as_dict(),
}))
"""


def test_a_second_process_loads_prod_after_service_database_and_store_are_gone(
    tmp_path: Path, port: int
) -> None:
    pytest.importorskip("torch")
    model = write_model(tmp_path / "model", 1, 2)
    with serving(tmp_path, port) as (url, process):
        # Through the service, as on a host that does not reach the store.
        with open_yard(url, settings=settings_in(tmp_path, via="service")) as yard:
            yard.push(model, BERT, alias="prod")
            path = yard.snapshot(f"{BERT}@prod")
        assert content(path) == content(model)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
    shutil.rmtree(tmp_path / "home")  # store and database
    for how in ({"WEIGHTYARD_OFFLINE": "1"}, {"WEIGHTYARD_ON_UNAVAILABLE": "cached"}):
        done = subprocess.run(
            [sys.executable, "-c", SECOND_PROCESS],
            env=environment(tmp_path, WEIGHTYARD_URL=url, **how),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["path"] == str(path)
        assert len(said["tensors"]) == 4
        assert said["version"] == f"{BERT}@v1"
        assert 0 < said["age_s"] < 600
        assert said["report"]["from_snapshot"]
        assert 0 < said["report"]["resolved_s_ago"] < 600
        assert f"ref.remembered ref={BERT}@prod version={BERT}@v1 age_s=" in done.stderr


def test_offline_nothing_is_connected_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with open_yard(url, settings=settings_in(tmp_path, offline=True)) as yard:
            with pytest.raises(NotOnNode, match="never asked what team/bert@prod means"):
                yard.snapshot(f"{BERT}@prod")
            for refused in (yard.models, lambda: yard.versions(BERT), lambda: yard.cost(BERT)):
                with pytest.raises(NotOnNode, match="offline"):
                    refused()
        with pytest.raises(TimeoutError):
            server.accept()
    assert not (tmp_path / "home").exists()


def test_offline_each_ref_means_what_it_last_meant_to_this_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "model", 1)
    with yard_in(tmp_path) as yard:
        digest = yard.push(model, BERT, alias="prod").digest
        path = yard.snapshot(BERT)
        yard.push(write_model(tmp_path / "other", 5), BERT)
        yard.set_alias(BERT, "prod", 2)
    shutil.rmtree(tmp_path / "store")
    with yard_in(tmp_path, offline=True) as yard:
        for selector in ("", "@latest", "@v1", "@prod", f"@{digest}"):
            with caplog.at_level(logging.WARNING):
                assert yard.snapshot(BERT + selector) == path
            version = yard.resolve(BERT + selector)
            assert isinstance(version, RememberedVersion)
            assert version.digest == digest
            assert version.age_s < 60
        with pytest.raises(NotOnNode, match="v2"):
            yard.snapshot(f"{BERT}@v2")
    assert "ref.remembered" in caplog.text


def test_a_version_that_is_not_on_the_node_is_named_with_what_to_do(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        yard.push(write_model(tmp_path / "model", 1), BERT, alias="prod")
        yard.pull(f"{BERT}@prod", tmp_path / "out")
    with yard_in(tmp_path, offline=True) as yard:
        for call in (yard.snapshot, yard.load, yard.stream, yard.safe_open):
            with pytest.raises(NotOnNode, match=r"team/bert@v1 has no snapshot.*weightyard path"):
                call(f"{BERT}@prod")


def test_offline_what_reads_the_store_by_its_arguments_says_so(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        yard.push(write_model(tmp_path / "model", 1), BERT, alias="prod")
        yard.snapshot(f"{BERT}@prod")
    with yard_in(tmp_path, offline=True) as yard:
        for given in ({"cache": False}, {"verify": "full"}):
            with pytest.raises(NotOnNode, match="offline, where only snapshots are read"):
                yard.load(f"{BERT}@prod", **given)


def test_offline_a_digest_needs_no_resolution(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        digest = yard.push(write_model(tmp_path / "model", 1), BERT).digest
        path = yard.snapshot(BERT)
    shutil.rmtree(tmp_path / "cache" / "resolutions")
    with yard_in(tmp_path, offline=True) as yard:
        assert yard.snapshot(f"team/another@{digest}") == path
        with pytest.raises(NotOnNode):
            yard.snapshot(f"{BERT}@{'0' * 64}")


def test_offline_versions_are_compared_by_the_blocks_they_have(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = {name: np.zeros(100, np.float32) for name in ("a", "b")}
    file = tmp_path / "model.safetensors"
    with yard_in(tmp_path) as yard:
        for value in (1, 2):
            tensors["b"][0] = value
            safetensors.save_file(tensors, file)
            yard.push(file, BERT)
            yard.snapshot(BERT)
            yard.snapshot(f"{BERT}@v{value}")
        found = yard.diff(f"{BERT}@v1", f"{BERT}@v2")
        assert found.tensors_changed == ("model.safetensors:b",)
    with yard_in(tmp_path, offline=True) as yard:
        found = yard.diff(f"{BERT}@v1", f"{BERT}@v2")
        assert found.tensors_changed == ("model.safetensors:a", "model.safetensors:b")


def test_what_another_yard_meant_by_the_same_ref_is_not_used(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        yard.push(write_model(tmp_path / "model", 1), BERT, alias="prod")
        yard.snapshot(f"{BERT}@prod")
    elsewhere = settings_in(tmp_path, offline=True)
    with (
        open_yard(str(tmp_path / "other-store"), settings=elsewhere) as yard,
        pytest.raises(NotOnNode),
    ):
        yard.snapshot(f"{BERT}@prod")


def test_without_being_told_so_a_dead_service_is_an_error_not_an_old_version(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache", deadline_s=0.5)
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(RegistryUnavailable, match=str(port)):
        open_yard(url, settings=settings)
    for name in ("HOME", "CACHE"):
        monkeypatch.setenv(f"WEIGHTYARD_{name}", str(tmp_path / name))
    monkeypatch.setenv("WEIGHTYARD_DEADLINE_S", "0.5")
    with pytest.raises(RegistryUnavailable):
        weightyard.open(url)
    with weightyard.open(url, on_unavailable="cached") as yard, pytest.raises(NotOnNode):
        yard.snapshot(BERT)
    monkeypatch.setenv("WEIGHTYARD_URL", url)
    with pytest.raises(NotOnNode):
        weightyard.load(BERT, on_unavailable="cached")


def test_a_yard_that_was_away_when_it_was_opened_gives_no_old_version_to_who_wants_none(
    tmp_path: Path, port: int
) -> None:
    prod = f"{BERT}@prod"
    with (
        serving(tmp_path, port) as (url, _),
        open_yard(url, settings=settings_in(tmp_path)) as yard,
    ):
        yard.push(write_model(tmp_path / "model", 1), BERT, alias="prod")
        path = yard.snapshot(prod)
    settings = Settings(cache=tmp_path / "cache", deadline_s=0.5, on_unavailable="cached")
    with open_yard(url, settings=settings) as yard:
        assert yard.snapshot(prod) == path
        for _ in range(2):
            with pytest.raises(RegistryUnavailable, match="does not answer"):
                yard.snapshot(prod, on_unavailable="fail")
        assert yard.snapshot(prod, on_unavailable="cached") == path
    offline = Settings(cache=tmp_path / "cache", offline=True)
    with open_yard(url, settings=offline) as yard:
        assert yard.snapshot(prod, on_unavailable="fail") == path, "it was not asked"


def lose_database(folder: Path, yard: Yard) -> None:
    # Once its records are written: who writes them would make a new one.
    yard.registry.database.engine.dispose()
    for file in (folder / "store").glob("registry.db*"):
        file.unlink()
    (folder / "store" / "registry.db").mkdir()
    with pytest.raises(Retryable):
        yard.resolve(f"{BERT}@prod")


def test_a_yard_that_stops_answering_goes_on_with_what_is_known_if_told_so(
    tmp_path: Path,
) -> None:
    with yard_in(tmp_path, on_unavailable="cached") as yard:
        yard.push(write_model(tmp_path / "model", 1), BERT, alias="prod")
        path = yard.snapshot(f"{BERT}@prod")
        lose_database(tmp_path, yard)
        assert yard.snapshot(f"{BERT}@prod") == path
        with pytest.raises(Retryable):
            yard.snapshot(f"{BERT}@prod", on_unavailable="fail")


def test_a_call_can_say_that_it_goes_on_with_what_is_known(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    prod = f"{BERT}@prod"
    with yard_in(tmp_path) as yard:
        yard.push(write_model(tmp_path / "model", 1), BERT, alias="prod")
        path = yard.snapshot(prod)
        before = yard.load(prod)
        lose_database(tmp_path, yard)
        with pytest.raises(Retryable):
            yard.load(prod)
        with pytest.raises(Retryable):
            yard.snapshot(prod)
        with pytest.raises(BadSetting, match="'fail' or 'cached'"):
            yard.load(prod, on_unavailable="cache")  # type: ignore[arg-type]
        assert yard.snapshot(prod, on_unavailable="cached") == path
        weights = yard.load(prod, on_unavailable="cached")
        assert weights.report.from_snapshot
        assert weights.report.resolved_s_ago is not None
        assert all(torch.equal(weights[name], before[name]) for name in before)
        streamed = dict(yard.stream(prod, on_unavailable="cached"))
        assert streamed.keys() == before.keys()
        with yard.safe_open(prod, on_unavailable="cached") as lazy:
            assert sorted(lazy.keys()) == sorted(before)


def test_a_manifest_or_note_that_was_damaged_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        model = write_model(tmp_path / "model", 1)
        digest = Digest(yard.push(model, BERT).digest)
        yard.snapshot(BERT)
        stored = tmp_path / "cache" / "manifests" / digest.hex
        for bad in (b"", b"\0" * 100, stored.read_bytes()[:-3]):
            stored.write_bytes(bad)
            assert yard.manifest(BERT).files, "from the store"
        for note in (tmp_path / "cache" / "resolutions").iterdir():
            note.write_bytes(b'{"yard": 5')
        yard.snapshot(BERT)
    known = Remembered(tmp_path / "cache", str(tmp_path / "store"))
    found = known.recall(Ref.parse(BERT))
    assert found is not None, "written anew"
    assert found.number == 1


def test_what_is_remembered_is_bounded_and_manifests_of_snapshots_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RESOLUTIONS", 5)
    monkeypatch.setattr(module, "MAX_MANIFESTS", 2)
    with yard_in(tmp_path) as yard:
        for number in range(6):
            name = f"team/m{number}"
            yard.push({f"t{number}": _array(number)}, name)
            (yard.snapshot if number == 0 else yard.manifest)(name)
            yard._version_to_use(name)
        kept = {file.name for file in (tmp_path / "cache" / "manifests").iterdir()}
        assert len(kept) == 3
        assert yard.resolve("team/m0").digest in kept
        assert len(list((tmp_path / "cache" / "resolutions").iterdir())) == 5


def _array(number: int) -> object:
    import numpy as np

    return np.full(10, number, np.float32)
