"""Snapshots are verified: when they are made, beside loads, and when someone asks."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from snapshot_world import BERT, content, damage, push, yard_in
from waiting import SOON_S, eventually

from weightyard.errors import Damaged
from weightyard.loader.locks import Lock
from weightyard.loader.snapshot import Place
from weightyard.yard import Yard


def test_a_damaged_byte_is_found_set_aside_and_said(
    yard: Yard, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest = push(yard, model)
    path = yard.snapshot(BERT)
    damage(path / "shards" / "model-1.safetensors")
    found = yard.snapshots.find(digest)
    assert found is not None
    with caplog.at_level(logging.WARNING):
        assert found.verify() == ["shards/model-1.safetensors"]
    assert "snapshot.damaged" in caplog.text
    assert yard.snapshots.find(digest) is None
    assert content(yard.snapshot(BERT)) == content(model), "made again from the store"


def test_a_mapped_load_verifies_in_the_background_at_most_once_a_day(
    yard: Yard, model: Path
) -> None:
    digest = push(yard, model)
    path = yard.snapshot(BERT)
    found = yard.snapshots.find(digest)
    assert found is not None
    assert found.recheck() is None, "it was just made"
    checked = Place(path.parent, path.name).checked
    os.utime(checked, (0, 0))
    first, second = found.recheck(), found.recheck()
    assert first is not None
    first.join(SOON_S)
    assert second is None
    assert time.time() - checked.stat().st_mtime < 60
    assert found.recheck() is None
    damage(path / "config.json")
    os.utime(checked, (0, 0))
    again = found.recheck()
    assert again is not None
    again.join(SOON_S)
    assert not path.exists()


def test_a_load_has_its_snapshot_verified_and_one_that_is_damaged_is_made_anew(
    yard: Yard,
) -> None:
    """Damaged as by a disk: neither the length nor the time of the file tells."""
    torch = pytest.importorskip("torch")
    state = {"weight": torch.randn(256, 256)}
    yard.push(state, BERT)
    path = yard.snapshot(BERT)
    (file,) = path.glob("*.safetensors")
    damage(file)
    checked = Place(path.parent, path.name).checked
    os.utime(checked, (0, 0))  # long ago
    damaged = yard.load(BERT)
    assert damaged.report.from_snapshot
    eventually(lambda: not path.exists())
    del damaged
    again = yard.load(BERT)
    assert torch.equal(again["weight"], state["weight"])
    assert yard.byproducts.wait(SOON_S)
    assert torch.equal(yard.load(BERT)["weight"], state["weight"])


@pytest.mark.parametrize("where", ["length", "header", "name", "index"])
def test_a_snapshot_in_which_tensors_are_not_to_be_found_fails_one_load_and_no_other(
    yard: Yard, tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    from loader_world import same, sharded

    state = {"one.weight": torch.randn(256, 256), "two.weight": torch.randn(7)}
    shards = [{name: one} for name, one in state.items()]
    yard.push(sharded(tmp_path / "sharded", *shards), BERT)
    path = yard.snapshot(BERT)
    file = path / "model-00001-of-00002.safetensors"
    match where:
        case "length":
            damage(file, 6)
        case "header":
            damage(file, 8)
        case "name":
            damage(file, file.read_bytes().index(b"one.weight"))
        case "index":
            file = path / "model.safetensors.index.json"
            damage(file, file.read_bytes().index(b"one.weight"))
    with caplog.at_level(logging.WARNING), pytest.raises(Damaged, match=f"{file.name}.*load again"):
        yard.load(BERT)
    assert "snapshot.damaged" in caplog.text
    assert not path.exists()
    assert same(yard.load(BERT), state)
    assert content(yard.snapshot(BERT))[file.name] == content(tmp_path / "sharded")[file.name]


def test_a_snapshot_that_cannot_be_mapped_for_another_reason_is_not_set_aside(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    yard.push({"weight": torch.randn(256, 256)}, BERT)
    path = yard.snapshot(BERT)

    def full(*said: object) -> None:
        raise RuntimeError("unable to mmap 262144 bytes: Cannot allocate memory (12)")

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "from_file", full)
        with pytest.raises(Damaged, match="Cannot allocate memory"):
            yard.load(BERT)
    assert yard.snapshot(BERT) == path
    assert yard.load(BERT).report.from_snapshot


def test_a_snapshot_that_is_taken_again_is_verified_and_a_damaged_one_set_aside(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    push(yard, model)
    path = yard.snapshot(BERT)
    damage(path / "config.json")
    os.utime(Place(path.parent, path.name).checked, (0, 0))
    with yard_in(tmp_path) as later:
        assert later.snapshot(BERT) == path
        eventually(lambda: not path.exists())


def test_a_snapshot_that_is_read_lazily_is_verified_and_a_damaged_one_set_aside(yard: Yard) -> None:
    torch = pytest.importorskip("torch")
    yard.push({"weight": torch.randn(256, 256)}, BERT)
    path = yard.snapshot(BERT)
    (file,) = path.glob("*.safetensors")
    damage(file)
    os.utime(Place(path.parent, path.name).checked, (0, 0))
    with yard.safe_open(BERT):
        eventually(lambda: not path.exists())


def test_who_comes_to_verify_when_another_just_did_leaves_it(
    yard: Yard, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = push(yard, model)
    path = yard.snapshot(BERT)
    found = yard.snapshots.find(digest)
    assert found is not None
    checked = Place(path.parent, path.name).checked
    os.utime(checked, (0, 0))
    take = Lock.take

    def later(file: Path, **how: Any) -> Lock | None:
        os.utime(checked)  # the other one had the lock until now
        return take(file, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Lock, "take", later)
        assert found.recheck() is None
    free = Lock.take(checked, shared=False)
    assert free is not None, "it keeps no lock"
    free.close()


def test_one_of_which_nobody_knows_when_it_was_verified_is_verified(
    yard: Yard, model: Path
) -> None:
    digest = push(yard, model)
    path = yard.snapshot(BERT)
    found = yard.snapshots.find(digest)
    assert found is not None
    Place(path.parent, path.name).checked.unlink()
    verifying = found.recheck()
    assert verifying is not None
    verifying.join(SOON_S)
    assert found.recheck() is None
