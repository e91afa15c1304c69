"""Put a small model into a store, twice, and get it back bit for bit.

python examples/first_model.py                          in a folder that is removed afterwards
python examples/first_model.py --store hdfs://…/yard    in HDFS, and it stays there
"""

from __future__ import annotations

import argparse
import filecmp
import json
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from weightyard.format.block import DEFAULT_BLOCK_BYTES
from weightyard.storage import layout
from weightyard.storage.opening import open_store
from weightyard.transfer.catalogue import MemoryCatalogue
from weightyard.transfer.folder import read_folder, write_folder
from weightyard.transfer.reader import Reader
from weightyard.transfer.writer import Writer, WriteReport

LAYERS = 8
WIDTH = 2048


def make_model(folder: Path, *, tuned: bool, width: int = WIDTH) -> None:
    """A transformer-like model in bf16; the tuned one differs in its last layer only."""
    random = np.random.default_rng(1)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for layer in range(LAYERS):
        if tuned and layer == LAYERS - 1:
            random = np.random.default_rng(2)
        weights = random.normal(0, 0.02, (width, width)).astype(np.float32)
        tensors[f"layers.{layer}.weight"] = ("BF16", weights.shape, _as_bf16(weights))
        tensors[f"layers.{layer}.norm"] = ("F32", (width,), np.ones(width, "<f4").tobytes())
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"layers": LAYERS, "width": width}))


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """The format is a length, a JSON header and the data; bf16 needs no library this way."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = (data for _, _, data in tensors.values())
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *data]))


def _as_bf16(values: np.ndarray) -> bytes:
    """Rounded to the nearest; NumPy has no bf16 of its own."""
    words = values.view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2").tobytes()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--store", help="a folder or an hdfs:// URL; default: a temporary folder"
    )
    url = arguments.parse_args().store
    console = Console()
    with tempfile.TemporaryDirectory(prefix="weightyard-") as scratch_name:
        scratch = Path(scratch_name)
        with open_store(url or str(scratch / "yard")) as store:
            store.init()
            catalogue = MemoryCatalogue()
            table = Table("", "model", "new", "stored", "packs", "seconds", title=store.url)
            for name, tuned in (("first", False), ("fine-tuned", True), ("first again", False)):
                source = scratch / name
                make_model(source, tuned=tuned)
                began = time.perf_counter()
                upload = catalogue.upload()
                writer = Writer(store, upload)
                manifest = write_folder(writer, source, DEFAULT_BLOCK_BYTES)
                store.delete(layout.staging_folder(upload.id))
                table.add_row(name, *_row(writer.report, time.perf_counter() - began))
                read_folder(Reader(store, catalogue), manifest, scratch / "back" / name)
                same, different, missing = filecmp.cmpfiles(
                    source, scratch / "back" / name, [file.path for file in manifest.files], False
                )
                if different or missing:
                    raise SystemExit(f"{name}: {different + missing} came back different")
            console.print(table)
            console.print(f"Every file came back bit for bit ({len(same)} of each model).")


def _row(report: WriteReport, seconds: float) -> tuple[str, ...]:
    return (
        _mib(report.logical_bytes),
        _mib(report.new_bytes),
        _mib(report.stored_bytes),
        str(report.packs_written),
        f"{seconds:.2f}",
    )


def _mib(amount: int) -> str:
    return f"{amount / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
