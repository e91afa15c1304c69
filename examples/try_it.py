"""Push an example model into the embedded yard, serve it, and say what to try.

python examples/try_it.py            serves until Ctrl-C
CI=true python examples/try_it.py    runs what it would have you try, once, and ends
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from first_model import make_model

from weightyard.errors import NoSuchThing
from weightyard.opening import open_yard
from weightyard.settings import Settings

MODEL = "example/tiny"
FIRST_PORT = 8600
COMMAND = str(Path(sys.executable).with_name("weightyard"))


def main() -> None:
    # Other WEIGHTYARD_ variables of this shell are about other yards.
    settings = Settings(url=None, store=None, db=None)
    is_watched = sys.stdin.isatty() and not os.environ.get("CI")
    with tempfile.TemporaryDirectory(prefix="weightyard-") as scratch:
        push_example(settings, Path(scratch))
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        tries = what_to_try(url, "tiny" if is_watched else f"{scratch}/tiny")
        log = Path(scratch) / "service.log"
        with log.open("wb") as stderr:
            service = subprocess.Popen(
                [COMMAND, "serve", "--store", str(settings.home / "store"), "--port", str(port)],
                env=_without_yards(),
                stderr=stderr,
            )
        try:
            wait_until_ready(service, url, log)
            show(url, tries)
            if is_watched:
                service.wait()
            else:
                for line in tries:
                    print(f"$ {line}", flush=True)
                    subprocess.run(line, shell=True, check=True, env=_in_terminal(url))
        except KeyboardInterrupt:
            print("\nStopped. What you pushed is kept.")
        finally:
            end(service)


def push_example(settings: Settings, scratch: Path) -> None:
    """Two versions of a small model, unless they are there from last time."""
    with open_yard(settings=settings) as yard:
        try:
            yard.resolve(f"{MODEL}@v2")
        except NoSuchThing:
            for name, tuned in (("base", False), ("tuned", True)):
                make_model(scratch / name, tuned=tuned, width=1024)
            yard.push(scratch / "base", MODEL, alias="prod", message="the base model")
            parent = f"{MODEL}@v1"
            tuned_version = yard.push(
                scratch / "tuned", MODEL, parent=parent, message="last layer tuned"
            )
            print(
                f"Pushed {MODEL} twice. The second has {_mib(tuned_version.logical_bytes)}; "
                f"{_mib(tuned_version.stored_bytes)} had to be stored."
            )


def what_to_try(url: str, folder: str) -> list[str]:
    """Lines for a shell in which WEIGHTYARD_URL names the service."""
    command, has_curl = os.path.relpath(COMMAND), shutil.which("curl") is not None
    return [
        f"{command} ls {MODEL}",
        f"{command} diff {MODEL}@v1 {MODEL}@v2",
        f"{command} alias set {MODEL} prod v2 --reason 'looks better'",
        f"{command} pull {MODEL}@prod {shlex.quote(folder)}",
        *([f"curl -fsS -w '\\n' {url}/api/v1/models/{MODEL}"] if has_curl else []),
    ]


def show(url: str, tries: list[str]) -> None:
    print(f"\nweightyard serves on {url}. In a second terminal:\n")
    print(f"  export WEIGHTYARD_URL={url}")
    for line in tries:
        print(f"  {line}")
    print("\nCtrl-C ends it.\n", flush=True)


def free_port() -> int:
    """The first one free from FIRST_PORT on."""
    for port in range(FIRST_PORT, FIRST_PORT + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise SystemExit(f"no port is free from {FIRST_PORT} on")


def wait_until_ready(service: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end_by = time.monotonic() + 30
    while service.poll() is None and time.monotonic() < end_by:
        try:
            if httpx.get(f"{url}/api/v1/ready", timeout=2, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit(f"The service did not start:\n{log.read_text()}")


def end(service: subprocess.Popen[bytes]) -> None:
    if service.poll() is None:
        service.send_signal(signal.SIGTERM)
    service.wait(timeout=30)


def _without_yards() -> dict[str, str]:
    others = ("WEIGHTYARD_URL", "WEIGHTYARD_STORE", "WEIGHTYARD_DB")
    return {name: value for name, value in os.environ.items() if name not in others}


def _in_terminal(url: str) -> dict[str, str]:
    return {**_without_yards(), "WEIGHTYARD_URL": url}


def _mib(amount: int) -> str:
    return f"{amount / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
