"""Reading one large file of HDFS into memory: our paths, the peers, the limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from blake3 import blake3

from bench.buffers import MIB
from bench.peers import native_client
from bench.rows import Planned, measure
from bench.samples import Kind, Row
from bench.site import Site

HDFS_BLOCK_BYTES = 128 * MIB
PATH = "/bench/reads/file"
HERE = "on this host"
"""The group of those who take the short circuit; all others read as from another host."""


def run(site: Site, length: int, repeat: int, done: Callable[[Row], object]) -> tuple[Row, ...]:
    digest = write_file(site, length)
    try:
        return measure(site, plan(length, digest), repeat, done)
    finally:
        native_client(site).delete(PATH)


def write_file(site: Site, length: int) -> str:
    """Random bytes, replication 1, in HDFS blocks as long as packs; returns their digest."""
    from hdfs_native import WriteOptions

    options = WriteOptions(
        block_size=HDFS_BLOCK_BYTES, replication=1, overwrite=True, create_parent=True
    )
    random, hasher = np.random.default_rng(1), blake3()
    with native_client(site).create(PATH, options) as file:
        for start in range(0, length, 16 * MIB):
            part = random.bytes(min(16 * MIB, length - start))
            hasher.update(part)
            file.write(part)
    return hasher.hexdigest()


def plan(length: int, digest: str) -> list[Planned]:
    """The rows, ours first."""

    checked = {"path": PATH, "digest": digest}

    def row(
        kind: Kind, who: str, way: str, task: str, options: Mapping[str, Any], here: bool = False
    ) -> Planned:
        # Clients that return bytes leave one no choice.
        is_fresh = options.get("is_fresh", task.startswith("peers.native"))
        group = HERE if here else ""
        return Planned(
            Row(kind, who, way, moved_bytes=length, is_fresh=is_fresh, group=group),
            task,
            {"length": length, **options},
            here=here,
        )

    def ours(kind: Kind, way: str, by: str, threads: int, is_fresh: bool = False) -> Planned:
        options = {**checked, "by": by, "threads": threads, "is_fresh": is_fresh}
        return row(kind, "weightyard", way, "ours.read_file", options, by == "short-circuit")

    def peer(
        who: str, way: str, task: str, threads: int | None = None, here: bool = False
    ) -> Planned:
        options = checked if threads is None else {**checked, "threads": threads}
        return row(Kind.PEER, who, way, f"peers.{task}", options, here)

    def limit(way: str, streams: int, by_sendfile: bool) -> Planned:
        options = {"streams": streams, "by_sendfile": by_sendfile}
        return row(Kind.LIMIT, "loopback socket", way, "loopback", options)

    return [
        ours(Kind.OURS, "direct, 1 thread", "direct", 1),
        ours(Kind.OURS, "direct, 4 threads", "direct", 4),
        ours(Kind.OURS, "direct, 1 thread, fresh memory", "direct", 1, is_fresh=True),
        ours(Kind.OURS, "direct, 4 threads, fresh memory", "direct", 4, is_fresh=True),
        ours(Kind.FALLBACK, "libhdfs, 4 threads", "libhdfs", 4),
        ours(Kind.FALLBACK, "hdfs-native, 4 threads", "hdfs-native", 4),
        ours(Kind.FALLBACK, "WebHDFS, 4 threads", "webhdfs", 4),
        peer("pyarrow with libhdfs", "1 thread", "libhdfs", 1),
        peer("pyarrow with libhdfs", "4 threads", "libhdfs", 4),
        peer("hdfs-native", "read", "native_whole"),
        peer("hdfs-native", "read_range, 4 threads", "native_ranges", 4),
        peer("hdfs (WebHDFS)", "InsecureClient.read, streaming", "webhdfs"),
        peer("hdfs dfs -get", "JVM start included, to a file in memory", "shell_get"),
        limit("sendall, 1 stream", 1, by_sendfile=False),
        limit("sendfile, 1 stream", 1, by_sendfile=True),
        limit("sendfile, 4 streams", 4, by_sendfile=True),
        ours(Kind.OURS, "short circuit, 1 thread", "short-circuit", 1),
        ours(Kind.OURS, "short circuit, 4 threads", "short-circuit", 4),
        ours(Kind.OURS, "short circuit, 4 threads, fresh memory", "short-circuit", 4, True),
        peer("pyarrow with libhdfs", "short circuit, 1 thread", "libhdfs", 1, here=True),
        peer("pyarrow with libhdfs", "short circuit, 4 threads", "libhdfs", 4, here=True),
    ]
