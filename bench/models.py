"""End to end: a model of bf16 tensors into HDFS, and back into tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from bench import peers
from bench.buffers import MIB, Team, fresh, touched
from bench.reads import HDFS_BLOCK_BYTES
from bench.rows import Planned, measure
from bench.samples import Kind, Row
from bench.site import Site
from bench.worker import Action, Prepare
from weightyard.format.assembly import manifest_of
from weightyard.format.block import DEFAULT_BLOCK_BYTES
from weightyard.format.manifest import Manifest, decode, encode
from weightyard.format.splitting import split_file
from weightyard.names import FilePath, PackId
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.opening import open_store
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.plan import wanted_of
from weightyard.transfer.reader import Reader, read_pack_index
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

WIDTH = 4096
TENSOR_BYTES = WIDTH * WIDTH * 2
FOLDER = "/bench/models"
HDFS_FILE = f"{FOLDER}/model.safetensors"


def make_model(file: Path, tensor_bytes: int) -> str:
    """Write a safetensors file of normally distributed weights; returns the tensors' digest."""
    random = np.random.default_rng(2)

    def words() -> bytes:
        weights = random.standard_normal(WIDTH * WIDTH, np.float32) * np.float32(0.02)
        return bf16_words(weights)

    return write_model(file, tensor_bytes, words)


