"""`weightyard follow` as a real process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import Cli
from service_world import World, served
from waiting import eventually

BERT = "team/bert"
PROD = f"{BERT}@prod"

NOTE = """
import json, os, sys
from pathlib import Path
folder = Path(os.environ["WEIGHTYARD_PATH"])
note = {name: os.environ[f"WEIGHTYARD_{name}"] for name in ("REF", "VERSION", "DIGEST")}
note["files"] = sorted(file.name for file in folder.iterdir())
with open(sys.argv[1], "a") as out:
    out.write(json.dumps(note) + "\\n")
sys.exit(3)
"""


LOSING = """
import os, subprocess
from weightyard.cli import main
from weightyard.client import watching as listening
from weightyard.transfer import watching

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        for _ in range(1000):  # Python calls a signal's handler between two of its steps
            pass

def pause(*given, real=watching.pause):
    Finalized()
    real(*given)

def events(*given, real=listening.events):
    for event in real(*given):
        yield event
        Finalized()

class Popen(subprocess.Popen):
    def wait(self, *given):
        if self.args[0] == "sleep":
            Finalized()
        return super().wait(*given)

watching.pause, listening.events, subprocess.Popen = pause, events, Popen
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_runs_at_every_move_even_if_it_fails_until_the_end(
    cli: Cli, base: Path, tuned: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    script, notes = tmp_path / "note.py", tmp_path / "notes"
    script.write_text(NOTE)
    notes.write_text("")
    line = f"{sys.executable} {script} {notes}"
    following = subprocess.Popen(
        cli.command("follow", PROD, "--exec", line, "--poll", "0.1"), stderr=-1, text=True
    )
    cli.ok("push", base, BERT, "--alias", "prod")
    eventually(lambda: notes.read_text().count("\n") == 1)
    cli.ok("push", tuned, BERT, "--alias", "prod")
    eventually(lambda: notes.read_text().count("\n") == 2)
    following.send_signal(number)
    _, err = following.communicate(timeout=120)
    assert following.returncode == code, err
    assert "Traceback" not in err
    assert "ended with 3" in err
    told = [json.loads(note) for note in notes.read_text().splitlines()]
    assert [note["REF"] for note in told] == [f"{BERT}@v1", f"{BERT}@v2"]
    assert [note["VERSION"] for note in told] == ["1", "2"]
    assert told[1]["DIGEST"] == cli.json("show", PROD)["digest"]
    assert told[1]["files"] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("line", ["true", "sleep 600"], ids=["waiting", "running"])
def test_a_signal_whose_exception_python_drops_ends_it_all_the_same(
    cli: Cli,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    number: signal.Signals,
    code: int,
) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    monkeypatch.setenv("SIGNAL", str(int(number)))
    _require_ended(code, line)


def test_such_a_signal_ends_it_before_a_service_tells_anything_again(
    cli: Cli, world: World, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(world.app) as url:
        monkeypatch.setenv("WEIGHTYARD_URL", url)
        monkeypatch.setenv("WEIGHTYARD_TOKEN", world.secrets["writer"])
        cli.ok("push", base, BERT, "--alias", "prod")
        monkeypatch.setenv("SIGNAL", str(int(signal.SIGTERM)))
        _require_ended(143, "true")


def _require_ended(code: int, line: str) -> None:
    words = ("follow", PROD, "--exec", line, "--poll", "3600", "--no-snapshot")
    done = subprocess.run([sys.executable, "-c", LOSING, *words], capture_output=True, timeout=30)
    assert done.returncode == code, done.stderr


def test_a_move_behind_a_service_is_told_and_not_found_by_asking(
    cli: Cli, world: World, base: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, notes = tmp_path / "note.py", tmp_path / "notes"
    script.write_text(NOTE)
    notes.write_text("")
    with served(world.app) as url:
        monkeypatch.setenv("WEIGHTYARD_URL", url)
        monkeypatch.setenv("WEIGHTYARD_TOKEN", world.secrets["writer"])
        cli.ok("push", base, BERT, "--alias", "prod")
        line = f"{sys.executable} {script} {notes}"
        following = subprocess.Popen(
            cli.command("follow", PROD, "--exec", line, "--poll", "3600"), stderr=-1, text=True
        )
        try:
            eventually(lambda: notes.read_text().count("\n") == 1)
            cli.ok("push", tuned, BERT, "--alias", "prod")
            eventually(lambda: notes.read_text().count("\n") == 2)
        finally:
            following.terminate()
            _, err = following.communicate(timeout=120)
    assert following.returncode == 143, err
    told = [json.loads(note) for note in notes.read_text().splitlines()]
    assert [note["REF"] for note in told] == [f"{BERT}@v1", f"{BERT}@v2"]
    assert told[1]["files"] == ["config.json", "model.safetensors"]


def test_a_command_under_way_ends_with_who_follows(cli: Cli, base: Path, tmp_path: Path) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    began = tmp_path / "began"
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text(
        "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    line = f"{sys.executable} {sleeper} {began}"
    following = subprocess.Popen(cli.command("follow", PROD, "--exec", line, "--no-snapshot"))
    eventually(lambda: began.exists() and began.read_text())
    following.terminate()
    assert following.wait(120) == 143
    assert not Path(f"/proc/{began.read_text()}").exists()


def test_once_ends_with_the_exit_code_of_the_command(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    ran = cli("follow", PROD, "--exec", "false", "--once", "--no-snapshot", "--json")
    assert ran.code == 1
    told = json.loads(ran.out)
    assert (told["ref"], told["exit_code"], told["path"]) == (f"{BERT}@v1", 1, None)


def test_who_follows_what_is_not_there_is_told_what_is_near_and_that_it_is_waited_for(
    cli: Cli, base: Path
) -> None:
    cli.ok("push", base, BERT, "--alias", "prod")
    following = subprocess.Popen(
        cli.command("follow", "team/brt@prod", "--exec", "true", "--once"), stderr=-1, text=True
    )
    try:
        assert following.stderr is not None
        line = following.stderr.readline()
    finally:
        following.terminate()
        following.communicate(timeout=120)
    assert line == (
        "waiting until team/brt@prod is there: no model team/brt. Did you mean team/bert?\n"
    )


@pytest.mark.parametrize("line", ["", "no-such-program-here", "'"])
def test_a_command_that_cannot_run_is_refused_at_once(cli: Cli, line: str) -> None:
    assert "--exec" in cli.refused(2, "follow", PROD, "--exec", line)
