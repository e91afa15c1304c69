"""Following an alias on a yard of this host, by asking its database now and again."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from followed import PROD, Net, holds, ready, state
from loader_world import BERT, left_threads, noise, same, sharded, yard_in
from sqlalchemy import Connection, select
from waiting import SOON_S, eventually

from weightyard.errors import BadSetting, Bug, Damaged, NoSuchThing, Refused, TooLarge
from weightyard.format.block import MIB
from weightyard.loader import staging
from weightyard.loader.follower import Follower
from weightyard.loader.leases import Holding
from weightyard.loader.staging import Stage
from weightyard.registry import schema
from weightyard.settings import Settings
from weightyard.storage.store import Store
from weightyard.testing.faults import FaultyStore
from weightyard.transfer.reader import Reader
from weightyard.yard import Yard

BLOCK = 16 * MIB


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path, poll_s=0.05) as opened:
        yield opened
    assert left_threads() == []


def tuned(tensor: torch.Tensor) -> torch.Tensor:
    """With some values of every block changed."""
    tensor[::64] *= 1.5
    return tensor


def packs_of(yard: Yard, folder: Path, ref: str) -> list[Path]:
    """The packs that only this version needs."""
    blocks = [block.id for block in yard.manifest(ref).blocks]
    names = {one.pack.hex for some in yard.catalogue.placements(blocks).values() for one in some}
    return [folder / "store" / "packs" / name[:2] / name for name in sorted(names)]


def test_each_forward_pass_sees_one_version_when_apply_is_called_between_passes(
    yard: Yard,
) -> None:
    yard.push(state(1), BERT, alias="prod")
    net, seen, over = Net(), [], threading.Event()

    def serve(follower: Follower) -> None:
        while not over.is_set():
            follower.apply()
            number = int(net.steps)
            assert holds(net, number)
            seen.append(number)

    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        serving = threading.Thread(target=serve, args=(follower,))
        serving.start()
        try:
            eventually(lambda: seen)
            for number in (2, 3, 4):
                yard.push(state(number), BERT, alias="prod")
                eventually(lambda number=number: seen and seen[-1] == number)
                assert follower.version is not None
                assert follower.version.number == number
        finally:
            over.set()
            serving.join()
    assert seen == sorted(seen)
    assert set(seen) >= {1, 2, 3, 4}


def test_only_blocks_that_changed_travel(yard: Yard) -> None:
    first = {"big": noise(3 * BLOCK // 4, dtype=torch.float32), "small": noise(64, seed=1)}
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["big"][BLOCK // 4 + 7] = 1.0
    yard.push(first, BERT, alias="prod", codec="raw")
    weights = yard.load(PROD)
    memory = weights["big"].data_ptr()
    with yard.follow(PROD, weights) as follower:
        yard.push(second, BERT, alias="prod", codec="raw")
        ready(follower, 2)
        assert follower.report is not None
        assert follower.report.raw_bytes == BLOCK
        assert follower.report.stored_bytes <= BLOCK + MIB
        follower.apply()
    assert same(weights, second)
    assert weights["big"].data_ptr() == memory


def test_the_registry_is_asked_once_where_changed_blocks_lie(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"w": noise(BLOCK, seed=1), "small": noise(100, seed=2)}
    second = {"w": first["w"].clone(), "small": noise(100, seed=3)}
    tuned(second["w"][: BLOCK // 2])
    yard.push(first, BERT, alias="prod")
    served = yard.load(PROD)
    asked: list[int] = []
    placements = type(yard.catalogue).placements

    def counted(catalogue: Any, blocks: Any, **more: Any) -> Any:
        asked.append(len(blocks))
        return placements(catalogue, blocks, **more)

    with yard.follow(PROD, served) as follower:
        monkeypatch.setattr(type(yard.catalogue), "placements", counted)
        yard.push(second, BERT, alias="prod")
        ready(follower, 2)
        follower.apply()
    assert asked == [2]
    assert same(served, second)


def test_what_is_applied_already_is_not_read_again(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    loaded = yard.load_into(net, PROD)
    with yard.follow(PROD, net, applied=loaded.ref) as follower:
        assert follower.wait(0.3) is None
        assert follower.version is not None
        assert follower.version.number == 1
        yard.push(state(1), BERT, alias="prod")
        ready(follower, 2)
        assert follower.report is not None
        assert follower.report.raw_bytes == 0
        applied = follower.apply()
        assert applied is not None
        assert applied.number == 2


def test_a_delta_to_what_is_resident_travels_alone(yard: Yard) -> None:
    first, second = {"w": noise(1024, 9000)}, {"w": tuned(noise(1024, 9000))}
    yard.push(first, BERT, alias="prod")
    weights = yard.load(PROD)
    with yard.follow(PROD, weights) as follower:
        pushed = yard.push(second, BERT, alias="prod", parent=f"{BERT}@v1", delta="also")
        ready(follower, 2)
        assert follower.report is not None
        assert 0 < follower.report.stored_bytes < pushed.stored_bytes / 2
        follower.apply()
    assert same(weights, second)


def test_a_base_that_was_changed_in_memory_is_not_built_upon(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = {"w": noise(1024, 9000)}, {"w": tuned(noise(1024, 9000))}
    yard.push(first, BERT, alias="prod")
    weights = yard.load(PROD)
    weights["w"][5, 5] = 3.0
    caplog.set_level(logging.INFO, "weightyard")
    with yard.follow(PROD, weights) as follower:
        yard.push(second, BERT, alias="prod", parent=f"{BERT}@v1", delta="also")
        ready(follower, 2)
        follower.apply()
    assert "follow.base_changed" in caplog.text
    assert torch.equal(weights["w"], second["w"])


def test_a_base_that_is_changed_while_its_delta_comes_is_not_built_upon(yard: Yard) -> None:
    first, second = {"w": noise(1024, 9000)}, {"w": tuned(noise(1024, 9000))}
    yard.push(first, BERT, alias="prod")
    weights = yard.load(PROD)
    yard.push(second, BERT, parent=f"{BERT}@v1", delta="also")
    yard.manifest(f"{BERT}@v2")

    def tamper(_: int, name: str) -> None:
        if name == "read":
            weights["w"][5, 5] = 3.0

    store = FaultyStore(yard.store, on_call=tamper)
    other = Yard(store, yard.catalogue, block_bytes=BLOCK, settings=yard._settings)
    with other.follow(PROD, weights) as follower:
        yard.set_alias(BERT, "prod", 2)
        ready(follower, 2)
        follower.apply()
    assert torch.equal(weights["w"], second["w"])


def test_a_delta_whose_base_is_not_resident_is_read_with_its_base(yard: Yard) -> None:
    first, second = {"w": noise(1024, 9000)}, {"w": tuned(noise(1024, 9000))}
    yard.push(first, BERT)
    yard.push(second, BERT, alias="prod", parent=f"{BERT}@v1", delta="only")
    weights = {"w": torch.zeros_like(first["w"])}
    with yard.follow(PROD, weights) as follower:
        ready(follower, 2)
        follower.apply()
    assert same(weights, second)


def test_applying_needs_neither_store_nor_database(yard: Yard, tmp_path: Path) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net, poll_s=600) as follower:
        ready(follower, 1)
        shutil.rmtree(tmp_path / "store" / "packs")
        follower.apply()
        assert holds(net, 1)


def test_a_damaged_version_leaves_the_old_one_serving_until_it_is_healed(
    yard: Yard, tmp_path: Path
) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        follower.apply()
        yard.push(state(2), BERT)
        (pack,) = packs_of(yard, tmp_path, f"{BERT}@v2")
        sound = pack.read_bytes()
        pack.write_bytes(bytes(byte ^ 0xFF for byte in sound))
        yard.set_alias(BERT, "prod", 2)
        eventually(lambda: isinstance(follower.failure, Damaged))
        assert follower.ready() is None
        assert follower.apply() == follower.version
        assert holds(net, 1)
        pack.write_bytes(sound)
        ready(follower, 2)
        assert follower.failure is None
        follower.apply()
        assert holds(net, 2)


def test_a_damaged_index_on_this_node_does_not_keep_a_version_from_being_followed(
    yard: Yard, tmp_path: Path
) -> None:
    shards = {"a": noise(30, 30)}, {"b": noise(30, 30, seed=2)}
    yard.push(sharded(tmp_path / "model", *shards), BERT, alias="prod")
    index = yard.snapshot(PROD) / "model.safetensors.index.json"
    index.chmod(0o600)
    index.write_bytes(index.read_bytes().replace(b'"a"', b'"q"'))
    with yard.follow(PROD) as follower:
        ready(follower, 1)
        assert same(dict(follower.changed()), shards[0] | shards[1])


def test_the_next_good_version_follows_one_that_is_gone(yard: Yard, tmp_path: Path) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        follower.apply()
        yard.push(state(2), BERT)
        for pack in packs_of(yard, tmp_path, f"{BERT}@v2"):
            pack.unlink()
        yard.set_alias(BERT, "prod", 2)
        eventually(lambda: isinstance(follower.failure, Damaged))
        yard.push(state(3), BERT, alias="prod")
        ready(follower, 3)
        assert follower.failure is None
        follower.apply()
        assert holds(net, 3)


def test_a_change_over_the_budget_is_refused_before_it_is_read(yard: Yard) -> None:
    first = {"big": noise(BLOCK // 4, dtype=torch.float32), "small": noise(MIB, seed=1)}
    yard.push(first, BERT, alias="prod", codec="raw")
    weights = yard.load(PROD)
    with yard.follow(PROD, weights, max_host_bytes=72 * MIB) as follower:
        yard.push(first | {"big": first["big"] + 1}, BERT, alias="prod", codec="raw")
        eventually(lambda: isinstance(follower.failure, TooLarge))
        assert "max_host_bytes" in str(follower.failure)
        assert same(weights, first)
        third = first | {"small": first["small"] + 1}
        yard.push(third, BERT, alias="prod", codec="raw")
        ready(follower, 3)
        follower.apply()
    assert same(weights, third)


def test_a_removed_alias_is_told_and_the_old_version_stays(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        follower.apply()
        yard.set_alias(BERT, "prod", None)
        eventually(lambda: isinstance(follower.failure, NoSuchThing))
        assert holds(net, 1)
        assert follower.version is not None
        yard.push(state(2), BERT, alias="prod")
        ready(follower, 2)
        assert follower.failure is None
        yard.set_alias(BERT, "prod", None)
        eventually(lambda: follower.ready() is None)
        follower.apply()
        assert holds(net, 1)


def test_a_rollback_takes_back_what_was_ready(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        follower.apply()
        yard.push(state(2), BERT, alias="prod")
        ready(follower, 2)
        yard.rollback_alias(BERT, "prod")
        eventually(lambda: follower.ready() is None)
        follower.apply()
        assert holds(net, 1)
        yard.push(state(3), BERT, alias="prod")
        ready(follower, 3)
        follower.apply()
        yard.set_alias(BERT, "prod", 1)
        ready(follower, 1)
        follower.apply()
        assert holds(net, 1)


class _Gate:
    """Lets the reads of a store through when it is open."""

    def __init__(self, store: Store) -> None:
        self.open = threading.Event()
        self.waiting = threading.Event()
        self.store = FaultyStore(store, on_call=self._called)

    def _called(self, _: int, name: str) -> None:
        if name == "read" and not self.open.is_set():
            self.waiting.set()
            assert self.open.wait(SOON_S)


def test_a_newer_version_takes_the_place_of_one_on_its_way(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    yard.load_into(net, PROD)
    gate = _Gate(yard.store)
    slow = Yard(gate.store, yard.catalogue, block_bytes=BLOCK, settings=yard._settings)
    shown = []
    yard.push(state(2), BERT)
    yard.push(state(3), BERT)
    for number in (2, 3):  # their manifests are read before the gate is closed
        gate.open.set()
        slow.manifest(f"{BERT}@v{number}")
    gate.open.clear()
    with slow.follow(PROD, net, applied=f"{BERT}@v1") as follower:
        yard.set_alias(BERT, "prod", 2)
        assert gate.waiting.wait(SOON_S)
        yard.set_alias(BERT, "prod", 3)
        eventually(lambda: follower._wanted is not None and follower._wanted.number == 3)
        gate.open.set()
        eventually(lambda: shown.append(follower.ready()) or shown[-1] is not None)
        follower.apply()
    assert {one.number for one in shown if one is not None} == {3}
    assert holds(net, 3)


def test_changed_gives_what_differs_by_all_its_names(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    server: dict[str, torch.Tensor] = {}
    with yard.follow(PROD) as follower:
        ready(follower, 1)
        server |= dict(follower.changed())
        assert same(server, state(1))
        assert server["embed"] is server["head"]
        assert follower.version is not None
        yard.push(state(1) | {"norm": torch.ones(64) * 2}, BERT, alias="prod")
        ready(follower, 2)
        # Small tensors share a block, so those beside one that changed come with it.
        assert [name for name, _ in follower.changed()] == ["norm", "steps"]
        assert follower.version.number == 2
        assert list(follower.changed()) == []
        with pytest.raises(Refused, match="changed"):
            follower.apply()


def test_what_was_not_taken_to_its_end_comes_again(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    with yard.follow(PROD) as follower:
        ready(follower, 1)
        server = dict(follower.changed())
        yard.push(state(2), BERT, alias="prod")
        ready(follower, 2)
        taking = follower.changed()
        taken = [next(taking) for _ in range(3)]
        taking.close()
        assert follower.version is not None
        assert follower.version.number == 1
        ready(follower, 2)
        server |= dict(taken)
        yard.set_alias(BERT, "prod", 1)
        eventually(lambda: follower.ready() is not None and follower.ready().number == 1)
        server |= dict(follower.changed())
        assert same(server, state(1))


def test_a_first_version_that_was_not_taken_to_its_end_comes_again_or_the_next_one(
    yard: Yard,
) -> None:
    first = {"a": noise(3), "b": noise(4), "c": noise(5)}
    other = {"b": noise(6), "d": noise(7)}
    yard.push(first, BERT, alias="prod")
    with yard.follow(PROD) as follower:
        ready(follower, 1)
        assert next(follower.changed())[0] == "a"
        ready(follower, 1)
        assert same(dict(follower.changed()), first)
    with yard.follow(PROD) as follower:
        ready(follower, 1)
        assert next(follower.changed())[0] == "a"
        yard.push(other, BERT, alias="prod")
        eventually(lambda: (found := follower.ready()) is not None and found.number == 2)
        assert same(dict(follower.changed()), other)
        third = other | {"d": noise(7, seed=1)}
        yard.push(third, BERT, alias="prod")
        ready(follower, 3)
        assert dict(follower.changed()).keys() >= {"d"}
        assert follower.version is not None
        assert follower.version.number == 3


def test_leases_are_held_on_what_is_resident_and_given_up_at_the_end(yard: Yard) -> None:
    def leased() -> set[str]:
        def ask(tx: Connection) -> set[str]:
            versions, leases = schema.versions, schema.read_leases
            wanted = select(versions.c.number).join(leases, leases.c.version_id == versions.c.id)
            return {f"v{row.number}" for row in tx.execute(wanted)}

        return yard.registry.database.read(ask)

    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        assert leased() == {"v1"}
        follower.apply()
        yard.push(state(2), BERT, alias="prod")
        ready(follower, 2)
        assert leased() == {"v1", "v2"}
        follower.apply()
        eventually(lambda: leased() == {"v2"})
    assert leased() == set()


def test_a_ref_that_means_nothing_yet_is_waited_for(yard: Yard) -> None:
    net = Net()
    with yard.follow(PROD, net) as follower:
        eventually(lambda: isinstance(follower.failure, NoSuchThing))
        assert follower.version is None
        assert follower.apply() is None
        yard.push(state(1), BERT, alias="prod")
        ready(follower, 1)
        follower.apply()
    assert holds(net, 1)


def test_what_is_followed_is_read_from_where_the_reader_was_told_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    def made(*parts: Any, settings: Settings, **how: Any) -> Reader:
        told.append(settings.location)
        return Reader(*parts, settings=settings, **how)

    monkeypatch.setattr(staging, "Reader", made)
    with yard_in(tmp_path, poll_s=0.05, location="/rack-b") as yard:
        yard.push({"weight": noise(64)}, BERT, alias="prod")
        with yard.follow(PROD) as follower:
            ready(follower, 1)
    assert told == ["/rack-b"]


def test_a_pace_that_is_none_is_refused(yard: Yard) -> None:
    with pytest.raises(BadSetting, match="poll_s"):
        yard.follow(PROD, poll_s=0)


def test_what_is_closed_brings_nothing_more(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    follower = yard.follow(PROD, net)
    ready(follower, 1)
    follower.close()
    follower.close()
    assert follower.ready() is None
    assert follower.apply() is None
    assert holds(net, 0)


def test_what_failed_in_a_way_nobody_foresaw_is_tried_again(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring, tries, is_seen = Stage.bring, itertools.count(), threading.Event()

    def short_of_memory(*words: Any, **options: Any) -> Any:
        if next(tries) == 0:
            raise MemoryError("injected")
        assert is_seen.wait(SOON_S)
        return bring(*words, **options)

    monkeypatch.setattr(Stage, "bring", short_of_memory)
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net) as follower:
        eventually(lambda: isinstance(follower.failure, Bug))
        assert "MemoryError" in str(follower.failure)
        is_seen.set()
        ready(follower, 1)
        assert follower.failure is None
        follower.apply()
    assert holds(net, 1)


def test_a_thread_that_ended_is_told_as_a_failure(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(holding: Holding, refs: object) -> None:
        raise RuntimeError("no more threads")

    yard.push(state(1), BERT, alias="prod")
    monkeypatch.setattr(Holding, "hold", ends)
    with yard.follow(PROD) as follower:
        eventually(lambda: follower.failure)
        assert isinstance(follower.failure, Bug)
        assert "no more threads" in str(follower.failure)
        yard.push(state(2), BERT, alias="prod")
        assert follower.wait(0.3) is None
        assert isinstance(follower.failure, Bug), "a move does not hide it"
