"""safetensors' interface on a version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_world import BERT, leases, left_threads, noise, same, saved, sharded, yard_in
from safetensors import safe_open

from weightyard.errors import NoSuchThing, Refused
from weightyard.format.block import MIB
from weightyard.registry.collect import GcOptions
from weightyard.storage import layout
from weightyard.yard import Yard

TENSORS = {
    "w": noise(4096, 2048),
    "b": noise(7, 5, 3, seed=1),
    "s": torch.tensor(2.5),
    "none": torch.empty(0, 3),
}


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as opened:
        yield opened


@pytest.fixture
def file(yard: Yard, tmp_path: Path) -> Path:
    """A file, which is also pushed."""
    made = saved(tmp_path / "model.safetensors", TENSORS, format="pt", author="me")
    yard.push(made, BERT, codec="raw")
    return made


@pytest.mark.parametrize("snapshot", [False, True])
def test_it_answers_as_safetensors_does(yard: Yard, file: Path, snapshot: bool) -> None:
    if snapshot:
        yard.snapshot(BERT)
    with yard.safe_open(BERT) as ours, safe_open(file, framework="pt") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert sorted(ours.offset_keys()) == sorted(theirs.keys())
        assert ours.metadata() == theirs.metadata() == {"format": "pt", "author": "me"}
        for name in ours.keys():  # noqa: SIM118
            assert same({name: ours.get_tensor(name)}, {name: theirs.get_tensor(name)})
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
        for index in (slice(2, 5), 3, (slice(None), slice(1, 2)), (..., slice(0, 2))):
            mine, its = ours.get_slice("b")[index], theirs.get_slice("b")[index]
            assert same({"b": mine}, {"b": its})


def test_it_has_what_safetensors_has(yard: Yard, file: Path) -> None:
    """Servers that read by `safe_open` call whichever of them their version of safetensors has."""
    with yard.safe_open(BERT) as ours, safe_open(file, framework="pt") as theirs:
        assert set(dir(theirs)) <= set(dir(ours))
        for name in ours.keys():  # noqa: SIM118
            assert set(dir(theirs.get_slice(name))) <= set(dir(ours.get_slice(name)))


@pytest.mark.parametrize("snapshot", [False, True])
def test_all_tensors_come_at_once_and_tied_ones_tied(yard: Yard, snapshot: bool) -> None:
    tied = noise(64, 32)
    tensors = {"b": noise(8), "embed": tied, "head": tied}
    yard.push(tensors, BERT)
    if snapshot:
        yard.snapshot(BERT)
    with yard.safe_open(BERT) as weights:
        found = weights.get_tensors()
        assert list(found) == weights.keys()
        assert same(found, tensors)
        assert found["embed"].data_ptr() == found["head"].data_ptr()
    with pytest.raises(Refused, match="was closed"):
        weights.get_tensors()


def test_only_what_is_looked_at_is_read(
    yard: Yard, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read = type(yard.store).read

    def watched(store: Any, location: Any, reads: Any, **options: Any) -> Any:
        asked.append(sum(one.into.nbytes for one in reads))
        return read(store, location, reads, **options)

    with yard.safe_open(BERT) as weights:
        monkeypatch.setattr(type(yard.store), "read", watched)
        weights.keys()
        lazy = weights.get_slice("w")
        lazy.get_shape()
        assert asked == []
        assert lazy[100:200].shape == (100, 2048)
        assert sum(asked) <= 2 * MIB


@pytest.mark.parametrize("verify", ["fast", "full"])
def test_where_tensors_lie_is_asked_once_however_many_are_looked_at(
    yard: Yard, file: Path, monkeypatch: pytest.MonkeyPatch, verify: Any
) -> None:
    asked: list[int] = []
    placements = type(yard.catalogue).placements

    def counted(catalogue: Any, blocks: Any, **more: Any) -> Any:
        asked.append(len(blocks))
        return placements(catalogue, blocks, **more)

    monkeypatch.setattr(type(yard.catalogue), "placements", counted)
    with yard.safe_open(BERT, verify=verify) as weights:
        for name in TENSORS:
            assert same({name: weights.get_tensor(name)}, {name: TENSORS[name]})
            weights.get_slice("w")[3]
        assert len(asked) == 1


def test_where_bases_of_deltas_lie_is_asked_once_too(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {f"t{number}": noise(300, 300, seed=number) for number in range(5)}
    second = {name: one.clone() for name, one in first.items()}
    for one in second.values():
        one[0, 0] += 1
    yard.push(first, "team/line")
    yard.push(second, "team/line", delta="only", parent="team/line@v1")
    asked: list[int] = []
    placements = type(yard.catalogue).placements

    def counted(catalogue: Any, blocks: Any, **more: Any) -> Any:
        asked.append(len(blocks))
        return placements(catalogue, blocks, **more)

    monkeypatch.setattr(type(yard.catalogue), "placements", counted)
    with yard.safe_open("team/line@v2", cache=False) as opened:
        before = len(asked)
        for name, one in second.items():
            assert torch.equal(opened.get_tensor(name), one)
    assert (before, asked[before:]) == (2, [])


def test_the_bytes_stay_while_it_is_open(yard: Yard, file: Path) -> None:
    with yard.safe_open(BERT) as weights:
        assert leases(yard.registry.database) == 1
        yard.delete(f"{BERT}@v1")
        _collect(yard)
        assert same({"w": weights.get_tensor("w")}, {"w": TENSORS["w"]})
    assert leases(yard.registry.database) == 0
    assert left_threads() == []
    _collect(yard)
    assert not list(yard.store.list(layout.PACKS))


def test_one_over_a_snapshot_goes_on_when_that_is_removed(yard: Yard, file: Path) -> None:
    yard.snapshot(BERT)
    (one,) = yard.snapshots.listed()
    with yard.safe_open(BERT) as weights:
        yard.snapshots.remove(one.place)
        assert not one.place.folder.exists()
        for name, tensor in TENSORS.items():
            assert same({name: weights.get_tensor(name)}, {name: tensor})
        assert weights.metadata() == {"format": "pt", "author": "me"}


def test_packs_are_expected_again_whenever_something_is_read(
    yard: Yard, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[str] = []
    with yard.safe_open(BERT) as weights:
        monkeypatch.setattr(
            type(yard._via), "expect", lambda via, version: expected.append(version.ref)
        )
        weights.get_tensor("b")
        assert expected == [weights.version.ref], "who locates may have forgotten it"
        weights.metadata()
        assert expected == 2 * [weights.version.ref]


def _collect(yard: Yard) -> None:
    for _ in range(3):
        yard.registry.gc(yard.store, GcOptions(grace_s=0, embedded=True))


def test_a_closed_one_refuses_and_an_unknown_name_is_said(yard: Yard, file: Path) -> None:
    with yard.safe_open(BERT) as weights:
        lazy = weights.get_slice("w")
        with pytest.raises(NoSuchThing, match="no tensor 'q'"):
            weights.get_tensor("q")
        with pytest.raises(Refused, match="index 4096"):
            lazy[4096]
    with pytest.raises(Refused, match="closed"):
        lazy[0]
    with pytest.raises(Refused, match="closed"):
        weights.metadata()
    weights.close()


def test_all_shards_of_a_model_are_open_at_once(yard: Yard, tmp_path: Path) -> None:
    sharded(tmp_path / "m", {"l.0": noise(3)}, {"l.1": noise(4), "l.2": noise(5)})
    yard.push(tmp_path / "m", BERT)
    with yard.safe_open(BERT) as weights:
        assert weights.keys() == ["l.0", "l.1", "l.2"]
        assert weights.metadata() is None
        assert same({"l.2": weights.get_tensor("l.2")}, {"l.2": noise(5)})
    with yard.safe_open(BERT, files="model-00001*") as first:
        assert first.keys() == ["l.0"]


def test_a_state_dict_has_no_metadata(yard: Yard) -> None:
    yard.push(TENSORS, BERT)
    with yard.safe_open(BERT) as weights:
        assert weights.metadata() is None
        assert weights.version.ref == "team/bert@v1"
