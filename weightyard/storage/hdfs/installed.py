"""What is installed of Hadoop on this host, for libhdfs: its library, and its classes."""

from __future__ import annotations

import os
import subprocess

from weightyard.errors import Unsupported
from weightyard.settings import Settings

_LIMIT_S = 30.0
"""`hadoop` is a shell script that starts a JVM to list files."""

_MAX_CLASSPATH_BYTES = 100 * 1024
"""Linux takes 128 KiB for one variable."""


def has_libhdfs(settings: Settings) -> bool:
    folders = [settings.libhdfs_dir] if settings.libhdfs_dir else []
    if settings.hadoop_home:
        folders.append(settings.hadoop_home / "lib" / "native")
    return any((folder / "libhdfs.so").is_file() for folder in folders)


def provide_classes(settings: Settings) -> None:
    """Set CLASSPATH by what the installed Hadoop says, unless it is set. Raises Unsupported.

    libhdfs's JVM finds Hadoop's classes in no other way, and knows no `*` in it: hence `--glob`.
    """
    if os.environ.get("CLASSPATH") or settings.hadoop_home is None:
        return
    command = [str(settings.hadoop_home / "bin" / "hadoop"), "classpath", "--glob"]
    asked = " ".join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as why:
        said = (why.stderr or why.stdout).strip().rpartition("\n")[2]
        raise Unsupported(f"`{asked}` failed: {said[:300]}; set CLASSPATH to what it says") from why
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as why:
        raise Unsupported(f"`{asked}`: {why}; set CLASSPATH to what it says") from why
    classes = done.stdout.strip()
    if not classes or "\n" in classes or len(classes) > _MAX_CLASSPATH_BYTES:
        raise Unsupported(f"`{asked}` names no classes; set CLASSPATH")
    os.environ["CLASSPATH"] = classes
