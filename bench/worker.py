"""A measuring process: reads a task from standard input, does it, prints a sample.

A task is prepared (clients connected, memory touched) and, where it can be repeated, done once
untimed before it counts, so that no row pays for a cold JVM or a cold DataNode.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from blake3 import blake3
from typing_extensions import Buffer

from bench.samples import Sample
from bench.site import Site

Action: TypeAlias = Callable[[], Sequence[Buffer]]
"""Does the task once; returns the bytes it got, in order, or nothing.

Where others than the DataNodes serve, it has their `server_pids`. What a `Sample` says beyond time,
CPU and memory it may have as an attribute of that name.
"""

Prepare: TypeAlias = Callable[..., Action]
"""Called as `prepare(site, **options)`."""


_TOLD = ("stored_bytes", "read_bytes", "first_s", "went_wrong")


class Request(msgspec.Struct, frozen=True):
    """What a child is asked."""

    site: Site
    task: str
    options: dict[str, Any]


class WrongBytes(Exception):
    """A way of reading returned something else than was written."""


def sample(action: Action, pids: Sequence[int], digest: str | None, calls: int = 1) -> Sample:
    """Do it, and say what it cost; what takes a millisecond so often that it can be measured.

    Raises WrongBytes if the bytes are not the ones written.
    """
    before, began = (own_cpu_s(), cpu_s(pids), machine_cpu_s()), time.perf_counter()
    for _ in range(calls):
        received = action()
    seconds = (time.perf_counter() - began) / calls
    after = (own_cpu_s(), cpu_s(pids), machine_cpu_s())
    client_s, server_s, all_s = (
        (end - start) / calls for start, end in zip(before, after, strict=True)
    )
    result = Sample(
        seconds=seconds,
        client_cpu_s=client_s,
        server_cpu_s=server_s,
        peak_rss_bytes=peak_rss_bytes(),
        other_cpu_s=max(0.0, all_s - client_s - server_s),
        **{name: getattr(action, name) for name in _TOLD if hasattr(action, name)},
    )
    if digest is not None and digest_of(received) != digest:
        raise WrongBytes("the bytes read are not the bytes written")
    return result


def digest_of(parts: Sequence[Buffer]) -> str:
    """BLAKE3 of the parts, one after the other."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def own_cpu_s() -> float:
    """Of this process and of the children it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def cpu_s(pids: Sequence[int]) -> float:
    """Of other processes, to a hundredth of a second."""
    ticks = 0
    for pid in pids:
        # The name is in parentheses and may hold anything; user and system time are 11 fields on.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """Of all processes, and what the machine's host took away from it."""
    user, nice, system, _idle, _wait, *interrupts_and_stolen = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes() -> int:
    """Of this process since it began, or of a child it waited for, whichever is more."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return max(status_bytes("VmHWM"), children)


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def tasks() -> Mapping[str, Prepare]:
    """Every task by its name."""
    from bench import faults, link, loopback, memory, models, node, ours, peers, push, swap, yards

    parts = (ours, peers, loopback, models, memory, push, yards, link, node, swap, faults)
    return {name: task for part in parts for name, task in part.TASKS.items()}


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    options = dict(request.options)
    digest = options.pop("digest", None)
    is_repeatable = options.pop("is_repeatable", True)
    calls = options.pop("calls", 1)
    action = tasks()[request.task](request.site, **options)
    if is_repeatable:
        action()
    servers = getattr(action, "server_pids", request.site.datanode_pids)
    result = sample(action, servers, digest, calls)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(result) + b"\n")
    sys.stdout.flush()
    # A JVM in the process, or a client's threads, may take long to leave or crash on the way.
    os._exit(0)


if __name__ == "__main__":
    main()
