"""The service as people run it: the command, curl, and what happens when it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_world import LIMIT_S, World, served
from typer.testing import CliRunner, Result
from waiting import eventually

from weightyard.cli import app
from weightyard.registry.database import Database
from weightyard.service import app as service_app
from weightyard.service.serving import _GRACE_S

README = Path(__file__).parent.parent.parent / "README.md"
WEIGHTYARD = Path(sys.executable).with_name("weightyard")


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTYARD_")}
    return {**kept, "WEIGHTYARD_HOME": str(home), "WEIGHTYARD_CACHE": str(home / "cache")}


def run(home: Path, *command: str, code: int = 0, db: str | None = None) -> Result:
    """A command of which no process need be seen."""
    env = environment(home) | ({"WEIGHTYARD_DB": db} if db is not None else {})
    done = CliRunner().invoke(app, command, env=env)
    assert done.exit_code == code, done.output
    return done


@contextmanager
def serving(home: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    log = home / "service.log"
    home.mkdir(exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [WEIGHTYARD, "serve", "--port", "0", *options], env=environment(home), stderr=out
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (found := re.search(r" on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        url = found[1]
        while True:
            try:
                httpx.get(f"{url}/api/v1/health", timeout=5).raise_for_status()
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        yield url, process, log
    finally:
        process.terminate()
        assert process.wait(LIMIT_S) is not None


def ask(method: str, url: str, **options: Any) -> httpx.Response:
    return httpx.request(method, url, timeout=LIMIT_S, **options)


def curl_lines() -> list[str]:
    """The lines of the README's section on REST that call curl."""
    section = README.read_text().split("## Over REST", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\$ (.*curl.*)$", section, re.MULTILINE)


def test_the_readmes_four_curl_lines_register_and_fetch_a_model(tmp_path: Path) -> None:
    lines = curl_lines()
    assert len(lines) == 4
    data = os.urandom(1_000_000)
    (tmp_path / "model.safetensors").write_bytes(data)
    with serving(tmp_path / "home") as (url, _, log):
        assert "every program on this host" in log.read_text()
        assert "setup plugin" not in log.read_text(), "what alembic says of itself helps nobody"
        script = "\n".join(["set -eu", *lines]).replace("http://127.0.0.1:8600", url)
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "copy.safetensors").read_bytes() == data
        resolved = ask("GET", f"{url}/api/v1/models/team/bert/resolve/prod").json()
        assert (resolved["number"], resolved["author"]) == (1, "local")
        records = tmp_path / "home/store/models/team/bert"
        eventually(lambda: (records / "v1.json").exists())  # written by itself
        assert [file.name for file in records.glob("**/*.json")] == ["v1.json"]


