"""Processes that are known for certain, and that die with the one who started them.

Run as a program, this file is the watcher behind `Leash`; it imports the standard library alone,
so that starting it costs next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

_RELEASE = b"release\n"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process and never another: a pid alone may be given to a stranger later."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start, as in /proc/<pid>/stat."""
    boot: str
    """The kernel's id of this boot."""

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this pid now, or None if there is none."""
        fields = _stat_fields(pid)
        return cls(pid, int(fields[19]), _boot_id()) if fields else None

    @property
    def is_alive(self) -> bool:
        with self._held() as held:
            return held is not None

    def send(self, sign: signal.Signals) -> bool:
        """Signal it; False if it is gone. Never reaches another process."""
        with self._held() as held:
            if held is None:
                return False
            try:
                signal.pidfd_send_signal(held, sign)
            except ProcessLookupError:
                return False
            return True

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether it is gone, at the latest after this time."""
        with self._held() as held:
            return held is None or bool(select.select([held], [], [], timeout_s)[0])

    @contextlib.contextmanager
    def _held(self) -> Iterator[int | None]:
        """A handle that keeps meaning this process, or None if it is gone."""
        try:
            held = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # The comparison comes after the handle: from here on the pid cannot change hands.
            fields = _stat_fields(self.pid)
            same = bool(fields) and int(fields[19]) == self.start_ticks and _boot_id() == self.boot
            yield held if same and fields[0] not in "ZX" else None
        finally:
            os.close(held)


class Leash:
    """Ends what was started on it when this process ends, however it ends.

    A watcher process holds the reading end of a pipe. When this process is gone, even by
    `kill -9`, the kernel closes the other end; the watcher then kills what was started and
    removes the folder. (PR_SET_PDEATHSIG would fire as soon as the *thread* that started a
    daemon ends.)
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *([str(folder)] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def start(
        self, command: Sequence[str], *, log: BinaryIO, env: Mapping[str, str], cwd: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, its output going to a log."""
        # The shell reports its pid, which the command keeps, before the command exists. Until
        # then it holds the pipe open itself: there is no moment at which it could be forgotten.
        return subprocess.Popen(
            ["/bin/sh", "-c", 'echo $$ >&0 && exec "$@" </dev/null', "sh", *command],
            stdin=self._pipe,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )

    def release(self) -> None:
        """Let everything live on: the watcher leaves without touching it."""
        self._pipe.write(_RELEASE)
        self.close()

    def close(self) -> None:
        """End what is still running. Idempotent."""
        if not self._pipe.closed:
            self._pipe.close()
        self._watcher.wait()

    @property
    def _pipe(self) -> BinaryIO:
        pipe = self._watcher.stdin
        assert pipe is not None
        return pipe  # type: ignore[return-value]


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()  # the command's name may hold spaces and brackets


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _watch(reports: BinaryIO, folder: Path | None) -> None:
    """Read pids until the other side closes, then end them."""
    started: list[ProcessIdentity] = []
    for line in reports:
        if line == _RELEASE:
            return
        if one := ProcessIdentity.of(int(line)):
            started.append(one)
    for one in started:
        one.send(signal.SIGKILL)
    for one in started:
        one.wait_gone(10)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(sys.stdin.buffer, Path(sys.argv[1]) if len(sys.argv) > 1 else None)