def bf16_words(values: np.ndarray) -> bytes:
    """fp32 values cut to bf16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_model(file: Path, tensor_bytes: int, words: Callable[[], bytes]) -> str:
    """Write a safetensors file of tensors whose bytes `words` gives; returns their digest."""
    names = [f"layers.{n:03}.weight" for n in range(max(1, tensor_bytes // TENSOR_BYTES))]
    header = {
        name: {
            "dtype": "BF16",
            "shape": [WIDTH, WIDTH],
            "data_offsets": [n * TENSOR_BYTES, (n + 1) * TENSOR_BYTES],
        }
        for n, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    hasher = blake3()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _ in names:
            tensor = words()
            hasher.update(tensor)
            out.write(tensor)
    return hasher.hexdigest()


def write_packs(
    site: Site, *, file: str, url: str, compress: bool, replication: int, manifest: str | None
) -> Action:
    """Our writer, from memory: hash, encode, prove, pack, stage, publish, wait for replicas."""
    source = MemorySource(np.fromfile(file, np.uint8).data)
    store = open_store(url, Settings())
    store.init()
    options = WriteOptions(replication=replication, min_replicas=replication, compress=compress)

    def write() -> list[memoryview]:
        writer = Writer(store, MemoryCatalogue().upload(), options)
        path = FilePath("model.safetensors")
        split = split_file(path, source.length, source.read_at, DEFAULT_BLOCK_BYTES)
        written = manifest_of([split], writer.write([Content(split, [source])]))
        if manifest is not None:
            Path(manifest).write_bytes(encode(written)[1])
        return []

    return write


def write_stream(site: Site, *, file: str, path: str, replication: int) -> Action:
    """hdfs-native, from memory, one file in one stream."""
    from hdfs_native import WriteOptions as NativeOptions

    # It takes any buffer but bytes one byte at a time: ten times slower.
    with open(file, "rb") as opened:
        pieces = list(iter(lambda: opened.read(4 * MIB), b""))
    client = peers.native_client(site)
    options = NativeOptions(
        block_size=HDFS_BLOCK_BYTES, replication=replication, overwrite=True, create_parent=True
    )

    def write() -> list[memoryview]:
        with client.create(path, options) as out:
            for piece in pieces:
                out.write(piece)
        return []

    return write


def load_packs(site: Site, *, url: str, manifest: str, is_fresh: bool) -> Action:
    """Our reader: plan, fetch, check, decode into tensors. Placements are known, as in a yard."""
    store = open_store(url, Settings())
    content = decode(Path(manifest).read_bytes(), None)
    reader = Reader(store, catalogue_of(store))
    lengths = [_tensor_bytes(content, at) for at in range(len(content.tensors))]
    kept = None if is_fresh else [touched(length) for length in lengths]

    def load() -> list[memoryview]:
        buffers = [fresh(length) for length in lengths] if kept is None else kept
        reader.read(
            want
            for tensor, into in zip(content.tensors, buffers, strict=True)
            for box in tensor.boxes
            for want in wanted_of(content, box.extents, into)
        )
        as_tensors(buffers)
        return buffers

    return load


def catalogue_of(store: Store) -> MemoryCatalogue:
    """What the packs of a store say of themselves."""
    catalogue = MemoryCatalogue()
    for file in store.list(layout.PACKS):
        pack = PackId(file.path.text.rpartition("/")[2])
        catalogue.add_pack(pack, read_pack_index(store, pack))
    return catalogue


def _tensor_bytes(manifest: Manifest, at: int) -> int:
    return sum(extent.length for box in manifest.tensors[at].boxes for extent in box.extents)


def load_file(site: Site, *, by: str, path: str, length: int) -> Action:
    """A peer reads the safetensors file whole, safetensors parses it."""
    from safetensors.torch import load

    read = _whole_file(site, by, path)
    return lambda: as_bytes(load(read()))


def load_views(site: Site, *, by: str, path: str, length: int) -> Action:
    """The best a peer can do: the tensors are views of the bytes it read."""
    if by == "libhdfs":
        file_system, team = peers.libhdfs_file_system(site), Team(4)

        def read_ranges() -> memoryview:
            into = fresh(length)

            def read_range(offset: int, length: int) -> None:
                with file_system.open_input_file(path) as file:
                    file.seek(offset)
                    rest = into[offset : offset + length]
                    while rest and (got := file.readinto(rest)):
                        rest = rest[got:]

            team.share(length, read_range)
            return into

        return lambda: _views(read_ranges())
    read = _whole_file(site, by, path)
    return lambda: _views(memoryview(read()))


def load_got(site: Site, *, path: str, length: int) -> Action:
    """`hdfs dfs -get`, then safetensors maps the file it left."""
    from safetensors.torch import load_file as load_local

    get = peers.shell_get(site, path=path, length=length)

    def load() -> list[memoryview]:
        get()
        return as_bytes(load_local(Path(site.scratch, "got")))

    return load


def load_torch(site: Site, *, path: str, length: int) -> Action:
    """What people have written for years: WebHDFS into memory, then `torch.load`."""
    import io

    import torch

    read = _whole_file(site, "webhdfs", path)

    def load() -> list[memoryview]:
        return as_bytes(torch.load(io.BytesIO(read()), weights_only=True))  # noqa: TID251  a peer

    return load


def save_torch(site: Site, *, file: str, to: str) -> Action:
    """The same tensors as `torch.save` writes them."""
    import torch
    from safetensors.torch import load_file as load_local

    def save() -> list[memoryview]:
        torch.save(load_local(file), to)
        return []

    return save


def _whole_file(site: Site, by: str, path: str) -> Callable[[], bytes]:
    match by:
        case "libhdfs":
            file_system = peers.libhdfs_file_system(site)

            def read_libhdfs() -> bytes:
                with file_system.open_input_file(path) as file:
                    whole: bytes = file.read()
                return whole

            return read_libhdfs
        case "webhdfs":
            import hdfs

            client = hdfs.InsecureClient(site.namenode_http)

            def read_webhdfs() -> bytes:
                with client.read(path) as file:
                    whole: bytes = file.read()
                return whole

            return read_webhdfs
        case _:
            native = peers.native_client(site)
            return lambda: native.read(path).read()


def _views(data: memoryview) -> list[memoryview]:
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(bytes(data[8 : 8 + header_bytes]))
    start = 8 + header_bytes
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    views = [data[start + begin : start + end] for begin, end in spans]
    as_tensors(views)
    return views


def as_tensors(buffers: Sequence[memoryview]) -> list[Any]:
    """Tensors that share the buffers' memory."""
    import torch

    return [torch.frombuffer(buffer, dtype=torch.bfloat16) for buffer in buffers]


