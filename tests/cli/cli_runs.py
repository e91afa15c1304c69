"""Running the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from weightyard.cli import app


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


class Cli:
    """`weightyard …`; `cli(…)` in this process, `cli.process(…)` as its own."""

    def __call__(self, *words: object) -> Ran:
        done = CliRunner().invoke(app, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Ran(done.exit_code, done.stdout, done.stderr)

    def ok(self, *words: object) -> str:
        """What a command that must succeed prints."""
        ran = self(*words)
        assert ran.code == 0, ran.out + ran.err
        return ran.out

    def json(self, *words: object) -> Any:
        return json.loads(self.ok(*words, "--json"))

    def refused(self, code: int, *words: object) -> str:
        """The one line with which a command that must fail does so."""
        ran = self(*words)
        assert ran.code == code, ran.out + ran.err
        assert ran.out == ""
        lines = [line for line in ran.err.splitlines() if not line.endswith(": trying again")]
        assert len(lines) == 1, ran.err
        return lines[0]

    def process(self, *words: object, name: str = "weightyard", **options: Any) -> Any:
        return subprocess.run(
            self.command(*words, name=name), capture_output=True, text=True, timeout=120, **options
        )

    def command(self, *words: object, name: str = "weightyard") -> Sequence[str]:
        return [str(Path(sys.executable).with_name(name)), *map(str, words)]
