"""The store's contract against the compose cluster; exits with the tests' code.

Builds the images, starts HDFS and PostgreSQL, runs the tests in a container on their network and
takes everything down again, whatever happened. Needs a Docker engine with Compose, 1.29 or newer.
Arguments go to pytest: run_tests.py -k publish
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CONTRACT = "tests/storage/test_hdfs_store.py"
SERVICES = ("namenode", "datanode1", "datanode2", "datanode3", "postgres")
READY_CHECKS = (
    ("namenode", "python", "docker/hdfs.py", "check"),
    ("postgres", "pg_isready", "--quiet", "--username", "weightyard"),
)
READY_TIMEOUT_S = 180
TESTS_TIMEOUT_S = 900

HERE = Path(__file__).parent


def main(pytest_arguments: Sequence[str]) -> int:
    compose = (*_compose(), "--file", str(HERE / "compose.yaml"), "--project-name", "weightyard")
    # `tests` is in a profile of its own, so it is named: built and run, never just started.
    subprocess.run((*compose, "build", "namenode", "tests"), check=True)
    try:
        subprocess.run((*compose, "up", "--detach", *SERVICES), check=True)
        if not _wait_until_ready(compose):
            subprocess.run((*compose, "logs", "--tail", "40"), check=False)
            print(f"the cluster was not ready after {READY_TIMEOUT_S} s", file=sys.stderr)
            return 1
        tests = (*compose, "run", "--rm", "-T", "tests", CONTRACT, *pytest_arguments)
        return subprocess.run(tests, check=False, timeout=TESTS_TIMEOUT_S).returncode
    finally:
        subprocess.run((*compose, "down", "--volumes", "--remove-orphans"), check=False)


def _compose() -> Sequence[str]:
    """Compose v2 if Docker has it, else docker-compose."""
    for command in (("docker", "compose"), ("docker-compose",)):
        try:
            subprocess.run((*command, "version"), check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    sys.exit("neither `docker compose` nor `docker-compose` runs here")


def _wait_until_ready(compose: Sequence[str]) -> bool:
    waiting = list(READY_CHECKS)
    give_up = time.monotonic() + READY_TIMEOUT_S
    while waiting and time.monotonic() < give_up:
        service, *command = waiting[0]
        check = (*compose, "exec", "-T", service, *command)
        if subprocess.run(check, check=False, capture_output=True).returncode == 0:
            waiting.pop(0)
        else:
            time.sleep(1)
    return not waiting


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
