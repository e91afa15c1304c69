"""Tensors one after the other, while the next ones are being read."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_world import BERT, leases, left_threads, noise, our_threads, same, sharded, yard_in
from waiting import SOON_S, eventually

from weightyard.errors import DeadlineExceeded, NoSuchThing, Refused, StoreUnavailable
from weightyard.format.block import MIB
from weightyard.storage.cancel import Cancel
from weightyard.yard import Yard

LAYERS = {f"layers.{number}.w": noise(1024, 2048, seed=number) for number in range(24)}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """24 layers of 4 MiB each, stored raw."""
    with yard_in(tmp_path_factory.mktemp("stream")) as opened:
        opened.push(LAYERS, BERT, codec="raw")
        yield opened


class Watched:
    """Counts the bytes a store reads, and can slow it down, hold it up, or fail it."""

    def __init__(self, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self.wait_s = 0.0
        self.fails_after: float = float("inf")
        self.goes_on = threading.Event()
        """What is held up is read."""
        self.goes_on.set()
        self.is_held = threading.Event()
        """Something is held up."""
        self._seen: set[tuple[str, int]] = set()  # pages
        self._lock = threading.Lock()
        read = type(yard.store).read

        def watched(store: Any, location: Any, reads: Any, **options: Any) -> Any:
            time.sleep(self.wait_s)
            # However the same bytes are cut into reads: that depends on how fast they come.
            places = {
                (location.path.text, page)
                for one in reads
                for page in range(one.offset // 4096, (one.offset + one.into.nbytes) // 4096)
            }
            self._wait(places, options.get("cancel"))
            with self._lock:
                self._seen |= places
                self.bytes += sum(one.into.nbytes for one in reads)
                if self.bytes > self.fails_after:
                    raise StoreUnavailable("injected")
            return read(store, location, reads, **options)

        monkeypatch.setattr(type(yard.store), "read", watched)

    def hold_up(self) -> None:
        """From now on only what was read before is read, until it may go on or is given up."""
        self.goes_on.clear()
        self.bytes = 0

    def _wait(self, places: set[tuple[str, int]], cancel: Cancel | None) -> None:
        def is_given_up() -> bool:
            return cancel is not None and cancel.is_cancelled

        if not self.goes_on.is_set() and not places <= self._seen:
            self.is_held.set()
            eventually(lambda: self.goes_on.is_set() or is_given_up())
        if cancel is not None:
            cancel.check("reading")


@pytest.fixture
def watched(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(yard, monkeypatch)


def test_tensors_come_in_model_order_and_whole(yard: Yard) -> None:
    found = list(yard.stream(BERT))
    assert [name for name, _ in found] == list(LAYERS)  # 2 before 10
    assert same(dict(found), LAYERS)


def test_each_tensor_is_the_caller_s_own(yard: Yard) -> None:
    kept = []
    for name, tensor in yard.stream(BERT, ahead_bytes=8 * MIB):
        tensor += 1
        kept.append((name, tensor))
    assert same(dict(kept), {name: one + 1 for name, one in LAYERS.items()})


def hold_up_all_but_the_first(yard: Yard, watched: Watched) -> None:
    """Only what a stream begins with can be read: a first batch of two tensors."""
    assert len(list(yard.stream(BERT, tensors=["layers.0.w", "layers.1.w"]))) == 2
    watched.hold_up()


def test_the_first_tensor_is_there_long_before_the_last(yard: Yard, watched: Watched) -> None:
    hold_up_all_but_the_first(yard, watched)
    stream = yard.stream(BERT)
    name, _ = next(stream)
    assert name == "layers.0.w"
    assert watched.bytes < sum(one.nbytes for one in LAYERS.values()) / 2
    watched.goes_on.set()
    assert len(list(stream)) == len(LAYERS) - 1


def test_no_more_is_read_ahead_than_the_budget(yard: Yard, watched: Watched) -> None:
    stream = yard.stream(BERT, ahead_bytes=16 * MIB)
    for number, _ in enumerate(stream, 1):
        time.sleep(0.1 if number in (1, 8) else 0)
        assert watched.bytes <= number * 4 * MIB + 16 * MIB
    assert watched.bytes >= sum(one.nbytes for one in LAYERS.values())


def test_what_comes_next_is_read_while_the_caller_works(yard: Yard, watched: Watched) -> None:
    stream = yard.stream(BERT, ahead_bytes=32 * MIB)
    next(stream)
    eventually(lambda: watched.bytes >= 20 * MIB)
    stream.close()  # type: ignore[attr-defined]


def _fail_at_the_first(stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in stream:
        raise ZeroDivisionError


@pytest.mark.parametrize("how", ["close", "forget", "raise"])
def test_leaving_a_stream_early_leaves_no_thread(yard: Yard, watched: Watched, how: str) -> None:
    watched.wait_s = 0.02
    if how == "raise":
        with pytest.raises(ZeroDivisionError):
            _fail_at_the_first(yard.stream(BERT, ahead_bytes=16 * MIB))
    else:
        stream = yard.stream(BERT, ahead_bytes=16 * MIB)
        next(stream)
        assert our_threads() != []
        if how == "close":
            stream.close()  # type: ignore[attr-defined]
        del stream
    gc.collect()
    assert left_threads() == []
    assert watched.bytes < sum(one.nbytes for one in LAYERS.values())


def test_what_is_under_way_is_given_up_when_a_stream_is_left(yard: Yard, watched: Watched) -> None:
    hold_up_all_but_the_first(yard, watched)
    stream = yard.stream(BERT)
    next(stream)
    assert watched.is_held.wait(SOON_S)
    stream.close()  # type: ignore[attr-defined]
    assert left_threads() == []
    assert watched.bytes <= 9 * MIB, "nothing of what was being read"


def test_a_stream_that_is_never_begun_reads_nothing(yard: Yard, watched: Watched) -> None:
    stream = yard.stream(BERT)
    assert watched.bytes < MIB  # the manifest
    del stream
    assert left_threads() == []


def _kept(
    stream: Iterator[tuple[str, torch.Tensor]], into: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    for name, tensor in stream:
        into[name] = tensor
    return into


def test_what_was_whole_is_given_before_a_failure_and_nothing_after(
    yard: Yard, watched: Watched
) -> None:
    watched.fails_after = 40 * MIB
    given: dict[str, torch.Tensor] = {}
    with pytest.raises(StoreUnavailable, match="injected"):
        _kept(yard.stream(BERT, ahead_bytes=8 * MIB), given)
    assert 0 < len(given) < 12
    assert same(given, {name: LAYERS[name] for name in given})
    assert left_threads() == []


def test_what_cannot_be_had_is_said_before_the_first_tensor(yard: Yard) -> None:
    with pytest.raises(NoSuchThing, match="no tensor fits"):
        yard.stream(BERT, tensors="q*")
    with pytest.raises(Refused, match="slice of tensor"):
        yard.stream(BERT, slices={"*": 5000})


def test_a_stream_takes_slices_and_casts(yard: Yard) -> None:
    found = dict(
        yard.stream(BERT, tensors="layers.1?.w", slices={"*": slice(0, 9)}, dtype="float32")
    )
    assert same(
        found, {f"layers.{n}.w": LAYERS[f"layers.{n}.w"][:9].float() for n in range(10, 20)}
    )


def test_a_stream_ends_when_its_time_is_up(yard: Yard, watched: Watched) -> None:
    hold_up_all_but_the_first(yard, watched)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        _kept(yard.stream(BERT, timeout=0.5, ahead_bytes=8 * MIB), {})
    assert time.monotonic() - began < SOON_S / 2, "long before what is held up is read"
    assert left_threads() == []


def test_tied_tensors_come_right_after_each_other(tmp_path: Path) -> None:
    shared = noise(100, 100)
    state = {"a.embed": shared, "b": noise(3), "z.head": shared}
    with yard_in(tmp_path) as yard:
        yard.push(state, BERT)
        found = list(yard.stream(BERT))
    assert [name for name, _ in found] == ["a.embed", "z.head", "b"]
    assert found[0][1] is found[1][1]


def test_a_stream_holds_a_lease_while_it_runs(yard: Yard) -> None:
    stream = yard.stream(BERT)
    next(stream)
    assert leases(yard.registry.database) == 1
    stream.close()  # type: ignore[attr-defined]
    assert leases(yard.registry.database) == 0


def test_a_tensor_longer_than_the_budget_comes_too(tmp_path: Path) -> None:
    state = {"a": noise(8192, 2048), "b": noise(10)}
    with yard_in(tmp_path) as yard:
        yard.push(state, BERT)
        found = dict(yard.stream(BERT, ahead_bytes=MIB))
    assert same(found, state)
    assert torch.equal(found["b"], state["b"])


def test_a_stream_over_a_snapshot_goes_on_when_that_is_removed(tmp_path: Path) -> None:
    shards = [{f"l.{number}": noise(50, seed=number)} for number in range(3)]
    with yard_in(tmp_path) as yard:
        yard.push(sharded(tmp_path / "m", *shards), BERT)
        yard.snapshot(BERT)
        (one,) = yard.snapshots.listed()
        stream = yard.stream(BERT)
        yard.snapshots.remove(one.place)
        assert same(dict(stream), {name: one for shard in shards for name, one in shard.items()})
