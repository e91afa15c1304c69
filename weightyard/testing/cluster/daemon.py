"""One Hadoop daemon: a process a test can kill, pause and bring back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightyard.errors import ClusterFailed
from weightyard.testing.cluster.configuration import DaemonPlan
from weightyard.testing.cluster.processes import Leash, ProcessIdentity

LOG_TAIL_LINES = 30

_GONE_S = 60.0

# A daemon needs a path for `id` and `df`; anything else of the caller's environment, such as
# HADOOP_USER_NAME or JAVA_TOOL_OPTIONS, would make it another daemon than the one planned.
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}


@dataclass(slots=True, eq=False)
class Daemon:
    """A daemon of a running cluster."""

    plan: DaemonPlan
    folder: Path
    """Its configuration, its data and its log."""
    command: Sequence[str]
    leash: Leash
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _identity: ProcessIdentity | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def identity(self) -> ProcessIdentity:
        """Which process it is. Raises ClusterFailed if it was never started."""
        if self._identity is None:
            raise ClusterFailed(f"{self.name} is not running")
        return self._identity

    @property
    def is_running(self) -> bool:
        """Whether there is a process; a paused one is there."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process. Returns at once: being ready is the cluster's business."""
        if self.is_running:
            raise ClusterFailed(f"{self.name} is running already")
        with self.log.open("ab") as log:
            self._process = self.leash.start(
                self.command, log=log, env=ENVIRONMENT, cwd=self.folder
            )
        self._identity = ProcessIdentity.of(self._process.pid)

    def kill(self) -> None:
        """`kill -9`, and wait until it is gone. Does nothing if it is gone already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_GONE_S)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self.identity.send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: go on after `pause`."""
        self.identity.send(signal.SIGCONT)

    def log_tail(self) -> str:
        return tail(self.log)


def tail(log: Path) -> str:
    """The last lines of a log, for a message that says why."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(lines[-LOG_TAIL_LINES:])
