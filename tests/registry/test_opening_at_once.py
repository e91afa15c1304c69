"""A new yard may be opened by several processes at once: one makes it, all of them have it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import weightyard

PROCESSES = 3
LIMIT_S = 60.0
HELD_S = 0.5

OPEN = """
import sys
import weightyard
import weightyard.registry.binding, weightyard.registry.migrate, weightyard.registry.registry

print("ready", flush=True)
sys.stdin.readline()
print("opening", flush=True)
with weightyard.open(sys.argv[1]) as yard:
    print(len(yard.models()), flush=True)
"""


def test_processes_that_open_a_new_yard_at_once_all_have_it(tmp_path: Path) -> None:
    yard = tmp_path / "yard"
    yard.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("WEIGHTYARD_")
    } | {"WEIGHTYARD_HOME": str(tmp_path / "home")}
    with ExitStack() as opened:
        processes = [
            opened.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", OPEN, str(yard)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(PROCESSES)
        ]
        for process in processes:
            opened.callback(process.kill)
        assert [_line(process) for process in processes] == ["ready"] * PROCESSES
        # Held as it is by whoever is switching the file to WAL just now, only longer: SQLite
        # refuses the others at once, and does not wait.
        with closing(sqlite3.connect(yard / "registry.db", isolation_level=None)) as switching:
            switching.execute("BEGIN IMMEDIATE")
            for process in processes:
                _say(process, "go")
            assert [_line(process) for process in processes] == ["opening"] * PROCESSES
            time.sleep(HELD_S)
            switching.execute("ROLLBACK")
        for process in processes:
            said, complaint = process.communicate(timeout=LIMIT_S)
            assert (process.returncode, said) == (0, "0\n"), complaint[-2000:]
    with weightyard.open(str(yard)) as found:
        assert found.models() == []


def _line(process: subprocess.Popen[str]) -> str:
    """What it says next; nothing once it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
