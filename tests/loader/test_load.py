"""Loading tensors: what comes back, what is read for it, and what happens when it cannot be."""

from __future__ import annotations

import logging
import math
import re
import resource
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_world import BERT, bits, left_threads, noise, same, saved, sharded, yard_in
from waiting import SOON_S

import weightyard
from weightyard.errors import (
    BadSetting,
    BlockCorrupt,
    DeadlineExceeded,
    NoSuchThing,
    Refused,
    Unsupported,
)
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.loader.state import _TORCH, empty_tensor
from weightyard.loader.stored import Foreseen
from weightyard.storage.cancel import Cancel
from weightyard.transfer.watching import pause
from weightyard.yard import Yard

STATE = {
    "embed": noise(2000, 512),
    "head": noise(1000, 64, dtype=torch.float32, seed=1),
    "bias": noise(7, dtype=torch.float16, seed=2),
    "scalar": torch.tensor(3.5),
    "mask": torch.tensor([True, False, True]),
    "steps": torch.tensor([1, -2, 3]),
    "empty": torch.empty(0, 4, dtype=torch.bfloat16),
    "fp8": noise(100, dtype=torch.float8_e4m3fn, seed=3),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
}


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """A yard with `team/bert`: a 64 MiB matrix stored raw, and others."""
    with yard_in(tmp_path_factory.mktemp("big")) as opened:
        state = {
            "w": noise(8192, 4096),
            "small": noise(100, 100, seed=1),
            "experts": noise(16, 512, 1024, seed=2),
        }
        opened.push(state, BERT, codec="raw")
        yield opened


@pytest.mark.parametrize("codec", ["auto", "raw"])
def test_a_state_dict_comes_back_bit_for_bit(yard: Yard, codec: Any) -> None:
    pushed = yard.push(STATE, BERT, codec=codec)
    weights = yard.load(BERT)
    assert same(weights, STATE)
    assert weights.version.ref == pushed.ref
    assert weights["embed"].is_contiguous()


def test_tied_tensors_come_back_tied_also_after_a_cast(yard: Yard) -> None:
    shared = noise(100, 100)
    yard.push({"embed": shared, "head": shared, "other": noise(100, 100)}, BERT)
    for weights in (yard.load(BERT), yard.load(BERT, dtype="float32")):
        assert weights["embed"] is weights["head"]
        assert weights["other"] is not weights["head"]


def test_a_folder_gives_the_tensors_of_its_model(yard: Yard, tmp_path: Path) -> None:
    model = {"a": noise(300, 300), "b": noise(5)}
    saved(tmp_path / "m" / "model.safetensors", model)
    saved(tmp_path / "m" / "adapter" / "model.safetensors", {"a": noise(3)})
    yard.push(tmp_path / "m", BERT)
    assert same(yard.load(BERT), model)
    assert same(yard.load(BERT, files="adapter/*"), {"a": noise(3)})
    with pytest.raises(Refused, match="tensor a is in"):
        yard.load(BERT, files=["*.safetensors"])


def test_the_shards_of_an_index_are_one_model(yard: Yard, tmp_path: Path) -> None:
    first, second = {"l.2": noise(300, 300), "l.0": noise(3)}, {"l.10": noise(9)}
    sharded(tmp_path / "m", first, second)
    saved(tmp_path / "m" / "consolidated.safetensors", {"l.0": noise(3)})
    yard.push(tmp_path / "m", BERT)
    weights = yard.load(BERT)
    assert same(weights, first | second)
    assert list(weights) == ["l.0", "l.2", "l.10"]


