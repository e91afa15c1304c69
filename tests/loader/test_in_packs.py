"""Raw tensors in packs of this host are mapped there: every chunk is checked, none is copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loader_world import BERT, bits, our_threads, same, saved, yard_in

from weightyard.errors import Damaged
from weightyard.format.block import MIB
from weightyard.loader.load import Weights
from weightyard.yard import Yard


def random_bytes(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


def in_packs(weights: Weights) -> set[str]:
    """The names of tensors whose memory is a pack's, by what the kernel says of this process."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        if "/packs/" in rest:
            begin, end = (int(one, 16) for one in span.split("-"))
            spans.append(range(begin, end))
    return {name for name, one in weights.items() if any(one.data_ptr() in span for span in spans)}


STATE = {
    "long": random_bytes(40 * MIB + 12, 1).view(torch.int32).view(-1, 1),  # three blocks
    "other": random_bytes(5 * MIB, 2).view(torch.bfloat16).view(1024, -1),
    "small": random_bytes(2000, 3),
}


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as yard:
        yard.push(STATE, BERT, codec="raw")
        yield yard


def packs(yard: Yard, tmp_path: Path) -> list[Path]:
    return [one for one in (tmp_path / "store" / "packs").rglob("*") if one.is_file()]


def test_raw_tensors_are_mapped_and_reported_as_read(yard: Yard) -> None:
    told: list[int] = []
    weights = yard.load(BERT, progress=told.append)
    assert same(weights, STATE)
    assert in_packs(weights) == {"long", "other"}
    report = weights.report
    assert sum(told) == report.bytes == sum(one.nbytes for one in STATE.values())
    assert report.read_bytes == report.bytes
    assert sum(report.read_paths.values()) == sum(report.datanodes.values()) == report.stored_bytes
    assert report.bytes <= report.stored_bytes < report.bytes + 1024
    assert (set(report.read_paths), set(report.distances)) == ({"local"}, {"same-host"})
    assert (report.from_snapshot, report.cached_bytes) == (False, 0)
    assert not our_threads()


def test_tensors_that_lie_in_several_packs_come_back_whole(tmp_path: Path) -> None:
    state = {"a": random_bytes(100 * MIB, 4), "b": random_bytes(64 * MIB, 5)}
    with yard_in(tmp_path) as yard:
        yard.push(state, BERT, codec="raw")
        assert len(packs(yard, tmp_path)) == 2
        weights = yard.load(BERT)
    assert in_packs(weights) == {"a", "b"}
    assert same(weights, state)


def test_the_header_of_a_file_does_not_keep_its_tensors_from_being_mapped(tmp_path: Path) -> None:
    """Before them in a pack it would move them by a part of a page, and not those of the next."""
    state = {"a": random_bytes(100 * MIB, 6), "b": random_bytes(64 * MIB, 7)}
    saved(tmp_path / "source" / "model.safetensors", state)
    with yard_in(tmp_path) as yard:
        yard.push(tmp_path / "source", BERT, codec="raw")
        assert len(packs(yard, tmp_path)) == 2
        weights = yard.load(BERT)
    assert in_packs(weights) == {"a", "b"}
    assert same(weights, state)


def test_what_is_done_to_a_mapped_tensor_never_reaches_the_store(yard: Yard) -> None:
    for tensor in yard.load(BERT).values():
        bits(tensor).fill_(0)
    assert same(yard.load(BERT), STATE)


def test_mapped_tensors_outlive_their_packs_and_the_yard(yard: Yard, tmp_path: Path) -> None:
    weights = yard.load(BERT)
    yard.close()
    for pack in packs(yard, tmp_path):
        pack.unlink()
    assert same(weights, STATE)


def test_who_wants_another_dtype_a_slice_or_blocks_proved_gets_a_copy(yard: Yard) -> None:
    assert not in_packs(cast := yard.load(BERT, tensors="other", dtype=torch.float32))
    assert torch.equal(cast["other"].nan_to_num(), STATE["other"].float().nan_to_num())
    half = yard.load(BERT, tensors="other", slices={"other": slice(3, 500)})
    assert not in_packs(half)
    assert torch.equal(bits(half["other"]), bits(STATE["other"][3:500]))
    assert not in_packs(proved := yard.load(BERT, verify="full"))
    assert same(proved, STATE)


def test_a_wrong_byte_in_a_pack_is_an_error_and_never_a_tensor(yard: Yard, tmp_path: Path) -> None:
    (pack,) = packs(yard, tmp_path)
    data = bytearray(pack.read_bytes())
    data[30 * MIB] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    with pytest.raises(Damaged):
        yard.load(BERT)
    assert torch.equal(yard.load(BERT, tensors="other")["other"].view(torch.int16), bf16("other"))
    assert not our_threads()


def test_a_pack_that_was_cut_is_an_error(yard: Yard, tmp_path: Path) -> None:
    (pack,) = packs(yard, tmp_path)
    pack.chmod(0o600)
    with pack.open("r+b") as opened:
        opened.truncate(20 * MIB)
    with pytest.raises(Damaged):
        yard.load(BERT)


def test_a_yard_that_is_held_to_a_rate_reads_at_it(tmp_path: Path) -> None:
    with yard_in(tmp_path, max_rate=1 << 40) as yard:
        yard.push(STATE, BERT, codec="raw")
        weights = yard.load(BERT)
    assert not in_packs(weights)
    assert same(weights, STATE)


def bf16(name: str) -> torch.Tensor:
    return STATE[name].view(torch.int16)
