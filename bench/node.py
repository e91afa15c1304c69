"""Loading what is on this node: a snapshot, or an embedded yard; against who reads local files."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.models import as_bytes
from bench.prepared import PLANES, RAW, Prepared, pushed
from bench.rows import Planned, measure
from bench.samples import Kind, Row
from bench.site import Site
from bench.worker import Action, Prepare
from bench.yards import MODEL, opened
from weightyard.format.block import CHUNK_BYTES

COPIED = "load_file, copied"
ALL_CHECKED = "raw, cache=False: all checked"
CHECKED = "of every chunk of the mapped file"
FIRST_USE, LAST_BYTE = "to first use", "to the last byte"
CALLS = {FIRST_USE: 100, LAST_BYTE: 1}
"""One call that takes a millisecond tells more of the machine's mood than of who was called."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Tensors = Mapping[str, Any]


def touch(tensors: Tensors, upto: str) -> Sequence[memoryview]:
    """Have the first element in hand, or a byte of every page: mapped files are read only then."""
    memory = as_bytes(tensors)
    if upto == FIRST_USE:
        bytes(memory[0][:1])
    else:
        for one in memory:
            bytes(one[::_PAGE_BYTES])
    return memory


def load_snapshot(site: Site, *, url: str, folder: str, upto: str) -> Action:
    """`Yard.load` where this node has a snapshot."""
    yard = opened(url, folder)

    def load() -> Sequence[memoryview]:
        weights = yard.load(MODEL)
        if not weights.report.from_snapshot:
            raise RuntimeError("there was no snapshot")
        return touch(weights, upto)

    return load


def load_safetensors(site: Site, *, file: str, upto: str = LAST_BYTE) -> Action:
    from safetensors.torch import load_file

    return lambda: touch(load_file(file), upto)


def copy_safetensors(site: Site, *, file: str) -> Action:
    from safetensors.torch import load_file

    def load() -> Sequence[memoryview]:
        copied = {name: tensor.clone() for name, tensor in load_file(file).items()}
        return touch(copied, LAST_BYTE)

    return load


def load_streamer(site: Site, *, file: str) -> Action:
    """Run:ai's Model Streamer; the tensors are the caller's."""
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Sequence[memoryview]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(file)
            return touch(dict(streamer.get_tensors()), LAST_BYTE)

    return load


def load_fastsafetensors(site: Site, *, file: str) -> Action:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    # Closing frees what the tensors lie in; the last two are open while they are compared.
    opened_files: list[tuple[Any, Any]] = []

    def load() -> Sequence[memoryview]:
        for one in opened_files:
            for part in one:
                part.close()
        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: [file]})
        buffers = loader.copy_files_to_device()
        opened_files[:] = [(buffers, loader)]
        return touch({name: buffers.get_tensor(name) for name in loader.get_keys()}, LAST_BYTE)

    return load


def load_tensorizer(site: Site, *, file: str) -> Action:
    """Its own format: the first child makes a file of it beside the other."""
    from safetensors.torch import load_file
    from tensorizer import TensorDeserializer, TensorSerializer

    own = f"{file}.tensors"
    if not Path(own).exists():
        serializer = TensorSerializer(own)
        serializer.write_state_dict(load_file(file))
        serializer.close()

    def load() -> Sequence[memoryview]:
        with TensorDeserializer(own, device="cpu") as tensors:
            return touch(dict(tensors.items()), LAST_BYTE)

    return load


def check_mapped(site: Site, *, file: str) -> Action:
    """Map the file and sum every chunk of it, by as many threads as there are cores."""
    from xxhash import xxh3_64_intdigest

    cores = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(cores)

    def check() -> list[memoryview]:
        with open(file, "rb") as opened_file:
            mapped = memoryview(mmap.mmap(opened_file.fileno(), 0, prot=mmap.PROT_READ))
        chunks = [mapped[at : at + CHUNK_BYTES] for at in range(0, len(mapped), CHUNK_BYTES)]
        list(pool.map(lambda some: [xxh3_64_intdigest(one) for one in some], _dealt(chunks, cores)))
        return []

    return check


def _dealt(chunks: list[memoryview], hands: int) -> list[list[memoryview]]:
    return [chunks[hand::hands] for hand in range(hands)]


TASKS: Mapping[str, Prepare] = {
    "node.check_mapped": check_mapped,
    "node.load_snapshot": load_snapshot,
    "node.load_safetensors": load_safetensors,
    "node.copy_safetensors": copy_safetensors,
    "node.load_streamer": load_streamer,
    "node.load_fastsafetensors": load_fastsafetensors,
    "node.load_tensorizer": load_tensorizer,
}


def run_node(
    site: Site, length: int, repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """The second load on a node, which maps what the first left, against mapping a file."""
    with pushed(site, length, PLANES, snapshot=True) as model:
        planned = []
        for upto in (FIRST_USE, LAST_BYTE):
            more = {"upto": upto, "digest": model.digest, "calls": CALLS[upto]}
            ours = Row(Kind.OURS, "weightyard", "snapshot", model.length, group=upto)
            planned.append(Planned(ours, "node.load_snapshot", {**model.yards[PLANES], **more}))
            peer = Row(Kind.PEER, "safetensors", "load_file", model.length, group=upto)
            options = {"file": str(model.file), **more}
            planned.append(Planned(peer, "node.load_safetensors", options))
        return measure(site, planned, repeat, done)


def run_local(
    site: Site, length: int, repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """The embedded default against those who read files of a disk."""
    with (
        tempfile.TemporaryDirectory(prefix="weightyard-bench-") as folder,
        pushed(site, length, RAW, PLANES, folder=folder) as model,
    ):
        return measure(site, _local_rows(model), repeat, done)


def _local_rows(model: Prepared) -> list[Planned]:
    planned = [
        Planned(
            Row(Kind.OURS, "weightyard", way, model.length),
            "yards.load",
            {**model.yards[codec], "digest": model.digest, "cache": cache},
        )
        for codec, way, cache in (
            (RAW, RAW, True),
            (RAW, ALL_CHECKED, False),
            (PLANES, PLANES, False),
        )
    ]
    for who, way, task in (
        ("safetensors", "load_file", "load_safetensors"),
        ("safetensors", COPIED, "copy_safetensors"),
        ("runai-model-streamer", "SafetensorsStreamer", "load_streamer"),
        ("fastsafetensors", "SafeTensorsFileLoader, on the CPU", "load_fastsafetensors"),
        ("tensorizer", "TensorDeserializer", "load_tensorizer"),
    ):
        row = Row(Kind.PEER, who, way, model.length)
        options = {"file": str(model.file), "digest": model.digest}
        planned.append(Planned(row, f"node.{task}", options))
    limit = Row(Kind.LIMIT, "xxh3", CHECKED, model.length)
    planned.append(Planned(limit, "node.check_mapped", {"file": str(model.file)}))
    return planned
