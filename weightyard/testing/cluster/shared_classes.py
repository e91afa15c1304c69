"""An archive of loaded classes that all daemons share, which halves the work of starting them.

Measured on two cores: a cluster of four daemons takes 13 to 17 s of CPU to start without it and 8
to 10 s with it. Making it takes 13 s, so that is done in the background of the first cluster, at
the lowest priority, and never waited for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from weightyard.testing.cluster.daemon import ENVIRONMENT
from weightyard.testing.cluster.java import Java
from weightyard.testing.cluster.processes import Leash


def archive_of(java: Java) -> Path:
    """Where the archive for this Java lies, beside Hadoop's jars. It may not exist yet."""
    program = java.program.resolve()
    # Java silently ignores an archive that another Java made: so each Java has one of its own.
    key = f"{program} {program.stat().st_mtime_ns}"
    name = f"classes-{hashlib.blake2s(key.encode()).hexdigest()[:12]}.jsa"
    return java.jars[0].parent.parent / name


def sharing(java: Java) -> Java | None:
    """This Java with its archive in use; None while there is no archive."""
    archive = archive_of(java)
    if not archive.exists():
        return None
    return replace(java, options=(*java.options, f"-XX:SharedArchiveFile={archive}"))


def listing(java: Java, folder: Path) -> Java:
    """This Java, writing down in a folder which classes it loads."""
    lists = f"-XX:DumpLoadedClassList={folder}/classes-%p.list"
    return replace(java, options=(*java.options, lists))


@dataclass(frozen=True, slots=True)
class ArchiveInTheMaking:
    """A JVM at work on an archive."""

    process: subprocess.Popen[bytes]
    made: Path
    archive: Path

    @classmethod
    def begin(cls, java: Java, folder: Path, leash: Leash) -> Self | None:
        """Archive what the JVMs of this folder listed; None if that was done before."""
        archive = archive_of(java)
        if archive.exists():
            return None
        listed = folder / "classes.list"
        listed.write_text("".join(f"{name}\n" for name in _names_listed(folder)))
        made = folder / archive.name
        command = (
            *("nice", "-n", "19", str(java.program), "-XX:+UseSerialGC", "-Xshare:dump"),
            f"-XX:SharedClassListFile={listed}",
            f"-XX:SharedArchiveFile={made}",
            *("-cp", ":".join(map(str, java.jars))),
        )
        with (folder / "classes.log").open("wb") as log:
            process = leash.start(command, log=log, env=ENVIRONMENT, cwd=folder)
        return cls(process, made, archive)

    def finish(self) -> None:
        """Put the archive in its place if it is done; otherwise give up on it."""
        if self.process.poll() is None:
            self.process.kill()
        if self.process.wait() == 0:
            copy = self.archive.with_name(f"{self.archive.name}.{self.process.pid}")
            shutil.copyfile(self.made, copy)
            copy.rename(self.archive)


def _names_listed(folder: Path) -> dict[str, None]:
    """The class names in every list of a folder, each once, in order."""
    return {
        line: None
        for path in sorted(folder.glob("classes-*.list"))
        for line in path.read_text().splitlines()
        if line and line[0] not in "#@" and "source:" not in line
    }