def test_a_version_without_tensors_is_an_error_that_says_what_it_has(
    yard: Yard, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    yard.push(tmp_path / "config.json", BERT)
    with pytest.raises(NoSuchThing, match=r"config\.json"):
        yard.load(BERT)


def test_only_the_tensors_asked_for_are_read(big: Yard) -> None:
    weights = big.load(BERT, tensors=["*", "!w", "!experts"])
    assert list(weights) == ["small"]
    assert weights.report.stored_bytes < 2 * MIB
    with pytest.raises(NoSuchThing, match=r"'smell'.*small"):
        big.load(BERT, tensors="smell")


@pytest.mark.parametrize(
    "index",
    [
        slice(1000, 3000),
        slice(-100, None),
        5,
        (slice(10, 20), slice(0, 100)),
        (slice(None), slice(0, 100)),
        (slice(8000, 100, -700), slice(None, None, 3)),
        (..., 7),
        (8191, 4095),
        slice(3, 3),
    ],
    ids=str,
)
def test_a_slice_is_what_torch_slices_out(big: Yard, index: Any) -> None:
    whole = big.load(BERT, tensors="w")["w"]
    loaded = big.load(BERT, tensors="w", slices={"w": index})["w"]
    expected = bits(whole).numpy().view(np.uint16).reshape(whole.shape)[index]
    assert loaded.shape == expected.shape
    assert bits(loaded).numpy().tobytes() == expected.tobytes()


def test_rows_are_read_in_proportion(big: Yard) -> None:
    for rows in (1, 100, 1024, 4096):
        report = big.load(BERT, tensors="w", slices={"w": slice(2050, 2050 + rows)}).report
        wanted = rows * 8192
        assert report.bytes == wanted <= report.read_bytes <= wanted + 2 * MIB
        assert report.read_bytes % MIB == 0, "chunks are read whole"
        assert report.stored_bytes <= 1.1 * wanted + 2 * MIB


def test_every_box_of_a_slice_through_all_experts_is_read_in_proportion(big: Yard) -> None:
    half = big.load(BERT, tensors="experts", slices={"experts": (slice(3, 9, 5), ...)}).report
    assert half.bytes == half.read_bytes == 2 * MIB
    assert half.stored_bytes <= 1.1 * half.bytes + 2 * 2 * MIB


def test_columns_are_read_with_what_lies_between_and_the_report_says_so(big: Yard) -> None:
    report = big.load(BERT, tensors="w", slices={"w": (slice(None), slice(0, 1024))}).report
    assert report.bytes == 16 * MIB
    assert 3.9 < report.amplification <= 4.1


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_stripes_that_lie_apart_cost_a_chunk_each_and_the_report_says_so(
    yard: Yard, codec: Any
) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randint(0, 256, (16, 2 * MIB), dtype=torch.uint8, generator=generator)
    yard.push({"t": wide}, BERT, codec=codec)
    weights = yard.load(BERT, slices={"t": (slice(None), slice(0, 100))})
    assert same(weights, {"t": wide[:, :100]})
    report = weights.report
    assert (report.bytes, report.read_bytes, report.stored_bytes) == (1600, 16 * MIB, 16 * MIB)
    assert report.amplification == 16 * MIB / 1600
    assert report.stage_bytes == {"fetch": 16 * MIB, "decode": 16 * MIB}
    across = yard.load(BERT, slices={"t": (slice(3, 5), slice(MIB - 50, MIB + 50))}).report
    assert (across.bytes, across.read_bytes) == (200, 4 * MIB), "where two chunks meet"


def test_slices_go_by_pattern_and_one_that_does_not_fit_is_refused_unread(big: Yard) -> None:
    weights = big.load(BERT, slices={"*": slice(0, 2), "small": ...})
    assert [tuple(one.shape) for one in weights.values()] == [(2, 512, 1024), (100, 100), (2, 4096)]
    with pytest.raises(Refused, match="slice of tensor small: index 100"):
        big.load(BERT, slices={"small": 100})
    with pytest.raises(NoSuchThing, match="to slice fits 'q"):
        big.load(BERT, slices={"q*": 1})


def test_a_cast_is_that_of_torch_and_leaves_integers_alone(yard: Yard) -> None:
    yard.push(STATE, BERT)
    weights = yard.load(BERT, dtype=torch.float32)
    for name, stored in STATE.items():
        expected = stored.float() if stored.is_floating_point() else stored
        assert same({name: weights[name]}, {name: expected})
    with pytest.raises(Unsupported, match="float33"):
        yard.load(BERT, dtype="float33")


def test_a_cast_takes_little_memory_beside_its_result(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.push({f"layer.{n}": torch.full((2 << 20,), float(n)) for n in range(24)}, BERT)
    monkeypatch.setattr("weightyard.loader.budget.AHEAD_BYTES", 32 * MIB)
    fresh = partial(np.empty, dtype=np.uint8)  # which is seen below; what is mapped is not
    monkeypatch.setattr("weightyard.loader.state.fresh_memory", fresh)
    tracemalloc.start()  # sees NumPy's memory
    try:
        weights = yard.load(BERT, dtype="bfloat16")
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert weights.report.bytes == 24 * 8 * MIB
    result_bytes = 24 * 4 * MIB
    assert 8 * MIB < most_bytes - result_bytes < 80 * MIB


def test_a_verified_load_finds_what_checksums_cannot(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.push(STATE, BERT)
    assert same(yard.load(BERT, verify="full"), STATE)
    part = yard.load(BERT, verify="full", slices={"embed": slice(3, 5)}, tensors="embed")
    assert same(part, {"embed": STATE["embed"][3:5]})
    # A block that was given the wrong name when it was written: all its checksums are right.
    from weightyard.format import block

    right = block.block_id
    monkeypatch.setattr(
        "weightyard.loader.proving.block_id", lambda data: right(bytes(data) + b"!")
    )
    with pytest.raises(BlockCorrupt, match="its bytes are those of"):
        yard.load(BERT, verify="full")
    assert same(yard.load(BERT), STATE)
    with pytest.raises(BadSetting, match="'fast' or 'full'"):
        yard.load(BERT, verify="some")  # type: ignore[arg-type]


def test_progress_adds_up_to_what_is_read(big: Yard) -> None:
    told: list[int] = []
    report = big.load(BERT, progress=told.append).report
    assert len(told) > 1
    assert sum(told) == report.read_bytes == report.bytes


def test_a_load_ends_when_its_time_is_up(big: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    store = type(big.store)
    read = store.read

    def slow(*words: Any, cancel: Cancel, **options: Any) -> Any:
        pause(SOON_S, cancel)  # only who gives it up ends that sooner
        return read(*words, cancel=cancel, **options)

    big.load(BERT, tensors="small")  # the manifest is on this node
    monkeypatch.setattr(store, "read", slow)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        big.load(BERT, timeout=0.3)
    assert time.monotonic() - began < SOON_S / 2
    assert left_threads() == []


def test_a_progress_that_raises_ends_the_load_and_its_threads(big: Yard) -> None:
    def refuse(done_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        big.load(BERT, progress=refuse)
    assert left_threads() == []


def test_the_report_tells_bytes_time_and_way(big: Yard, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weightyard.loader"):
        weights = big.load(BERT)
    report = weights.report
    assert report.tensors == 3
    assert report.bytes == sum(one.nbytes for one in weights.values()) == report.read_bytes
    assert set(report.read_paths) == {"local"}
    assert sum(report.read_paths.values()) == report.stored_bytes >= report.bytes
    assert {"resolve", "plan", "read"} <= set(report.stages)
    assert 0 < report.seconds < 60
    assert report.bytes_per_s > 0
    assert (report.failed, report.from_snapshot) == ((), False)
    (line,) = [one.message for one in caplog.records if "version.loaded" in one.message]
    assert f"version={weights.version.ref} device=cpu tensors=3 bytes={report.bytes}" in line


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(yard: Yard) -> None:
    yard.push(STATE, BERT)
    for device in ("warp", "meta", "cuda:99"):
        with pytest.raises(Unsupported, match=device):
            yard.load(BERT, device=device)
    with pytest.raises(Unsupported, match="group"):
        yard.load(BERT, group=object())


def test_this_node_s_snapshot_is_used_and_gives_the_same(yard: Yard, tmp_path: Path) -> None:
    model = {"l.2": noise(300, 300), "l.10": noise(3, 4), "ids": torch.arange(5)}
    sharded(tmp_path / "m", {"l.2": model["l.2"]}, {name: model[name] for name in ("l.10", "ids")})
    yard.push(tmp_path / "m", BERT)
    index = (slice(None, None, -2), 1)
    asked: dict[str, Any] = {"slices": {"l.*": index}, "dtype": "float32"}
    plain = yard.load(BERT, **asked)
    yard.snapshot(BERT)
    mapped = yard.load(BERT)
    assert same(mapped, model)
    assert (mapped.report.from_snapshot, mapped.report.stored_bytes) == (True, 0)
    assert mapped.report.cached_bytes == sum(one.nbytes for one in model.values())
    assert same(yard.load(BERT, **asked), plain)
    assert dict(yard.stream(BERT)).keys() == model.keys()
    mapped["ids"].fill_(9)  # of the caller alone
    assert same(yard.load(BERT), model)
    assert not yard.load(BERT, cache=False).report.from_snapshot
    assert not yard.load(BERT, verify="full").report.from_snapshot


def test_a_snapshot_of_a_state_dict_keeps_its_ties(yard: Yard) -> None:
    shared = noise(100, 100)
    yard.push({"embed": shared, "head": shared, "s": torch.tensor(1.5)}, BERT)
    yard.snapshot(BERT)
    weights = yard.load(BERT)
    assert weights.report.from_snapshot
    assert weights["embed"] is weights["head"]
    assert same(weights, {"embed": shared, "head": shared, "s": torch.tensor(1.5)})


def test_load_of_the_package_takes_the_same_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WEIGHTYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WEIGHTYARD_STORE", raising=False)
    weightyard.push(STATE, BERT)
    assert list(weightyard.load(BERT, "cpu", tensors="b*")) == ["bias"]


def test_a_load_asks_where_blocks_lie_once_and_again_only_for_those_that_moved(big: Yard) -> None:
    asked: list[int] = []

    class Counting:
        def placements(self, blocks: Any, *, within_s: float = math.inf) -> Any:
            asked.append(len(blocks))
            return big.catalogue.placements(blocks)

    blocks = [block.id for block in big.manifest(BERT).blocks]
    foreseen = Foreseen(Counting(), blocks)
    first, rest = foreseen.placements(blocks[:2]), foreseen.placements(blocks[2:])
    assert {**first, **rest} == big.catalogue.placements(blocks)
    assert asked == [len(blocks)]
    assert foreseen.placements(blocks[:1]).keys() == set(blocks[:1])
    assert asked == [len(blocks), 1]


def test_large_tensors_are_of_huge_pages_where_there_are_any() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel gives no huge pages")
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, _huge_pages_refused()
    tensor, memory = empty_tensor(DType.BF16, (32, 1 << 20))
    tensor.fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert memory.nbytes == tensor.nbytes == 64 * MIB
    assert "hg" in _flags_of(tensor.data_ptr()), "they are asked for"
    # Of memory in small pieces the kernel can make none: it counts that.
    assert faults < 64 * MIB // 4096 // 2 or _huge_pages_refused() > refused


def _flags_of(address: int) -> list[str]:
    """What the kernel was told of the mapping at an address (proc_pid_smaps(5))."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(found[1], 16) <= address < int(found[2], 16)
        elif is_it and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


def _huge_pages_refused() -> int:
    """How often the kernel had none when one was due, for whichever process."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["thp_fault_fallback"])


def test_elements_of_every_type_come_backwards_from_a_snapshot_as_from_the_store(
    yard: Yard,
) -> None:
    kinds = _TORCH.keys() - {"bool", "complex32", "complex128"}  # of which it has no files
    words = torch.arange(30 * 8).to(torch.uint8)
    state = {
        kind: words[: 30 * getattr(torch, kind).itemsize].view(getattr(torch, kind)).view(6, 5)
        for kind in kinds
    }
    slices = {"*": (slice(None, None, -2), slice(None, None, -1))}
    yard.push(state, BERT)
    stored = yard.load(BERT, slices=slices, cache=False)
    yard.snapshot(BERT)
    mapped = yard.load(BERT, slices=slices)
    assert mapped.report.from_snapshot
    assert same(mapped, stored)
