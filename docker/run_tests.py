"""The store's contract and the service's story against the compose cluster; exits 0 if both hold.

Builds the images, starts HDFS, PostgreSQL and the service, runs the tests in containers on their
networks and takes everything down again, whatever happened. Needs a Docker engine with Compose,
1.29 or newer. Arguments go to pytest: run_tests.py -k publish
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess
from typing import Any

CONTRACT = "tests/storage/test_hdfs_store.py"
STORES = ("namenode", "datanode1", "datanode2", "datanode3", "postgres")
STORES_READY = (
    ("namenode", "python", "docker/daemons.py", "check"),
    ("postgres", "pg_isready", "--quiet", "--host", "127.0.0.1", "--username", "weightyard"),
)
SERVICE_READY = (
    "weightyard",
    *("python", "-c"),
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8600/api/v1/ready', timeout=5)",
)
READY_TIMEOUT_S = 180
STEP_TIMEOUT_S = 300
LONG_STEP_TIMEOUT_S = 1800
RUN = ("run", "--rm", "-T")

HERE = Path(__file__).parent


def main(pytest_arguments: Sequence[str]) -> int:
    compose = Compose()
    try:
        # What is in the profile `tests` is named here: built and run, never just started.
        compose("build", "namenode", "weightyard", "tests", timeout_s=LONG_STEP_TIMEOUT_S)
        compose("up", "--detach", *STORES)
        compose.wait_until_ready(*STORES_READY)
        compose(*RUN, "tests", CONTRACT, *pytest_arguments, timeout_s=LONG_STEP_TIMEOUT_S)
        tell_story(compose)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, NotReady) as why:
        print(f"failed: {why}", file=sys.stderr)
        compose.attempt("logs", "--tail", "40")
        return 1
    finally:
        compose.attempt("down", "--volumes", "--remove-orphans")
    return 0


def tell_story(compose: Compose) -> None:
    """A model through the service, from outside HDFS and from inside, and over a restart."""
    compose(*RUN, "weightyard", "init")
    if compose.succeeds(*RUN, "weightyard", "serve", "--host", "0.0.0.0"):
        raise NotReady("the service runs without a token, open to everyone")
    secret = compose.output(
        *RUN, "weightyard", "token", "create", "story", "--role", "admin", "--quiet"
    )
    # By the environment: command lines are for everyone to see.
    compose.environment["WEIGHTYARD_TOKEN"] = secret
    with_token = (*RUN, "-e", "WEIGHTYARD_TOKEN")
    compose("up", "--detach", "weightyard")
    compose.wait_until_ready(SERVICE_READY)
    compose(*with_token, "outsider", "send")
    compose(*with_token, "insider", "push")
    compose("restart", "weightyard")
    compose.wait_until_ready(SERVICE_READY)
    compose(*with_token, "outsider", "again")


class NotReady(Exception):
    """Something did not become as it should be."""


class Compose:
    """Compose v2 if Docker has it, else docker-compose, on the project's file."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        file = str(HERE / "compose.yaml")
        self._command = (*_installed(), "--file", file, "--project-name", "weightyard")

    def __call__(self, *arguments: str, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._subprocess(arguments, check=True, timeout=timeout_s)

    def attempt(self, *arguments: str) -> None:
        """For what comes after a failure, and must not hide it."""
        try:
            self(*arguments)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as why:
            print(f"also failed: {why}", file=sys.stderr)

    def succeeds(self, *arguments: str) -> bool:
        done = self._subprocess(
            arguments, check=False, timeout=STEP_TIMEOUT_S, stdout=DEVNULL, stderr=DEVNULL
        )
        return done.returncode == 0

    def output(self, *arguments: str) -> str:
        done = self._subprocess(arguments, check=True, timeout=STEP_TIMEOUT_S, stdout=PIPE)
        return done.stdout.decode().strip()

    def wait_until_ready(self, *checks: Sequence[str]) -> None:
        """Until each command succeeds in the service it begins with."""
        give_up = time.monotonic() + READY_TIMEOUT_S
        for service, *command in checks:
            while not self.succeeds("exec", "-T", service, *command):
                if time.monotonic() > give_up:
                    raise NotReady(f"{service} was not ready after {READY_TIMEOUT_S} s")
                time.sleep(1)

    def _subprocess(self, arguments: Sequence[str], **options: Any) -> CompletedProcess[bytes]:
        command = (*self._command, *arguments)
        return subprocess.run(command, env=self.environment, **options)


def _installed() -> Sequence[str]:
    for command in (("docker", "compose"), ("docker-compose",)):
        try:
            subprocess.run((*command, "version"), check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    sys.exit("neither `docker compose` nor `docker-compose` runs here")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
