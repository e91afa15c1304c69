"""Ranks that load together: every byte is read once, and they fail together."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_world import RANKS, Outcome, World, outcome, run_ranks
from loader_world import BERT, noise, same, saved, sharded, yard_in
from waiting import eventually

from weightyard.errors import Cancelled, RankFailed, StoreUnavailable
from weightyard.format.block import MIB
from weightyard.loader import joint, peers
from weightyard.loader.asked import Asked
from weightyard.loader.load import plan
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.peers import Alone
from weightyard.loader.report import Tally
from weightyard.loader.shared import load_shared
from weightyard.records import Version
from weightyard.storage.deadline import NEVER
from weightyard.testing.faults import FaultyStore
from weightyard.yard import Yard

TIED = noise(300, 700, seed=50)
STATE: dict[str, torch.Tensor] = {
    **{f"layers.{number}.weight": noise(1024, 1024, seed=number) for number in range(12)},
    "embed": TIED,
    "head": TIED,
    "large": noise(4096, 2048, seed=60),
    "norm": noise(1024, seed=61, dtype=torch.float32),
    "none": noise(0, 4),
    "ids": torch.arange(1000),
}
BYTES = sum(one.nbytes for name, one in STATE.items() if name != "head")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("group")
    with yard_in(folder) as yard:
        yard.push(STATE, BERT, codec="raw", alias="prod")
    return World(folder, str(folder / "store"))


def alone(world: World, **asked: Any) -> int:
    """Bytes from the store for one who loads by himself."""
    with world.yard(99) as yard:
        return yard.load(BERT, **asked).report.stored_bytes


def load_all(world: World, rank: int, **asked: Any) -> Outcome:
    with world.yard(rank) as yard:
        return outcome(yard, BERT, STATE, **asked)


@pytest.mark.parametrize("verify", ["fast", "full"])
def test_every_rank_gets_all_of_it_and_together_they_read_one_copy(
    world: World, verify: str
) -> None:
    found = run_ranks(world, partial(load_all, verify=verify))
    assert [one.message for one in found.values()] == [""] * RANKS
    assert all(one.is_same for one in found.values())
    reports = [one.report for one in found.values()]
    assert sum(one.read_bytes for one in reports) == BYTES
    assert sum(one.stored_bytes for one in reports) == alone(world)
    for report in reports:
        assert BYTES / RANKS / 2 < report.read_bytes < BYTES / RANKS * 2
        assert report.read_bytes + report.received_bytes == BYTES
        assert (report.bytes, report.ranks, report.amplification) == (BYTES, RANKS, 1.0)
        assert report.group_read_bytes == BYTES


def load_rows(world: World, rank: int) -> Outcome:
    part = slice(rank * 1024, (rank + 1) * 1024)
    with world.yard(rank) as yard:
        return outcome(
            yard, BERT, {"large": STATE["large"][part]}, tensors="large", slices={"*": part}
        )


def test_of_rows_each_rank_reads_its_own(world: World) -> None:
    found = run_ranks(world, load_rows)
    assert all(one.is_same for one in found.values()), found
    for report in (one.report for one in found.values()):
        assert report.read_bytes == report.bytes == STATE["large"].nbytes // RANKS
        assert report.received_bytes == 0
        assert report.amplification == 1.0


def load_columns(world: World, rank: int) -> Outcome:
    def columns(tensor: torch.Tensor) -> Any:
        width = tensor.shape[1] // RANKS
        return slice(None), slice(rank * width, (rank + 1) * width)

    chosen = {name: STATE[name] for name in ("large", "layers.3.weight")}
    with world.yard(rank) as yard:
        return outcome(
            yard,
            BERT,
            {name: one[columns(one)] for name, one in chosen.items()},
            tensors=list(chosen),
            slices={name: columns(one) for name, one in chosen.items()},
            dtype="bfloat16",
            max_host_bytes=64 * MIB,
        )


def test_of_columns_the_group_reads_one_copy_and_not_one_for_each_rank(world: World) -> None:
    found = run_ranks(world, load_columns)
    assert all(one.is_same for one in found.values()), found
    reports = [one.report for one in found.values()]
    whole = STATE["large"].nbytes + STATE["layers.3.weight"].nbytes
    assert sum(one.read_bytes for one in reports) == whole
    assert sum(one.stored_bytes for one in reports) == alone(
        world, tensors=["large", "layers.3.weight"]
    )
    assert {one.amplification for one in reports} == {1.0}


def load_uneven(world: World, rank: int) -> Outcome:
    """Rows that meet within a chunk, some of them wanted by two."""
    part = slice(rank * 900, rank * 900 + 1000)
    expected = {"large": STATE["large"][part], "ids": STATE["ids"][rank::2]}
    with world.yard(rank) as yard:
        return outcome(
            yard,
            BERT,
            expected,
            tensors=["large", "ids"],
            slices={"large": part, "ids": slice(rank, None, 2)},
        )


def test_chunks_that_two_ranks_want_are_read_by_one_of_them(world: World) -> None:
    found = run_ranks(world, load_uneven)
    assert all(one.is_same for one in found.values()), found
    reports = [one.report for one in found.values()]
    together = alone(world, tensors=["large", "ids"], slices={"large": slice(0, 3700)})
    assert sum(one.stored_bytes for one in reports) == together
    assert max(one.received_bytes for one in reports) > 0


def load_moving(world: World, rank: int) -> Outcome:
    with world.yard(rank) as yard:
        resolve = yard._version_to_use

        def moving(*asked: Any) -> Any:
            """The alias moves as soon as one rank knows what it meant."""
            version = resolve(*asked)
            yard.set_alias("team/moving", "prod", 2)
            return version

        yard._version_to_use = moving  # type: ignore[method-assign]
        return outcome(yard, "team/moving@prod", {"w": noise(2000, 1000, seed=1)})


def test_all_ranks_load_the_same_version_while_the_alias_moves(world: World) -> None:
    with world.yard(99) as yard:
        yard.push({"w": noise(2000, 1000, seed=1)}, "team/moving", alias="prod")
        yard.push({"w": noise(2000, 1000, seed=2)}, "team/moving")
    found = run_ranks(world, load_moving)
    assert [(one.version, one.is_same) for one in found.values()] == [(1, True)] * RANKS
    with world.yard(99) as yard:
        assert yard.resolve("team/moving@prod").number == 2


def fail_to_ask(world: World, rank: int) -> list[Outcome]:
    with world.yard(rank) as yard:
        wrong = {"tensors": "no.such.*"} if rank == 2 else {}
        return [outcome(yard, BERT, STATE, **wrong), outcome(yard, BERT, STATE)]


def test_a_rank_that_asks_for_what_is_not_there_is_named_to_all_and_the_group_goes_on(
    world: World,
) -> None:
    found = run_ranks(world, fail_to_ask)
    assert found[2][0].error == "NoSuchThing"
    for rank in (0, 1, 3):
        first = found[rank][0]
        assert (first.error, first.ranks) == ("RankFailed", (2,))
        assert "rank 2: no-such-thing: no tensor fits" in first.message
    assert all(second.is_same for _, second in found.values())


def ask_wrongly(world: World, rank: int, wrong: Mapping[str, Any]) -> list[Outcome]:
    with world.yard(rank) as yard:
        asked = wrong if rank == 2 else {"timeout": 20.0}
        return [outcome(yard, BERT, STATE, **asked), outcome(yard, BERT, STATE)]


@pytest.mark.parametrize(
    "wrong",
    [{"verify": "x"}, {"timeout": "soon"}, {"max_host_bytes": 1}, {"device_decode": True}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_rank_with_a_wrong_argument_is_named_to_all_at_once_and_the_group_goes_on(
    world: World, wrong: Mapping[str, Any]
) -> None:
    found = run_ranks(world, partial(ask_wrongly, wrong=wrong))
    assert found[2][0].error == "BadSetting"
    for rank in (0, 1, 3):
        first = found[rank][0]
        assert (first.error, first.ranks) == ("RankFailed", (2,))
        assert f"rank 2: bad-setting: {next(iter(wrong))}" in first.message
    assert all(second.is_same for _, second in found.values())


def fail_to_read(world: World, rank: int) -> Outcome:
    with world.yard(rank) as yard:
        if rank != 1:
            return outcome(yard, BERT)
        reads: list[str] = []

        def fail_later(index: int, name: str) -> None:
            reads.extend([name] if name == "read" else [])
            if len(reads) > 2:
                raise StoreUnavailable("the disk is gone")

        faulty = FaultyStore(yard.store, on_call=fail_later)
        other = Yard(faulty, yard.catalogue, block_bytes=16 * MIB, settings=yard._settings)
        return outcome(other, BERT)


def test_a_rank_that_cannot_read_fails_all_of_them(world: World) -> None:
    found = run_ranks(world, fail_to_read)
    assert found[1].error == "StoreUnavailable"
    for rank in (0, 2, 3):
        assert (found[rank].error, found[rank].ranks) == ("RankFailed", (1,))
        assert "store-unavailable" in found[rank].message


def be_gone(world: World, rank: int, how: signal.Signals, timeout: float | None) -> Outcome:
    peers.ROLL_CALL_S, peers.ALONE_S = 6.0, 30.0  # ranks of a busy machine notice one by one

    def end(done_bytes: int) -> None:
        os.kill(os.getpid(), how)

    with world.yard(rank) as yard:
        dist.barrier()  # their times begin together
        return outcome(yard, BERT, timeout=timeout, progress=end if rank == 2 else None)


@pytest.mark.parametrize(("how", "timeout"), [(signal.SIGKILL, None), (signal.SIGSTOP, 8.0)])
def test_a_rank_that_is_gone_half_way_is_named_and_nobody_hangs(
    world: World, how: signal.Signals, timeout: float | None
) -> None:
    found = run_ranks(world, partial(be_gone, how=how, timeout=timeout), dead=[2])
    for rank in (0, 1, 3):
        assert (found[rank].error, found[rank].ranks) == ("RankFailed", (2,)), found[rank]
        assert "did not answer" in found[rank].message
        assert found[rank].seconds < peers.WAIT_S / 2


def answer_late(world: World, rank: int) -> list[int]:
    peers.ROLL_CALL_S, peers.ALONE_S = 2.0, 60.0
    group = dist.group.WORLD
    one = peers.Peers(group, NEVER)
    if rank == 2:
        return []  # it is gone
    if rank != 0:
        # Both are late for who asks first, by more than a roll call, and not for each other.
        store = dist.distributed_c10d._get_default_store()
        store.wait([f"weightyard/{one._call}/0"])
        time.sleep(1.5 * peers.ROLL_CALL_S)
        store.set(f"late/{rank}", "yes")
        store.wait(["late/1", "late/3"])
    return one._missing()


def test_ranks_that_are_slow_to_notice_are_not_taken_for_gone(world: World) -> None:
    assert run_ranks(world, answer_late) == {0: [2], 1: [2], 2: [], 3: [2]}


def load_with_files(world: World, rank: int) -> Outcome:
    with world.yard(rank) as yard:
        if rank == 3:
            yard.snapshot("team/files")
        return outcome(yard, "team/files", shards())


def shards() -> Mapping[str, torch.Tensor]:
    return {f"l.{number}": noise(700, 1000, seed=number) for number in range(6)}


def test_a_rank_whose_node_has_the_files_maps_them_and_the_others_read(
    world: World, tmp_path: Path
) -> None:
    tensors = shards()
    halves = [{name: tensors[name] for name in list(tensors)[at::2]} for at in range(2)]
    with world.yard(99) as yard:
        yard.push(sharded(tmp_path / "model", *halves), "team/files", codec="raw")
    found = run_ranks(world, load_with_files)
    assert all(one.is_same for one in found.values()), found
    assert [one.report.from_snapshot for one in found.values()] == [False, False, False, True]
    assert found[3].report.read_bytes == found[3].report.received_bytes == 0
    total = sum(one.nbytes for one in tensors.values())
    assert sum(one.report.read_bytes for one in found.values()) == total


class Telling(Alone):
    """Keeps what it was doing whenever it told the others."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, step: Callable[[], bytes], doing: str) -> list[bytes]:
        self.told.append(doing)
        return super().tell(step, doing)


