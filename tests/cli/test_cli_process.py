"""The command as a real process: exit codes, signals, pipes, terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from glob import glob
from pathlib import Path

import pytest
from cli_runs import Cli

BERT = "team/bert"
ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
A_PACK = f"staging/*/{'[0-9a-f]' * 32}.0"
"""On its way. Other files are staged before it, such as that of a new yard."""

# Since Python 3.12, of a process with threads, which other tests may have left idle.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def test_both_names_work_with_output_and_errors_apart(cli: Cli, base: Path) -> None:
    pushed = cli.process("push", base, BERT, "--json", name="wy")
    assert pushed.returncode == 0
    assert json.loads(pushed.stdout)["ref"] == f"{BERT}@v1"
    assert pushed.stderr == ""
    plain = cli.process("show", BERT)
    assert "\x1b" not in plain.stdout
    failed = cli.process("show", "team/nope")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("weightyard: no model team/nope")


def test_what_nobody_foresaw_is_reported_as_a_bug() -> None:
    broken = (
        "from weightyard.cli import app, main\n"
        "@app.command()\n"
        "def broken():\n"
        "    raise KeyError('x')\n"
        "main()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", broken, "broken"], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (70, "")
    assert "Traceback" in ran.stderr, "which a report needs"
    assert (
        ran.stderr.splitlines()[-1] == "weightyard: bug: KeyError: 'x'. Please report all of this"
    )


def test_a_reader_that_leaves_early_is_no_error_message(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT)
    line = f"{' '.join(cli.command('show', BERT, '--json'))} | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_push_leaves_nothing_visible_and_can_be_repeated(
    cli: Cli, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "model").mkdir()
    store = tmp_path / "home" / "store"
    for turn in range(5):
        name = f"team/m{turn}"
        (tmp_path / "model" / "weights").write_bytes(os.urandom(96 << 20))
        pushing = subprocess.Popen(cli.command("push", tmp_path / "model", name), stderr=-1)
        end_by = time.monotonic() + LIMIT_S
        while pushing.poll() is None and not glob(A_PACK, root_dir=store):
            assert time.monotonic() < end_by
            time.sleep(0.01)
        is_in_time = pushing.poll() is None and _tell(pushing, number, store, name)
        _, err = pushing.communicate(timeout=LIMIT_S)
        if is_in_time or pushing.returncode != 0:
            break  # else it was published before it was told: this machine let the test wait
    assert pushing.returncode == code, err
    assert b"Traceback" not in err
    assert name not in [model["name"] for model in cli.json("ls")["models"]]
    assert cli.json("push", tmp_path / "model", name)["version"] == 1


def _tell(pushing: subprocess.Popen[bytes], number: signal.Signals, store: Path, name: str) -> bool:
    """Send a push a signal, unless it is published: what comes after that cannot be taken back."""
    published = "SELECT 1 FROM versions JOIN models ON models.id = model_id WHERE name = ?"
    file = store / "registry.db"
    with closing(sqlite3.connect(file, timeout=LIMIT_S, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")  # as long as this lasts, nothing is published
        if database.execute(published, [name.partition("/")[2]]).fetchone():
            return False
        pushing.send_signal(number)
        database.execute("ROLLBACK")
    return True


def _on_terminal(command: list[str], env: dict[str, str], type_in: bytes = b"") -> tuple[int, str]:
    """Run a command on a terminal of its own; what it shows there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, env)
    if type_in:
        os.write(terminal, type_in)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the terminal is gone with its last process
            break
        if not part:
            break
        shown += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_a_terminal_gets_colours_and_progress_unless_it_says_no(cli: Cli, base: Path) -> None:
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    code, shown = _on_terminal([*cli.command("push", base, BERT)], env)
    assert code == 0
    assert "Pushing" in shown
    assert re.search(r"\x1b\[[0-9;]*m", shown)
    code, shown = _on_terminal([*cli.command("push", base, BERT, "-q")], env)
    assert shown.split() == [f"{BERT}@v2"]
    colour = re.compile(r"\x1b\[(?:[0-9]+;)*3[0-9]m")
    code, shown = _on_terminal([*cli.command("doctor")], env)
    assert colour.search(shown), shown
    code, shown = _on_terminal([*cli.command("doctor")], {**env, "NO_COLOR": "1"})
    assert "store:" in shown
    assert not colour.search(shown), shown


def test_the_bar_on_a_terminal_shows_rate_and_time_left() -> None:
    script = """
import time
from weightyard.cli.progress import bar
with bar("Pushing", 1 << 40) as advance:
    for _ in range(8):
        advance(10 << 20)
        time.sleep(0.15)
"""
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "NO_COLOR": "1"}
    code, shown = _on_terminal([sys.executable, "-c", script], env)
    assert code == 0
    assert re.search(
        r"Pushing .*/1\.0 TiB +[\d.]+ [KMG]iB/s +(\d+ days?, )?\d+:\d\d:\d\d", shown
    ), shown