def as_bytes(tensors: Mapping[str, Any]) -> list[memoryview]:
    """The memory of tensors, by their names in order."""
    import torch

    return [tensors[name].view(torch.uint8).numpy().data.cast("B") for name in sorted(tensors)]


TASKS: Mapping[str, Prepare] = {
    "models.write_packs": write_packs,
    "models.write_stream": write_stream,
    "models.load_packs": load_packs,
    "models.load_file": load_file,
    "models.load_views": load_views,
    "models.load_got": load_got,
    "models.load_torch": load_torch,
    "models.save_torch": save_torch,
}


def run_loading(
    site: Site, length: int, repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """Put a model into HDFS three ways, then read it back in all of them."""
    file = Path(site.scratch, "model.safetensors")
    digest = make_model(file, length)
    length = max(1, length // TENSOR_BYTES) * TENSOR_BYTES
    try:
        planned = []
        for name, compress in (("compressed", True), ("raw", False)):
            yard = {"url": f"{site.url}{FOLDER}/{name}", "manifest": f"{site.scratch}/{name}"}
            options = {"file": str(file), "compress": compress, "replication": 1, **yard}
            site.run_child("models.write_packs", {**options, "is_repeatable": False})
            for is_fresh in (False, True):
                way = f"{name} packs" + (", fresh memory" if is_fresh else "")
                planned.append(
                    Planned(
                        Row(Kind.OURS, "weightyard", way, length, is_fresh=is_fresh),
                        "models.load_packs",
                        {**yard, "is_fresh": is_fresh, "digest": digest},
                    )
                )
        put = {"file": str(file), "path": HDFS_FILE, "replication": 1}
        site.run_child("models.write_stream", {**put, "is_repeatable": False})
        options = {"path": HDFS_FILE, "length": file.stat().st_size, "digest": digest}
        for who, way, task, more in PEER_LOADS:
            row = Row(Kind.PEER, who, way, length, is_fresh=True)
            planned.append(Planned(row, task, {**options, **more}))
        return measure(site, planned, repeat, done)
    finally:
        _remove(site)


PEER_LOADS: Sequence[tuple[str, str, str, Mapping[str, str]]] = (
    ("pyarrow with libhdfs", "safetensors.load", "models.load_file", {"by": "libhdfs"}),
    ("pyarrow with libhdfs", "4 threads, views", "models.load_views", {"by": "libhdfs"}),
    ("hdfs-native", "safetensors.load", "models.load_file", {"by": "native"}),
    ("hdfs-native", "views", "models.load_views", {"by": "native"}),
    ("hdfs (WebHDFS)", "safetensors.load", "models.load_file", {"by": "webhdfs"}),
    ("hdfs dfs -get", "safetensors.load_file", "models.load_got", {}),
)


def run_writing(
    site: Site, length: int, repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """Write the same model with one and with two copies."""
    file = Path(site.scratch, "model.safetensors")
    make_model(file, length)
    length = max(1, length // TENSOR_BYTES) * TENSOR_BYTES
    once: dict[str, Any] = {"file": str(file), "is_repeatable": False}
    planned = []
    for copies in (1, 2):
        on = f"replication {copies}"
        clean = partial(_remove, site, keep=file)
        for name, compress in (("compressed", True), ("raw", False)):
            options = {
                "url": f"{site.url}{FOLDER}/{name}-{copies}",
                "manifest": None,
                "compress": compress,
                "replication": copies,
            }
            row = Row(Kind.OURS, "weightyard", f"{name} packs, {on}", length, group=on)
            planned.append(Planned(row, "models.write_packs", {**once, **options}, clean))
        row = Row(Kind.PEER, "hdfs-native", f"one stream, {on}", length, group=on)
        options = {"path": HDFS_FILE, "replication": copies}
        planned.append(Planned(row, "models.write_stream", {**once, **options}, clean))
    try:
        return measure(site, planned, repeat, done)
    finally:
        _remove(site)


def _remove(site: Site, keep: Path | None = None) -> None:
    peers.native_client(site).delete(FOLDER, recursive=True)
    for file in Path(site.scratch).iterdir():
        if file.is_file() and file != keep:
            file.unlink()