def test_a_rank_that_maps_files_tells_the_others_in_between_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SLICE_S", -1.0)
    ranks, asked, found = Telling(), Asked(), dict[int, torch.Tensor]()
    with yard_in(tmp_path) as yard:
        yard.push(saved(tmp_path / "model.safetensors", shards()), BERT)
        yard.snapshot(BERT)
        origin = yard._origin(BERT, asked, cache=True)
        plans = plan(origin, asked)
        planned = joint.Planned(origin, asked, Destination(torch.device("cpu")), plans)
        joint.read_jointly(ranks, lambda: planned, found.__setitem__)
    assert same({plans[at].name: one for at, one in found.items()}, shards())
    assert ranks.told.count("reading") == len(plans) + 1


class Failing(Telling):
    """Beside another rank, which fails after a while."""

    def tell(self, step: Callable[[], bytes], doing: str) -> list[bytes]:
        if self.told.count("planning") > 3:
            raise RankFailed([1], "injected")
        return super().tell(step, doing)


def test_a_rank_that_brings_the_version_to_its_node_tells_the_others_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SLICE_S", 0.01)
    ranks = Telling()
    with yard_in(tmp_path) as yard:
        yard.push(shards(), BERT)

        def bring(version: Version, asked: Asked) -> Origin:
            eventually(lambda: ranks.told.count("planning") > 3)
            return yard._origin_of(version, asked, Tally(), cache=True, leaves=False)

        weights = load_shared(ranks, lambda: yard.resolve(BERT), bring, Asked(), "cpu")
    assert same(weights, shards())


