"""Whatever call is the last one: nothing acknowledged is lost, nothing half is seen.

`crash_points.py` fails operations at their calls (`crash_calls.py`), in a yard that can be put back
to what it was (`crash_yard.py`); `crash_world.py` says what must hold after that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import crash_world
import publishing
import pytest
import waiting
from crash_calls import Calls, Point
from crash_world import AT_ONCE
from pushing import BERT, push
from sqlalchemy import make_url

from weightyard.registry import binding, freshness
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.retry import RetryingStore
from weightyard.testing.cluster import MiniCluster
from weightyard.testing.faults import Fault, FaultyStore

SHARES = 7
# Taken away: it is no setting, and other tests look for those.
DAY = date.fromisoformat(os.environ.pop("WEIGHTYARD_TEST_DAY", "") or date.today().isoformat())
"""Chooses where to fail: what was found on one day can be found again on another."""
AGAIN = f"again by WEIGHTYARD_TEST_DAY={DAY}"
ROOM_BYTES = 1 << 30


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be had: a killed process, unlike a power cut, loses no page."""
    memory = Path("/dev/shm")
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM_BYTES
    folder = Path(tempfile.mkdtemp(dir=memory if has_room else tmp_path))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest) -> str | None:
    """A PostgreSQL server, without the name of a database; None for SQLite."""
    if request.param == "sqlite":
        return None
    url = make_url(request.getfixturevalue("postgres")())
    return url.set(database="").render_as_string(hide_password=False)


def todays_share() -> tuple[int, int]:
    """Which of how many shares of the points to fail at: another one each day.

    `make test-long` fails at all of them.
    """
    return DAY.toordinal() % SHARES, SHARES


def crash(folder: Path, server: str | None, **config: Any) -> dict[str, Any]:
    """Run the sweep in a process that has nothing open when it forks."""
    config = {"work": str(folder / "work"), "server": server, "jobs": 2, **config}
    return run("crash_points.py", folder, config)


def run(program: str, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(program)), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        start_new_session=True,
    )
    try:
        answer, said = process.communicate()
    finally:
        with suppress(ProcessLookupError):  # its workers, too, if this test was stopped
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-4000:]
    found: dict[str, Any] = json.loads(answer)
    return found


@pytest.mark.timeout(1800)
def test_a_crash_at_any_call_loses_nothing_and_shows_nothing_half(
    fast_folder: Path, server: str | None
) -> None:
    extent = "usual" if server is None else "short"
    share = todays_share()
    found = crash(fast_folder, server, extent=extent, share=share)
    assert found["problems"] == [], f"share {share}; {AGAIN}"
    assert found["points"] > (500 if server is None else 300) // SHARES
    assert set(found["calls"]) == {"push", "save", "alias", "rm", "gc"}
    assert all(found["looks"].values()), "a registry that changes something looks at its store"


@pytest.mark.timeout(1800)
def test_a_push_stopped_at_any_call_survives_gc_that_is_killed_at_any_call(
    fast_folder: Path, server: str | None
) -> None:
    found = crash(fast_folder, server, operations=[], stops=4, changes=4, seed=DAY.toordinal())
    assert found["problems"] == [], AGAIN
    assert found["points"] == 4 * (4 + 1)  # and gc that comes to its end


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_crash_at_every_call_in_every_way_loses_nothing_and_shows_nothing_half(
    fast_folder: Path, server: str | None
) -> None:
    found = crash(fast_folder, server, extent="full")
    assert found["problems"] == []
    print(f"{found['points']} points")


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_push_stopped_at_every_call_survives_gc_that_is_killed_at_every_call(
    fast_folder: Path, server: str | None
) -> None:
    """All pairs there are."""
    found = crash(fast_folder, server, operations=[], stops=None)
    assert found["problems"] == []
    assert found["points"] > 7000
    print(f"{found['points']} pairs")


@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "share", [todays_share(), pytest.param((0, 1), marks=pytest.mark.long)], ids=["share", "all"]
)
def test_on_hdfs_lost_answers_go_unnoticed_and_killed_writers_and_collectors_leave_nothing(
    cluster: MiniCluster, tmp_path: Path, share: tuple[int, int]
) -> None:
    config = {
        "store": cluster.fresh_dir(),
        "conf": str(cluster.conf_dir),
        "database": f"sqlite:///{tmp_path}/registry.db",
        "acknowledged": str(tmp_path / "acknowledged"),
        "share": share,
    }
    found = run("crash_on_hdfs.py", tmp_path, config)
    assert found["problems"] == [], f"share {share}; {AGAIN}"
    for operation, changes in found["changes"].items():
        planned = len(range(share[0], changes, share[1]))
        kills = found[operation]["kills"]
        # What gc has to do is not the same each time, but it was killed until it came to its end.
        assert kills == planned or (operation == "gc" and kills >= planned // 2), found
        assert found[operation]["lost"] >= 5


def test_an_operation_that_does_not_stand_still_while_it_is_stopped_is_found_out(
    database: Database, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc, or the yard being put back, is then beside another thread of it, not between its calls.

    It went on where a busy machine took longer than a look at the store is waited for.
    """
    binding.bind(database, store)
    monkeypatch.setattr(freshness, "_LOOK_S", 0.01)

    def stand() -> None:
        waiting.eventually(lambda: calls.went_on)

    calls = Calls(Point("push", "store", 0, "stat", "stop"), stand)
    with Registry(database, store=calls.store(store)) as registry, calls.database(database):
        push(registry, store, b"one")
    assert calls.is_reached
    assert [kind for kind, _, _ in calls.went_on][:1] == ["sql"]


def test_a_record_written_at_the_second_try_leaves_nothing_that_gc_does_not_find(
    database: Database, store: LocalStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database)
    push(registry, store, b"one")
    lost = FaultyStore(store, {0: Fault.AFTER})
    assert registry.flush_outbox(RetryingStore(lost))
    assert lost.calls[:2] == ["stage", "stage"]
    assert list(store.list(layout.STAGING)), "the first attempt is still there"
    crash_world.age(database)
    registry.gc(store, AT_ONCE)
    assert list(store.list(layout.STAGING)) == []


def test_sixty_four_publishers_on_one_model_get_consecutive_numbers(
    database: Database, store: LocalStore
) -> None:
    binding.bind(database, store)
    registry = Registry(database)
    assert publishing.publish_at_once(registry, store, range(64)) == []
    numbers = [version.number for version in registry.versions(BERT)]
    assert numbers == list(range(64, 0, -1))


@pytest.mark.long
def test_publishers_of_several_processes_on_one_model_get_consecutive_numbers(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    url, store = postgres(), LocalStore(tmp_path / "store")
    database = Database(url)
    binding.bind(database, store)
    program = [sys.executable, publishing.__file__, url, str(store.folder)]
    tests = {"PYTHONPATH": str(Path(__file__).parents[1])}
    processes = [
        subprocess.Popen(
            [*program, str(8 * i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **tests},
        )
        for i in range(8)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        with process:
            assert process.stdout is not None
            assert json.loads(process.stdout.read()) == []
    with Registry(database) as registry:
        numbers = [version.number for version in registry.versions(BERT)]
    assert numbers == list(range(64, 0, -1))