def test_a_narrow_terminal_cuts_nothing_and_has_a_line_for_each_version(
    cli: Cli, base: Path
) -> None:
    digest = cli.json("push", base, BERT)["digest"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "60", "NO_COLOR": "1"}
    code, shown = _on_terminal([*cli.command("show", BERT)], env)
    assert code == 0
    assert "…" not in shown
    assert digest in re.sub(r"\x1b\[[\d;]*m|\s", "", shown)
    code, shown = _on_terminal([*cli.command("ls", BERT)], env)
    assert code == 0
    (line,) = (line for line in shown.splitlines() if " ago" in line or "just now" in line)
    assert line.split()[0] == "v1"
    assert "(" not in shown
    cli.ok("alias", "set", BERT, "prod", "v1", "--reason", "better")
    code, shown = _on_terminal([*cli.command("alias", "log", BERT, "prod")], env)
    assert code == 0
    (line,) = (line for line in shown.splitlines() if "better" in line)
    assert re.match(r" \d{4}-\d\d-\d\d \d\d:\d\d \w+ ", line), "the minute, for --as-of"


def test_on_a_terminal_rm_takes_no_for_an_answer(cli: Cli, base: Path) -> None:
    cli.ok("push", base, BERT)
    command = [*cli.command("rm", f"{BERT}@v1")]
    code, shown = _on_terminal(command, dict(os.environ), b"n\n")
    assert code == 1
    assert "Remove team/bert@v1?" in shown
    assert len(cli.json("ls", BERT)["versions"]) == 1
    code, shown = _on_terminal(command, dict(os.environ), b"y\n")
    assert code == 0
    assert cli.json("ls", BERT)["versions"] == []


def test_asking_for_help_or_the_version_loads_nothing_heavy() -> None:
    script = """
import sys
from typer.testing import CliRunner
from weightyard.cli import app
for words in (["--help"], ["--version"], ["push", "--help"]):
    assert CliRunner().invoke(app, words).exit_code == 0
heavy = ("sqlalchemy", "alembic", "fastapi", "torch", "hdfs_native", "numpy", "httpx")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_folder_whose_name_is_no_text_is_named_all_the_same(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    cli.ok("push", base, "team/bert")
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as most terminals have it

    def run(*words: str | bytes) -> bytes:
        command = [*cli.command(), *words]
        done = subprocess.run(command, capture_output=True, timeout=120, env=strict, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = json.loads(run("pull", "team/bert", folder, "--json"))
    assert os.fsencode(told["folder"]) == folder
    assert folder in run("pull", "team/bert", folder)
    yard = folder + b"/yard"
    made = json.loads(run("--yard", yard, "init", "--json"))
    assert made["database"].endswith("/yard/registry.db")
    assert b"All is well" in run("--yard", yard, "doctor")


def test_it_runs_as_a_module_where_its_script_is_not_on_the_path() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightyard", "--version"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout.startswith("weightyard "), done.stderr


@pytest.fixture(scope="module")
def example_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is pushed once, as it is for someone who runs `make run` again."""
    return tmp_path_factory.mktemp("example")


def test_the_story_of_make_run_runs_through(
    cli: Cli, example_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTYARD_HOME", str(example_home))
    monkeypatch.delenv("WEIGHTYARD_DEADLINE_S")
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 8600))
            taken.listen()
            first_free = 8601
        except OSError:
            first_free = 8600  # somebody else has it, who may leave meanwhile
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "try_it.py")],
            capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "example/tiny@prod is on v2; it was on v1" in done.stdout
    assert '"latest":2' in done.stdout.replace(" ", "")
    assert done.stdout.endswith("\n"), "a shell's prompt would stand behind curl's answer"
    port = re.search(r"http://127\.0\.0\.1:(\d+)", done.stdout)
    assert port is not None
    assert int(port[1]) >= first_free
    assert cli.json("show", "example/tiny@prod")["version"] == 2


def test_ctrl_c_ends_make_run_cleanly(example_home: Path, cli: Cli) -> None:
    but = ("CI", "WEIGHTYARD_DEADLINE_S")
    env = {key: value for key, value in os.environ.items() if key not in but}
    env["WEIGHTYARD_HOME"] = str(example_home)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "examples/try_it.py"], env)
    shown = b""
    while b"Ctrl-C ends it" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            break
        shown += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    assert b"Traceback" not in shown, shown.decode()
    assert b"Stopped" in shown