def test_what_a_rank_brings_to_its_node_is_given_up_when_another_rank_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SLICE_S", 0.01)
    ended: list[Exception] = []

    def bring(version: Version, asked: Asked) -> Origin:
        try:
            eventually(lambda: not asked.deadline.left("bringing"))
        except Cancelled as why:
            ended.append(why)
            raise
        raise AssertionError("it has all the time there is")

    with yard_in(tmp_path) as yard:
        yard.push(shards(), BERT)
        with pytest.raises(RankFailed, match="injected"):
            load_shared(Failing(), lambda: yard.resolve(BERT), bring, Asked(), "cpu")
    assert len(ended) == 1


def test_what_failed_is_told_though_its_text_is_no_unicode() -> None:
    length, text_bytes, text = peers._HEADER.unpack(peers._header(0, OSError("no file \udcff")))
    assert (length, text[:text_bytes]) == (0, b"OSError: no file ?")


def load_encoded(world: World, rank: int) -> Outcome:
    told: list[int] = []
    with world.yard(rank) as yard:
        found = outcome(yard, "team/encoded", {"w": encoded()}, progress=told.append)
    assert sum(told) == encoded().nbytes
    return found


def encoded() -> torch.Tensor:
    return noise(3000, 3001, seed=5)


def test_encoded_blocks_are_shared_too_and_progress_is_told(world: World, tmp_path: Path) -> None:
    with world.yard(99) as yard:
        yard.push(saved(tmp_path / "model.safetensors", {"w": encoded()}), "team/encoded")
        stored_bytes = yard.load("team/encoded").report.stored_bytes
    found = run_ranks(world, load_encoded, size=3)
    assert all(one.is_same for one in found.values()), found
    assert sum(one.report.stored_bytes for one in found.values()) <= stored_bytes * 1.01


def run_docs(world: World, rank: int) -> bool:
    os.environ["WEIGHTYARD_STORE"] = world.url
    os.environ["WEIGHTYARD_HOME"] = str(world.folder / "home")
    os.environ["WEIGHTYARD_CACHE"] = str(world.folder / f"cache-{rank}")
    page = (Path(__file__).parents[2] / "docs" / "loading.md").read_text()
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.S) if "group=" in one]
    exec(compile(block, "loading.md", "exec"), {"__name__": "__main__"})
    return True


def test_what_the_docs_show_runs_under_a_launcher(world: World) -> None:
    with world.yard(99) as yard:
        yard.push({"w": noise(100, 100)}, "team/tiny", alias="prod")
    assert run_ranks(world, run_docs, size=2, is_grouped=False) == {0: True, 1: True}
