"""libhdfs, Hadoop's C client: built from source, because Hadoop's jars do not carry it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightyard.settings import Settings

CRATE = "hdfs-sys"
"""A Rust binding that carries libhdfs' C sources; only those are used."""
CRATE_VERSION = "0.3.0"
SOURCES_VERSION = "hdfs_3_3"

_CARGO_TOML = f"""\
[package]
name = "fetch"
version = "0.0.0"
edition = "2021"
[lib]
path = "empty.rs"
[dependencies]
{CRATE} = "={CRATE_VERSION}"
"""
_SOURCES = (
    "exception.c",
    "jni_helper.c",
    "hdfs.c",
    "jclasses.c",
    "os/posix/mutexes.c",
    "os/posix/thread.c",
    "os/posix/thread_local_storage.c",
)
_TIMEOUT_S = 300


class CannotBuild(Exception):
    """libhdfs could not be had; says why."""


@dataclass(frozen=True, slots=True)
class Libhdfs:
    """A built library and the Java it is linked with."""

    folder: Path
    java_home: Path

    def environment(self, conf_dir: Path, jars: Sequence[Path]) -> Mapping[str, str]:
        """What a process must find set before it loads the library."""
        return {
            "ARROW_LIBHDFS_DIR": str(self.folder),
            "JAVA_HOME": str(self.java_home),
            "CLASSPATH": os.pathsep.join(map(str, (conf_dir, *jars))),
        }


def build(settings: Settings) -> Libhdfs:
    """The library, from the cache or built now. Raises CannotBuild."""
    java_home = _find_jdk(settings)
    folder = settings.cache / f"libhdfs-{CRATE_VERSION}-{java_home.name}"
    if not (folder / "libhdfs.so").is_file():
        settings.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="libhdfs.", dir=settings.cache) as scratch:
            built = _compile(_fetch(Path(scratch)), java_home, Path(scratch))
            folder.mkdir(exist_ok=True)
            built.replace(folder / "libhdfs.so")
    return Libhdfs(folder, java_home)


def _find_jdk(settings: Settings) -> Path:
    """A JDK with C headers; the Java that only runs programs has none."""
    compiler = shutil.which("javac")
    on_path = Path(compiler).resolve().parent.parent if compiler else None
    for home in filter(None, (settings.java_home, on_path)):
        if (home / "include" / "jni.h").is_file() and (home / "lib/server/libjvm.so").is_file():
            return home
    raise CannotBuild("no JDK with C headers in JAVA_HOME or on the path")


def _fetch(scratch: Path) -> Path:
    (scratch / "Cargo.toml").write_text(_CARGO_TOML)
    (scratch / "empty.rs").touch()
    _run("cargo", "vendor", "--quiet", "vendor", cwd=scratch)
    return scratch / "vendor" / CRATE / "libhdfs" / SOURCES_VERSION


def _compile(sources: Path, java_home: Path, scratch: Path) -> Path:
    includes = (
        sources.parent,
        *(sources / part for part in ("", "include", "os", "os/posix")),
        *(java_home / "include" / part for part in ("", "linux")),
    )
    jvm = java_home / "lib" / "server"
    built = scratch / "libhdfs.so"
    _run(
        "gcc",
        *("-shared", "-fPIC", "-O2", "-w", "-fcommon"),
        *(f"-I{folder}" for folder in includes),
        *(str(sources / name) for name in _SOURCES),
        *(f"-L{jvm}", "-ljvm", f"-Wl,-rpath,{jvm}", "-o", str(built)),
        cwd=scratch,
    )
    return built


def _run(*command: str, cwd: Path) -> None:
    if shutil.which(command[0]) is None:
        raise CannotBuild(f"{command[0]} is not installed")
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"{command[0]} did not finish in {_TIMEOUT_S} s") from None
    if done.returncode:
        raise CannotBuild(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
