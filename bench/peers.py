"""How others read a file of HDFS into memory: each in its natural or its fastest way."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.buffers import MIB, Team, touched
from bench.site import Site
from bench.worker import Action, Prepare


def webhdfs(site: Site, *, path: str, length: int) -> Action:
    """`hdfs.InsecureClient`, streaming into a buffer."""
    import hdfs

    client = hdfs.InsecureClient(site.namenode_http)
    into = touched(length)

    def read() -> list[memoryview]:
        at = 0
        with client.read(path, chunk_size=4 * MIB) as chunks:
            for chunk in chunks:
                into[at : at + len(chunk)] = chunk
                at += len(chunk)
        return [into[:at]]

    return read


def native_whole(site: Site, *, path: str, length: int) -> Action:
    """hdfs-native, the whole file by one call."""
    client = native_client(site)
    return lambda: [client.read(path).read()]


def native_ranges(site: Site, *, path: str, length: int, threads: int) -> Action:
    """hdfs-native, ranges by several threads."""
    client, team = native_client(site), Team(threads)

    def read() -> list[bytes]:
        parts: dict[int, bytes] = {}
        file = client.read(path)

        def read_range(offset: int, length: int) -> None:
            parts[offset] = file.read_range(offset, length)

        team.share(length, read_range)
        return [parts[offset] for offset in sorted(parts)]

    return read


def native_client(site: Site) -> Any:
    import hdfs_native

    return hdfs_native.Client(site.url, config_dir=site.conf_dir)


def libhdfs(site: Site, *, path: str, length: int, threads: int) -> Action:
    """pyarrow's HadoopFileSystem: libhdfs and its JVM inside this process."""
    file_system = libhdfs_file_system(site)
    into, team = touched(length), Team(threads)

    def read() -> list[memoryview]:
        def read_range(offset: int, length: int) -> None:
            with file_system.open_input_file(path) as file:
                file.seek(offset)
                rest = into[offset : offset + length]
                while rest and (got := file.readinto(rest)):
                    rest = rest[got:]

        if threads == 1:
            read_range(0, length)
        else:
            team.share(length, read_range)
        return [into]

    return read


def libhdfs_file_system(site: Site) -> Any:
    from pyarrow.fs import HadoopFileSystem

    if site.libhdfs_missing:
        raise RuntimeError(site.libhdfs_missing)
    return HadoopFileSystem("default")


def shell_get(site: Site, *, path: str, length: int) -> Action:
    """`hdfs dfs -get`: a JVM started for it, into a file."""
    target = Path(site.scratch, "got")

    def read() -> list[memoryview]:
        target.unlink(missing_ok=True)
        subprocess.run(
            [*site.shell, "-get", path, str(target)], check=True, capture_output=True, timeout=300
        )
        if target.stat().st_size != length:
            raise RuntimeError("hdfs dfs -get left a file of another length")
        return [np.memmap(target, np.uint8, "r").data]

    return read


TASKS: Mapping[str, Prepare] = {
    "peers.webhdfs": webhdfs,
    "peers.native_whole": native_whole,
    "peers.native_ranges": native_ranges,
    "peers.libhdfs": libhdfs,
    "peers.shell_get": shell_get,
}
