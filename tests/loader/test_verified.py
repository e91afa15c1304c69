"""Packs of this host that this node has checked are used without a check, until they change."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_world import BERT, bits, same, yard_in

from weightyard.errors import Damaged
from weightyard.format.block import MIB
from weightyard.loader.load import Weights
from weightyard.loader.verified import Pack, Verified, forget_all, joined
from weightyard.storage.stitched import FileRun


def _bytes(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


STATE = {"long": _bytes(20 * MIB, 1), "other": _bytes(2 * MIB, 2)}


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with a yard whose packs were written a moment ago, and not just now."""
    with yard_in(tmp_path) as yard:
        yard.push(STATE, BERT, codec="raw")
    time.sleep(0.2)
    return tmp_path


def loaded(world: Path, **how: Any) -> Weights:
    """By a yard that knows only what others left on disk."""
    with yard_in(world) as yard:
        return yard.load(BERT, **how)


def was_checked(weights: Weights) -> bool:
    return weights.report.stages["decode"] > 0


def pack_in(world: Path) -> Path:
    (pack,) = (one for one in (world / "store" / "packs").rglob("*") if one.is_file())
    return pack


def damage(pack: Path) -> None:
    pack.chmod(0o600)
    with pack.open("r+b") as opened:
        opened.seek(10 * MIB)
        was = opened.read(1)
        opened.seek(10 * MIB)
        opened.write(bytes([was[0] ^ 1]))


def edit_record(world: Path, **changes: object) -> None:
    (file,) = (world / "cache" / "verified").glob("*.json")
    record = json.loads(file.read_text())
    for pack in record["packs"].values():
        pack.update(changes)
    file.write_text(json.dumps(record))


def test_what_one_process_checked_no_other_checks_again(world: Path) -> None:
    first, second = loaded(world), loaded(world)
    assert (was_checked(first), was_checked(second)) == (True, False)
    assert same(second, STATE)
    assert second.report.read_bytes == first.report.read_bytes == second.report.bytes


def test_only_what_was_checked_counts_as_checked(world: Path) -> None:
    assert was_checked(loaded(world, tensors="other"))
    assert not was_checked(loaded(world, tensors="other"))
    assert was_checked(loaded(world, tensors="long"))
    assert not was_checked(loaded(world))


def test_a_pack_that_was_touched_is_checked_again(world: Path) -> None:
    loaded(world)
    os.utime(pack_in(world))
    time.sleep(0.2)
    assert was_checked(loaded(world))
    assert not was_checked(loaded(world))
    damage(pack_in(world))
    with pytest.raises(Damaged):
        loaded(world)


def test_a_pack_that_was_changed_just_now_is_not_remembered(world: Path) -> None:
    """Two changes within a tick of the clock have the same time."""
    verified = Verified(world / "cache", world / "store")
    pack = pack_in(world)
    (known,) = verified.of([pack]).values()
    now = known.stamp._replace(changed_ns=time.time_ns() + 10**9)
    verified.add({pack: Pack(now, 0.0, ())}, [FileRun(pack, 0, MIB)], time.time())
    assert verified.of([pack])[pack].runs == ()
    verified.add({pack: known}, [FileRun(pack, 0, MIB)], time.time())
    assert verified.of([pack])[pack].runs == ((0, MIB),)


def test_who_wants_everything_checked_gets_it(world: Path) -> None:
    loaded(world)
    assert was_checked(loaded(world, cache=False))
    damage(pack_in(world))
    seen = pack_in(world).stat()
    stamp = [seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns]
    edit_record(world, stamp=stamp)  # as if a disk had done it
    with pytest.raises(Damaged):
        loaded(world, cache=False)
    with pytest.raises(Damaged):
        loaded(world, verify="full")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_packs_of_other_users_are_always_checked(world: Path) -> None:
    os.chown(pack_in(world), 12345, -1)
    time.sleep(0.2)
    assert was_checked(loaded(world))
    assert was_checked(loaded(world))


def test_without_a_cache_of_its_own_a_node_always_checks(world: Path) -> None:
    (world / "cache").mkdir(exist_ok=True)
    (world / "cache" / "verified").write_text("no folder")
    assert was_checked(loaded(world))
    assert was_checked(again := loaded(world))
    assert same(again, STATE)


def test_a_record_that_makes_no_sense_is_none(world: Path) -> None:
    loaded(world)
    (file,) = (world / "cache" / "verified").glob("*.json")
    file.write_text('{"format": 1, "folder": 3}')
    assert was_checked(loaded(world))
    assert not was_checked(loaded(world))


def _wait_until_rechecked(world: Path) -> None:
    (file,) = (world / "cache" / "verified").glob("*.json")
    before = file.stat().st_ino
    end = time.monotonic() + 60
    while file.stat().st_ino == before and time.monotonic() < end:
        time.sleep(0.01)


def test_what_was_checked_a_day_ago_is_checked_again_behind_the_load(world: Path) -> None:
    loaded(world)
    edit_record(world, checked_s=time.time() - 25 * 3600)
    with yard_in(world) as yard:
        assert not was_checked(yard.load(BERT, tensors="long"))
        _wait_until_rechecked(world)
    (file,) = (world / "cache" / "verified").glob("*.json")
    (pack,) = json.loads(file.read_text())["packs"].values()
    assert time.time() - pack["checked_s"] < 3600
    # Of the rest nobody knows more than a day ago.
    assert was_checked(loaded(world, tensors="other"))


def test_damage_that_nothing_told_of_is_found_behind_the_load(world: Path) -> None:
    loaded(world)
    damage(pack_in(world))
    seen = pack_in(world).stat()
    stamp = [seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns]
    edit_record(world, stamp=stamp, checked_s=time.time() - 25 * 3600)
    with yard_in(world) as yard:
        assert torch.equal(bits(yard.load(BERT)["other"]), bits(STATE["other"]))
        _wait_until_rechecked(world)
    with pytest.raises(Damaged):
        loaded(world)


def test_what_is_forgotten_is_checked_again(world: Path) -> None:
    loaded(world)
    forget_all(world / "cache")
    assert was_checked(loaded(world))
    assert not was_checked(loaded(world))


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], ()),
        ([(5, 7), (0, 5)], ((0, 7),)),
        ([(0, 9), (2, 3)], ((0, 9),)),
        ([(8, 9), (0, 1), (1, 2)], ((0, 2), (8, 9))),
    ],
)
def test_spans_that_touch_are_one(
    spans: list[tuple[int, int]], expected: tuple[tuple[int, int], ...]
) -> None:
    assert joined(spans) == expected
