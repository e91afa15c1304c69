"""The examples of training work as a new user would try them, with fewer steps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from killed import digest
from training import as_bytes

from weightyard.opening import open_yard
from weightyard.yard import Yard

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LIMIT_S = 240

pytestmark = pytest.mark.timeout(4 * LIMIT_S)


SERVING = f"""
import hashlib, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import transformer

def spell(model, beginning, spell=transformer.spell):
    state = model.state_dict()
    weights = b"".join(state[name].numpy().tobytes() for name in sorted(state))
    return spell(model, beginning) + hashlib.blake2s(weights).hexdigest()

transformer.spell = spell
transformer.main()
"""
"""The server of the example, which says with each answer by which weights it is."""


def started(yard: Path, script: str, *arguments: str, ranks: int = 0) -> list[str]:
    """The command; by torchrun if there are ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [
        sys.executable,
        *(launcher if ranks else []),
        str(EXAMPLES / script),
        *arguments,
        f"--yard={yard}",
    ]


def environment(yard: Path) -> dict[str, str]:
    return {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "WEIGHTYARD_HOME": str(yard.parent / "home"),
        "WEIGHTYARD_CACHE": str(yard.parent / "cache"),
    }


def run(yard: Path, script: str, *arguments: str, ranks: int = 0) -> str:
    """What it printed."""
    done = subprocess.run(
        started(yard, script, *arguments, ranks=ranks),
        env=environment(yard),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@contextmanager
def running(
    yard: Path, script: str, *arguments: str, ranks: int = 0
) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            started(yard, script, *arguments, ranks=ranks),
            env={**environment(yard), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def losses(printed: str) -> dict[int, float]:
    """By step."""
    found = re.findall(r"^step (\d+), epoch \d+: loss ([\d.]+)$", printed, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def boxes_of(yard: Yard, ref: str, tensor: str) -> int:
    (entry,) = (one for one in yard.manifest(ref).tensors if one.name == tensor)
    return len(entry.boxes)


def test_words_learned_by_two_workers_then_three_are_found_by_another_process(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "yard"
    first = losses(run(folder, "word2vec.py", "train", "--steps=40", "--interval=20", ranks=2))
    assert list(first) == [20, 40]
    after = losses(run(folder, "word2vec.py", "train", "--steps=60", "--interval=20", ranks=3))
    assert list(after) == [60]
    assert after[60] < first[20] < 6
    near = run(folder, "word2vec.py", "near", "block")
    assert len(re.findall(r"^\d\.\d\d  [a-z]+$", near, re.MULTILINE)) == 8
    with open_yard(str(folder)) as yard:
        published = yard.load("example/words@prod")
        saved = yard.load("example/word2vec@step-60", tensors="model.*")
    assert published.version.number == 2
    assert torch.equal(published["vectors.weight"], saved["model.vectors.weight"])


@pytest.mark.long
@pytest.mark.parametrize("asked_by", [signal.SIGTERM, signal.SIGINT])
def test_a_job_whose_launcher_is_asked_to_end_saves_its_step_and_goes_on_when_started_again(
    tmp_path: Path, asked_by: signal.Signals
) -> None:
    # torchrun hands it to all processes of a rank, also to those that prepare its batches.
    folder = tmp_path / "yard"
    with running(folder, "word2vec.py", "train", "--steps=100000", "--interval=50", ranks=2) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith("step 50,")
        job.send_signal(asked_by)
        job.wait(LIMIT_S)
    with open_yard(str(folder)) as yard:
        newest = yard.versions("example/word2vec")[0].step
    assert newest is not None
    assert newest > 50
    last = newest // 50 * 50 + 50
    after = run(folder, "word2vec.py", "train", f"--steps={last}", "--interval=50", ranks=2)
    assert list(losses(after)) == [last]


def test_a_transformer_of_four_workers_goes_on_with_two_while_another_process_serves_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "yard"
    first = losses(run(folder, "transformer.py", "train", "--steps=10", "--interval=5", ranks=4))
    assert list(first) == [5, 10]
    serving = tmp_path / "serving.py"
    serving.write_text(SERVING)
    said = []
    with running(folder, str(serving), "serve", "--versions=2") as server:
        assert server.stdout is not None
        said.append(server.stdout.readline())
        after = losses(
            run(folder, "transformer.py", "train", "--steps=15", "--interval=5", ranks=2)
        )
        assert list(after) == [15]
        said.append(server.stdout.readline())
        assert server.wait(LIMIT_S) == 0
    with open_yard(str(folder)) as yard:
        for version, answer in enumerate(said, 1):
            ref = f"example/speller-serving@v{version}"
            assert answer.startswith(f"{ref}: 'A block is ")
            assert answer.endswith(f"{digest(as_bytes(yard.load(ref)))}'\n")
        tensor = "model.layers.0.linear1.weight"
        assert boxes_of(yard, "example/speller@step-10", tensor) == 4
        assert boxes_of(yard, "example/speller@step-15", tensor) == 2
