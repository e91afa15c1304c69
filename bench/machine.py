"""What the numbers were measured on: named by what it is, not by what it is called."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.samples import Measured
from weightyard.testing.cluster.jars import HADOOP_VERSION

_STEAL = 7
"""Its place among the times of /proc/stat."""

LIBRARIES = (
    "hdfs-native",
    "hdfs",
    "pyarrow",
    "numpy",
    "torch",
    "safetensors",
    "zstandard",
    "backports.zstd",
    "blake3",
    "xxhash",
    "blosc2",
    "zipnn",
    "SQLAlchemy",
    "psycopg",
    "FastAPI",
    "uvicorn",
)


def measured_now(shell: Sequence[str] = ()) -> Measured:
    """Date, machine and how busy it is. `shell` is a Java command line, to say which Java."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    hadoop = f"{HADOOP_VERSION} on Java {_java_version(shell[0])}" if shell else ""
    return Measured(today, describe(), round(os.getloadavg()[0], 1), hadoop)


class Stolen:
    """The share of the cores' time, from here on, that the host gave to other machines."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def share(self) -> float:
        ticks = [now - then for then, now in zip(self._before, _cpu_times(), strict=True)]
        return ticks[_STEAL] / max(1, sum(ticks))


def _cpu_times() -> list[int]:
    first = Path("/proc/stat").read_text().partition("\n")[0]
    return [int(ticks) for ticks in first.split()[1 : _STEAL + 2]]


def describe() -> dict[str, str]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "cores": str(len(os.sched_getaffinity(0))),
        "CPU": _cpu_model(),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "Python": platform.python_version(),
    }
    for library in LIBRARIES:
        try:
            facts[library] = version(library)
        except PackageNotFoundError:
            continue
    return facts


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _java_version(java: str) -> str:
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20)
    found = re.search(r'version "([^"]+)"', shown.stderr)
    return found[1] if found else "?"
