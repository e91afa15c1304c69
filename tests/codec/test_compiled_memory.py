"""Compiled code never touches memory that is not its own: shown by the compiler's sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("compiled_fuzz.c")
CODEC = Path(__file__).parents[2] / "weightyard" / "codec"
FLAGS = ("-std=gnu11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIMIT_S = 150.0


@pytest.fixture(scope="module", params=["as here", "NARROW"])
def fuzzer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no compiler, no compiled code")
    made = tmp_path_factory.mktemp("fuzz") / "fuzz"
    without = ["-DNARROW"] if request.param == "NARROW" else []  # vectors of AVX-512
    command = [compiler, *FLAGS, *without, "-I", str(CODEC), str(FUZZ), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode and "sanitize" in done.stderr:
        pytest.skip("a compiler without sanitizers")
    assert done.returncode == 0, done.stderr
    return made


def test_bytes_of_all_kinds_and_lengths_are_coded_within_their_memory(fuzzer: Path) -> None:
    done = subprocess.run([str(fuzzer)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    frames, rounds = map(int, done.stdout.split(" of "))
    assert 0.2 * rounds < frames < rounds
