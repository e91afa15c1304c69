"""A push as users make it: files into HDFS, two copies, the version published and recorded."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from bench import peers
from bench.buffers import MIB
from bench.models import TENSOR_BYTES, make_model
from bench.reads import HDFS_BLOCK_BYTES
from bench.rows import Planned, measure
from bench.samples import Kind, Row
from bench.site import Site
from bench.worker import Action, Prepare
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.storage.final_name import sync
from weightyard.transfer.known import SETTLED_NS
from weightyard.transfer.writer import WriteOptions

FOLDER = "/bench/push"
COPIES = 2
STREAMS = WriteOptions().lanes
"""How many packs a push writes at once."""

FIRST, AGAIN = "first push", "second push"
_SCRATCH = "push-"


class _Push:
    """Pushes a folder to a yard, and remembers how much that stored."""

    def __init__(
        self,
        url: str,
        folder: str,
        scratch: Path,
        codec: Literal["auto", "raw"],
        is_second: bool,
        rehash: bool,
    ) -> None:
        """What a push remembers of files is in `scratch`: the next first push knows nothing."""
        settings = Settings(db=f"sqlite:///{scratch}/yard.db", cache=scratch / "cache")
        self._yard = open_yard(url, settings=settings)
        self._folder = folder
        self._codec: Literal["auto", "raw"] = codec
        self._rehash = rehash
        self._is_second = is_second
        self._pushes = 0
        self.stored_bytes = 0

    def __call__(self) -> Sequence[memoryview]:
        pushed = self._yard.push(
            self._folder,
            "bench/model",
            replication=COPIES,
            codec=self._codec,
            rehash=self._rehash,
        )
        self._pushes += 1
        self.stored_bytes = pushed.stored_bytes
        if self._is_second and self._pushes == 2 and pushed.packs_written:
            raise RuntimeError(f"the second push wrote {pushed.packs_written} packs")
        return []


def push(
    site: Site,
    *,
    folder: str,
    url: str,
    codec: Literal["auto", "raw"],
    is_second: bool = False,
    rehash: bool = False,
) -> Action:
    """`Yard.push` of a folder: read, hash, encode, prove, pack, publish, record."""
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=site.scratch))
    return _Push(f"{url}/{scratch.name}", folder, scratch, codec, is_second, rehash)


def write_streams(site: Site, *, file: str, path: str, streams: int) -> Action:
    """hdfs-native: the file cut into so many parts, each a file written by a thread of its own."""
    from hdfs_native import WriteOptions as NativeOptions

    # It takes any buffer but bytes one byte at a time: ten times slower.
    with open(file, "rb") as opened:
        pieces = list(iter(lambda: opened.read(4 * MIB), b""))
    share = -(-len(pieces) // streams)
    parts = [pieces[start : start + share] for start in range(0, len(pieces), share)]
    client = peers.native_client(site)
    options = NativeOptions(
        block_size=HDFS_BLOCK_BYTES, replication=COPIES, overwrite=True, create_parent=True
    )
    failed: list[BaseException] = []

    def write_part(number: int) -> None:
        try:
            with client.create(f"{path}.{number}", options) as out:
                for piece in parts[number]:
                    out.write(piece)
        except BaseException as why:  # noqa: BLE001 - told to the caller
            failed.append(why)

    def write() -> list[memoryview]:
        threads = [
            threading.Thread(target=write_part, args=(number,)) for number in range(len(parts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return []

    return write


TASKS: Mapping[str, Prepare] = {"push.push": push, "push.write_streams": write_streams}


def run(site: Site, length: int, repeat: int, done: Callable[[Row], object]) -> tuple[Row, ...]:
    """First pushes against hdfs-native writing the same file, and a second push of the same."""
    # On a disk, as a user's is: read from the page cache, whose pages are larger than tmpfs has.
    folder = Path(tempfile.mkdtemp(prefix="weightyard-bench-"))
    file = folder / "model.safetensors"
    make_model(file, length)
    sync(file)  # no row is to share the machine with its way to the disk
    time.sleep(SETTLED_NS / 1e9)  # only then is it recognised the next time
    length = max(1, length // TENSOR_BYTES) * TENSOR_BYTES
    url, path = f"{site.url}{FOLDER}", f"{FOLDER}/model.safetensors"
    clean = partial(_remove, site)

    def ours(way: str, group: str, **options: object) -> Planned:
        row = Row(Kind.OURS, "weightyard", way, length, group=group)
        wanted = {"folder": str(folder), "url": url, **options}
        return Planned(row, "push.push", wanted, clean)

    def native(who: str, way: str, streams: int) -> Planned:
        row = Row(Kind.PEER, who, way, length, group=FIRST)
        wanted = {"file": str(file), "path": path, "streams": streams, "is_repeatable": False}
        return Planned(row, "push.write_streams", wanted, clean)

    planned = [
        ours("push", FIRST, codec="auto", is_repeatable=False),
        ours("push, raw", FIRST, codec="raw", is_repeatable=False),
        native("hdfs-native", "one stream", 1),
        native(
            f"{STREAMS} of hdfs-native", f"{STREAMS} streams at once, as many as a push", STREAMS
        ),
        ours("the same again", AGAIN, codec="auto", is_second=True),
        ours("the same again, read again", AGAIN, codec="auto", is_second=True, rehash=True),
    ]
    try:
        return measure(site, planned, repeat, done)
    finally:
        clean()
        shutil.rmtree(folder)


def _remove(site: Site) -> None:
    peers.native_client(site).delete(FOLDER, recursive=True)
    for folder in Path(site.scratch).glob(f"{_SCRATCH}*"):
        shutil.rmtree(folder)
