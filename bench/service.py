"""Many clients at once: resolving refs against a real `weightyard serve`."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.filling import MODEL, Filled, databases, fill
from bench.verdicts import verdict
from bench.worker import cpu_s
from weightyard.names import TokenName
from weightyard.records import Role
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry

CLIENTS = (1, 50, 200)
VERSIONS = 100
SECONDS = 10.0
WARM_UP_S = 2.0

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Seen:
    """What the clients saw together."""

    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def run(
    clients: Sequence[int], seconds: float, done: Callable[[Mapping[str, Any]], object]
) -> dict[str, Any]:
    """So many clients at once on each database, each asking again as soon as it is answered."""
    rows: list[dict[str, Any]] = []
    with databases() as urls:
        for name, url in urls.items():
            database = Database(url)
            fill(database, Filled(VERSIONS))
            token = Registry(database).create_token(TokenName("bench"), Role.READ, [MODEL.project])
            database.close()
            with _serving(url) as (pid, address):
                asyncio.run(_ask(address, token.secret, 8, WARM_UP_S))
                for count in clients:
                    before_s, began = cpu_s([pid]), time.perf_counter()
                    seen = asyncio.run(_ask(address, token.secret, count, seconds))
                    took_s = time.perf_counter() - began
                    used_s = cpu_s([pid]) - before_s
                    rows.append({"database": name, "clients": count, **_row(seen, took_s, used_s)})
                    done(rows[-1])
    return {"asked": claims(rows), "resolving": rows}


def claims(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether all who asked were answered, however many. Of how soon nothing was asked. Pure."""
    most = max(row["clients"] for row in rows)
    return [
        f"**{row['errors']}** errors with {most} clients on {row['database']}, 99 of 100 answers "
        f"within {row['p99 ms']:.0f} ms; asked: none{verdict(row['errors'] == 0)}"
        for row in rows
        if row["clients"] == most
    ]


def _row(seen: _Seen, took_s: float, used_s: float) -> dict[str, Any]:
    latencies_s = sorted(seen.latencies_s) or [float("nan")]
    answered = len(seen.latencies_s)
    return {
        "requests": answered,
        "errors": len(seen.errors),
        "requests/s": answered / took_s,
        "p50 ms": 1000 * latencies_s[len(latencies_s) // 2],
        "p99 ms": 1000 * latencies_s[int(len(latencies_s) * 0.99)],
        "service CPU ms a request": 1000 * used_s / max(1, answered),
        **({"first error": seen.errors[0]} if seen.errors else {}),
    }


@contextmanager
def _serving(url: str) -> Iterator[tuple[int, tuple[str, int]]]:
    """A service in a process of its own: its pid and where it listens."""
    with tempfile.TemporaryDirectory(prefix="weightyard-bench-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as said:
            serve = "from weightyard.cli import main; main()"
            process = subprocess.Popen(
                [sys.executable, "-c", serve, "serve", "--store", f"{folder}/store", "--port=0"],
                stderr=said,
                env={**os.environ, "WEIGHTYARD_DB": url, "WEIGHTYARD_HOME": folder},
            )
        try:
            yield process.pid, _address(process, log)
        finally:
            process.terminate()
            process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    end = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"on http://([\d.]+):(\d+)", log.read_text())
        if found is not None:
            return found[1], int(found[2])
        time.sleep(0.1)
    raise RuntimeError(f"the service did not start: {log.read_text()[-500:]}")


async def _ask(address: tuple[str, int], secret: str, clients: int, seconds: float) -> _Seen:
    seen = _Seen()
    end = time.monotonic() + seconds
    await asyncio.gather(
        *(_client(number, address, secret, end, seen) for number in range(clients))
    )
    return seen


async def _client(
    number: int, address: tuple[str, int], secret: str, end: float, seen: _Seen
) -> None:
    """One connection, kept alive. A client library would take more CPU than the service."""
    selectors = ("prod", "latest", f"v{number % VERSIONS + 1}")
    at = number
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError as why:
        seen.errors.append(str(why))
        return
    try:
        while time.monotonic() < end:
            selector = selectors[at % len(selectors)]
            at += 1
            began = time.perf_counter()
            writer.write(
                f"GET /api/v1/models/{MODEL}/resolve/{selector} HTTP/1.1\r\n"
                f"Host: {address[0]}\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()
            )
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
            if head.startswith(b"HTTP/1.1 200 ") and b'"digest"' in body:
                seen.latencies_s.append(time.perf_counter() - began)
            else:
                seen.errors.append(head.partition(b"\r\n")[0].decode(errors="replace"))
    except (OSError, EOFError, TimeoutError) as why:
        seen.errors.append(f"{type(why).__name__}: {why}"[:200])
    finally:
        writer.close()
