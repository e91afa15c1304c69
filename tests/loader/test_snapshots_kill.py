"""Processes that make a snapshot are killed, for real, at every kind of moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from snapshot_world import BERT, content, leftovers, write_model, yard_in

from weightyard.errors import StoreFull

HERE = Path(__file__).parent

BUILDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from snapshot_world import yard_in
with yard_in(Path({folder!r}), cache_max={most!r}) as yard:
    print("ready", flush=True)
    yard.snapshot({ref!r}, progress=lambda done: (print("at it", flush=True), time.sleep({s})))
"""


def builder(
    folder: Path, pause_s: int, ref: str = BERT, most: int | None = None
) -> subprocess.Popen[str]:
    """A process that makes the snapshot, and pauses after each piece of it."""
    script = BUILDER.format(tests=str(HERE), folder=str(folder), s=pause_s, ref=ref, most=most)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_at_any_moment_leaves_nothing_half_visible_and_nothing_behind(
    tmp_path: Path, step: int
) -> None:
    model = write_model(tmp_path / "model", 1, elements=1000)
    with yard_in(tmp_path) as yard:
        yard.push(model, BERT)
    done = subprocess.run(
        [sys.executable, HERE / "snapshot_crashes.py", tmp_path, model, str(step)],
        capture_output=True,
        text=True,
        timeout=170 if step > 1 else 800,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["events"] > 30
    assert said["killed"] >= said["events"] // step - 2


def test_whoever_waits_takes_over_when_the_maker_dies(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", 1, 2)
    with yard_in(tmp_path) as yard:
        yard.push(model, BERT)
        first = builder(tmp_path, 300)
        assert first.stdout is not None
        assert first.stdout.readline() == "at it\n"
        assert len(leftovers(tmp_path / "cache")) == 1
        second = builder(tmp_path, 0)
        time.sleep(1)
        assert second.poll() is None, "it waits for the one who is at it"
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
        said, _ = second.communicate(timeout=90)
        assert "at it" in said
        assert second.returncode == 0
        assert content(yard.snapshot(BERT)) == content(model)
        assert leftovers(tmp_path / "cache") == []


def test_processes_that_make_snapshots_at_once_keep_the_bound_together(tmp_path: Path) -> None:
    most = 6_500_000
    with yard_in(tmp_path, cache_max=most) as yard:
        for number, name in enumerate(("old", "one", "two", "three")):
            model = write_model(tmp_path / name, number, 10 + number, elements=300_000)
            yard.push(model, f"team/{name}", include="shards/*")
    with yard_in(tmp_path, cache_max=most) as yard:
        old = yard.snapshot("team/old")
    first = builder(tmp_path, 300, "team/one", most)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "at it\n"
        with yard_in(tmp_path, cache_max=most) as yard:
            assert old.exists(), "there is room for two"
            yard.snapshot("team/two")
            assert not old.exists(), "and not for three: what is being made counts"
            with pytest.raises(StoreFull, match="being made"):
                yard.snapshot("team/three")
    finally:
        first.kill()
        first.communicate()
    with yard_in(tmp_path, cache_max=most) as yard:
        yard.snapshot("team/three")
        assert leftovers(tmp_path / "cache") == [], "what a dead process began counts no more"
        assert yard.snapshots.used_bytes() <= most