def test_a_service_that_is_told_to_stop_does_not_wait_for_listeners(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (url, process, _),
        httpx.stream("GET", f"{url}/api/v1/events", timeout=LIMIT_S) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        began = time.monotonic()
        process.terminate()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert time.monotonic() - began < _GRACE_S, "it was not for want of patience"
        assert len(list(lines)) < 10, "and the stream ends as it should"


def test_a_killed_service_loses_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = tmp_path / "w.bin"
    file.write_bytes(os.urandom(500_000))
    with serving(home) as (url, process, _):
        api = f"{url}/api/v1"
        upload = ask("POST", f"{api}/models/team/bert/uploads").json()["id"]
        sent = ask("PUT", f"{api}/uploads/{upload}/files/w.bin", content=file.read_bytes())
        assert sent.status_code == 200, sent.text
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
    secret = run(home, "token", "create", "me", "--role", "admin", "-q").stdout.strip()
    with serving(home, "--host", "0.0.0.0") as (url, _, log):
        api = f"{url.replace('0.0.0.0', '127.0.0.1')}/api/v1"
        headers = {"Authorization": f"Bearer {secret}"}
        assert ask("GET", f"{api}/models").status_code == 401
        done = ask("POST", f"{api}/uploads/{upload}/commit", headers=headers)
        assert done.status_code == 201, done.text
        answer = ask("GET", f"{api}/models/team/bert/versions/1/files/w.bin", headers=headers)
        assert answer.content == file.read_bytes()
        assert "request.done" in log.read_text()
        assert secret not in log.read_text()


def test_a_service_on_another_address_does_not_start_open(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "--host", "0.0.0.0", "--port", "0", code=2)
    assert "token create" in done.stderr


def test_a_yard_that_others_use_is_not_served_open_on_this_host_either(
    tmp_path: Path, postgres: Callable[[], str]
) -> None:
    done = run(tmp_path, "serve", "--db", postgres(), "--port", "0", code=2)
    assert "weightyard token create NAME --role admin" in done.stderr


def test_as_json_one_line_says_where_it_serves(tmp_path: Path) -> None:
    command = [WEIGHTYARD, "serve", "--port", "0", "--json"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            command, env=environment(tmp_path / "home"), stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        try:
            assert said.keys() == {"url", "store", "open"}
            assert (said["store"], said["open"]) == ((tmp_path / "home/store").as_uri(), True)
            assert ask("GET", f"{said['url']}/api/v1/health").is_success
        finally:
            process.terminate()
        assert process.stdout.read() == b"", "what is logged goes to stderr"


def test_what_happens_at_one_service_is_heard_at_another(
    tmp_path: Path, postgres: Callable[[], str]
) -> None:
    yard = ("--store", str(tmp_path / "store"), "--db", postgres())
    made = run(
        tmp_path, "--yard", yard[1], "token", "create", "me", "--role", "admin", "-q", db=yard[3]
    )
    shown = {"Authorization": f"Bearer {made.stdout.strip()}"}
    with serving(tmp_path / "a", *yard) as (a, _, _), serving(tmp_path / "b", *yard) as (b, _, _):
        opened = ask("POST", f"{a}/api/v1/models/team/bert/uploads", headers=shown).json()["id"]
        upload = f"{a}/api/v1/uploads/{opened}"
        ask("PUT", f"{upload}/files/w.bin", headers=shown, content=b"weights").raise_for_status()
        ask("POST", f"{upload}/commit", headers=shown).raise_for_status()
        with httpx.stream("GET", f"{b}/api/v1/events", headers=shown, timeout=LIMIT_S) as heard:
            lines = heard.iter_lines()
            next(lines)  # it listens from here on
            prod = f"{a}/api/v1/models/team/bert/aliases/prod"
            ask("PUT", prod, headers=shown, json={"version": 1}).raise_for_status()
            assert "event: alias.moved" in iter(lines)
            assert json.loads(next(lines).removeprefix("data: "))["subject"] == "team/bert@prod"


def test_a_schema_it_does_not_know_stops_it_with_the_command_to_run(
    tmp_path: Path, postgres: Callable[[], str]
) -> None:
    newer = f"sqlite:///{tmp_path}/newer.db"
    run(tmp_path, "db", "upgrade", "--db", newer)
    database = Database(newer)
    database.write(lambda tx: tx.exec_driver_sql("UPDATE alembic_version SET version_num='9999'"))
    database.close()
    done = run(tmp_path, "serve", "--db", newer, "--port", "0", code=2)
    assert "9999" in done.stderr
    url = postgres()
    older = Database(url)
    older.write(lambda tx: tx.exec_driver_sql("DELETE FROM alembic_version"))
    older.close()
    done = run(tmp_path, "serve", "--db", url, "--port", "0", code=2)
    assert "weightyard db upgrade" in done.stderr


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(tmp_path, "serve", "--port", str(taken.getsockname()[1]), code=2)
    assert "--port" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_again_and_again_it_gives_out_no_number_twice(tmp_path: Path) -> None:
    home = tmp_path / "home"
    acknowledged: list[int] = []
    for round_ in range(20):
        with serving(home) as (url, process, _):
            for i in range(3):
                opened = ask("POST", f"{url}/api/v1/models/team/bert/uploads").json()
                upload = f"{url}/api/v1/uploads/{opened['id']}"
                ask("PUT", f"{upload}/files/a", content=b"%d %d" % (round_, i))
                if i == 2:
                    process.send_signal(signal.SIGKILL)
                    break
                acknowledged.append(ask("POST", f"{upload}/commit").json()["number"])
    assert acknowledged == list(range(1, len(acknowledged) + 1))


def test_a_service_that_ends_waits_for_the_work_behind_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow(store: object) -> int:
        begun.set()
        time.sleep(0.5)
        ended.set()
        return 0

    monkeypatch.setattr(world.registry, "flush_outbox", slow)
    with served(world.app):
        assert begun.wait(LIMIT_S)
    assert ended.is_set(), "what is closed next is not used any more"


def test_the_work_behind_a_service_goes_on_whatever_it_met(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: dict[str, int] = {"flush_outbox": 0, "newest_event": 0}

    def failing(name: str) -> Callable[..., int]:
        def fail(*values: object) -> int:
            tries[name] += 1
            raise RuntimeError("can't start new thread")

        return fail

    monkeypatch.setattr(service_app, "_FLUSH_EVERY_S", 0.01)
    monkeypatch.setattr(service_app, "_LOOK_EVERY_S", 0.01)
    for name in tries:
        monkeypatch.setattr(world.registry, name, failing(name))
    with served(world.app):
        eventually(lambda: min(tries.values()) > 1)
