"""Planes merged and deltas added on the device: on the CPU, and on one that works late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from loader_world import BERT, left_threads, noise, same, yard_in

from weightyard import codec
from weightyard.errors import BadSetting, BlockCorrupt, FileMissing, StoreUnavailable
from weightyard.format.block import CHUNK_BYTES, MIB, Codec
from weightyard.loader import decoding_ring
from weightyard.loader.asked import Asked
from weightyard.loader.batches import one_by_one
from weightyard.loader.changes import Piece
from weightyard.loader.decoding_ring import DecodingRing
from weightyard.loader.load import plan
from weightyard.loader.merging import put
from weightyard.loader.stored import StoreOrigin
from weightyard.loader.undecoded import Differences, Undecoded, UndecodedRun
from weightyard.names import BlockId
from weightyard.yard import Yard

STATE = {
    "a.long": noise(4096, 2048),
    "b.small": noise(7, 3, seed=1),
    "c.scalar": torch.tensor(1.25),
    "d.empty": torch.empty(0, 2),
    "e.mask": torch.tensor([True, False, True]),
    "f.half": noise(700, 1024, dtype=torch.float16, seed=2),
    "g.float": noise(700, 999, dtype=torch.float32, seed=3),
    "h.double": noise(300, 1001, dtype=torch.float64, seed=4),
    "i.random": torch.randint(0, 256, (3 * MIB + 5,), dtype=torch.uint8),
    "j.constant": torch.full((3, MIB), 0.5, dtype=torch.bfloat16),
    **{f"layers.{number}": noise(512, 1024, seed=10 + number) for number in range(6)},
}


def tuned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As after a few more steps: most numbers a little other."""
    return {
        name: one + 1e-3 * one.abs().max() if one.is_floating_point() and one.numel() else one
        for name, one in state.items()
    }


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Version 1 is whole, version 2 there as differences to it only."""
    with yard_in(tmp_path_factory.mktemp("decoding")) as opened:
        opened.push(STATE, BERT)
        opened.push(tuned(STATE), BERT, parent=f"{BERT}@v1", delta="only")
        yield opened


def _loaded(
    yard: Yard,
    device: LateDevice,
    ref: str = f"{BERT}@v1",
    asked: Asked | None = None,
    *,
    slab_bytes: int = 2 * MIB,
    targets: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    asked = asked or Asked(device_decode=True)
    origin = yard._origin(ref, asked, cache=False)
    assert isinstance(origin, StoreOrigin)
    plans = plan(origin, asked)
    numbers = {one.name: number for number, one in enumerate(plans)}
    ring = DecodingRing(
        plans,
        origin.tally,
        device,
        dtype=asked.torch_dtype,
        targets={numbers[name]: target for name, target in (targets or {}).items()},
        slab_bytes=slab_bytes,
        slabs=2,
    )
    placed = origin.place_all(plans, asked, one_by_one(plans, slab_bytes), ring, 8 * MIB)
    # As it is when it is handed over.
    return {one.name: tensor if targets else tensor.clone() for one, tensor in placed}


@pytest.mark.parametrize("slab_bytes", [2 * MIB, 64 * MIB])
def test_a_device_that_merges_planes_late_gets_every_bit(yard: Yard, slab_bytes: int) -> None:
    device = LateDevice()
    assert same(_loaded(yard, device, slab_bytes=slab_bytes), STATE)
    assert device.ran > 5, "it did merge some"
    assert left_threads() == []


def test_batches_queued_at_the_same_time_do_not_mix(yard: Yard) -> None:
    class Slow(LateDevice):
        def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
            super().copy(into, source)
            time.sleep(0.002)  # another thread may queue something now

    assert same(_loaded(yard, Slow()), STATE)


def test_differences_are_added_to_their_bases_on_the_device(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []

    def seen(codec: Codec | None, source: Any, into: Any, *, adds: bool = False) -> None:
        added.append(source.numel() * adds)
        put(codec, source, into, adds=adds)

    monkeypatch.setattr(decoding_ring, "put", seen)
    assert same(_loaded(yard, LateDevice(), f"{BERT}@v2"), tuned(STATE))
    assert sum(added) > 16 * MIB


def test_the_device_takes_little_memory_besides_the_tensors(yard: Yard) -> None:
    device = LateDevice()
    _loaded(yard, device, f"{BERT}@v2")
    tensors = sum(one.nbytes for one in STATE.values())
    assert device.made_bytes - tensors <= 2 * MIB, "as long as a slab"


def test_slices_casts_and_targets_come_as_they_do_without_it(yard: Yard) -> None:
    slices = {"a.*": (slice(None), slice(5, 9)), "layers.*": slice(7, 300)}
    for dtype in ("float32", None):
        asked = Asked(tensors=["a.*", "layers.3"], slices=slices, dtype=dtype, device_decode=True)
        for ref, state in ((f"{BERT}@v1", STATE), (f"{BERT}@v2", tuned(STATE))):
            kind = torch.float32 if dtype else torch.bfloat16
            wanted = {
                "a.long": state["a.long"][:, 5:9].to(kind),
                "layers.3": state["layers.3"][7:300].to(kind),
            }
            assert same(_loaded(yard, LateDevice(), ref, asked), wanted)
    targets = {"a.long": torch.zeros_like(STATE["a.long"]), "g.float": torch.zeros(700, 999)}
    asked = Asked(tensors=list(targets), device_decode=True)
    found = _loaded(yard, LateDevice(), f"{BERT}@v2", asked, targets=targets)
    assert found["a.long"] is targets["a.long"]
    assert same(found, {name: tuned(STATE)[name] for name in targets})


def test_a_difference_that_did_not_make_its_block_is_an_error(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(codec: Codec | None, source: Any, into: Any, *, adds: bool = False) -> None:
        put(codec, source, into, adds=False)

    monkeypatch.setattr(decoding_ring, "put", wrong)
    with pytest.raises(BlockCorrupt, match="fold"):  # of blocks that come in several parts
        _loaded(yard, LateDevice(), f"{BERT}@v2", Asked(tensors="a.long", device_decode=True))
    with pytest.raises(BlockCorrupt, match="fold"):
        _loaded(yard, LateDevice(), f"{BERT}@v2")
    assert left_threads() == []


def test_where_the_differences_cannot_be_had_blocks_are_decoded_as_ever(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise FileMissing("injected")

    monkeypatch.setattr(Differences, "placements", gone)
    assert same(_loaded(yard, LateDevice(), f"{BERT}@v2"), tuned(STATE))


def test_wrong_bytes_are_noticed_before_they_leave_the_host(tmp_path: Path) -> None:
    with yard_in(tmp_path) as yard:
        yard.push({"a": noise(512, 1024)}, BERT)  # one chunk
        for pack in (tmp_path / "store" / "packs").rglob("*"):
            if pack.is_file():
                content = bytearray(pack.read_bytes())
                content[1000] ^= 1
                pack.chmod(0o600)
                pack.write_bytes(content)
        device = LateDevice()
        with pytest.raises(BlockCorrupt):
            _loaded(yard, device)
        assert device.ran == 0


def test_after_a_failure_nothing_is_queued_any_more(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    read = type(yard.store).read
    calls = itertools.count()

    def failing(store: Any, location: Any, reads: Iterable[Any], **options: Any) -> Any:
        if "packs/" in location.path.text and next(calls) > 3:
            raise StoreUnavailable("injected")
        return read(store, location, list(reads), **options)

    monkeypatch.setattr(type(yard.store), "read", failing)
    with pytest.raises(StoreUnavailable):
        _loaded(yard, device, f"{BERT}@v2")
    assert device.is_finished
    assert device.is_idle
    assert left_threads() == []


def test_a_block_read_again_in_another_form_is_put_in_that_form() -> None:
    """What was told of a chunk last holds: a read that failed half-way may have told otherwise."""
    piece = Piece(0, BlockId("0" * 64), CHUNK_BYTES, 3 * CHUNK_BYTES)
    undecoded = Undecoded((piece,), memoryview(bytearray(3 * CHUNK_BYTES)))
    told = undecoded.wanted(piece).on_chunks
    assert told is not None
    told(Codec.PLANES_BF16, range(1, 4))
    told(None, range(3, 4))
    assert list(undecoded.lying()) == [
        UndecodedRun(Codec.PLANES_BF16, 0, 2 * CHUNK_BYTES),
        UndecodedRun(None, 2 * CHUNK_BYTES, CHUNK_BYTES),
    ]


def test_on_the_host_it_changes_nothing_and_what_it_cannot_do_is_refused(yard: Yard) -> None:
    assert same(yard.load(f"{BERT}@v2", device_decode=True), tuned(STATE))
    with pytest.raises(BadSetting, match="full"):
        yard.load(BERT, device_decode=True, verify="full")


_DTYPES = {
    Codec.PLANES_BF16: torch.bfloat16,
    Codec.PLANES_FP16: torch.float16,
    Codec.PLANES_FP32: torch.float32,
    Codec.PLANES_FP64: torch.float64,
}


@settings(max_examples=50, deadline=None)
@given(
    hint=st.sampled_from([one for one in Codec if one.planes > 1]),
    elements=st.integers(1, 3 * CHUNK_BYTES // 8),
    kind=st.sampled_from(["weights", "bits", "constant"]),
    adds=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_torch_puts_what_the_codec_decodes(
    hint: Codec, elements: int, kind: str, adds: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, elements * hint.planes, np.uint8)
    if kind == "constant":
        raw[:] = 0x3F
    elif kind == "weights":
        values = noise(elements, dtype=_DTYPES[hint], seed=seed)
        raw = values.view(torch.uint8).numpy()
    encoded = codec.encode(raw.data, hint=hint)
    planes = np.empty(raw.size, np.uint8)
    codec.decode_planes(encoded.encoding, encoded.stored, planes.data)
    left = encoded.encoding.codec if encoded.encoding.codec.planes > 1 else None
    before = random.integers(0, 256, raw.size, np.uint8)
    into = torch.from_numpy(before.copy())
    put(left, torch.from_numpy(planes), into, adds=adds)
    assert np.array_equal(into.numpy(), raw ^ before if adds else raw)
