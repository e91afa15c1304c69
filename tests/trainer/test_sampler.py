"""Which samples a rank gets: each of an epoch once, whoever starts and stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from weightyard.errors import Refused
from weightyard.trainer.sampler import GlobalOffsetSampler, order_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


class Numbers(Dataset[int]):
    """Sample n is n."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> int:
        return at


class Stream(IterableDataset[int]):
    """Samples that nobody chooses."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def line(seed: int | None, length: int) -> Iterator[int]:
    """Epoch after epoch, as one rank alone would see them."""
    epoch = 0
    while True:
        yield from order_of(seed, epoch, length).tolist()
        epoch += 1


def steps_of(ranks: Iterable[Iterator[Any]], steps: int) -> list[int]:
    """What so many batches on each rank hold; fewer if the passes end before."""
    return [sample for rank in ranks for batch in islice(rank, steps) for sample in batch.tolist()]


def samplers(length: int, ranks: int, state: dict[str, Any] | None) -> list[GlobalOffsetSampler]:
    """One for each rank, another seed than the state's: the state's must win."""
    made = [GlobalOffsetSampler(length, seed=99, rank=rank, ranks=ranks) for rank in range(ranks)]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
    return made


def only(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The state all ranks agree on."""
    first, *others = states
    assert all(other == first for other in others)
    return first


PHASES = st.lists(
    st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=6
)
"""Ranks, batch size, and after how many steps everything stops."""


@given(length=st.integers(1, 60), seed=st.none() | st.integers(0, 2**40), phases=PHASES)
def test_however_often_ranks_and_batches_change_the_line_is_consumed_in_order(
    length: int, seed: int | None, phases: list[tuple[int, int, int]]
) -> None:
    state = GlobalOffsetSampler(length, seed=seed).state_dict()
    consumed: list[int] = []
    for ranks, batch_size, steps in phases:
        made = samplers(length, ranks, state)
        loaders = [DataLoader(Numbers(length), batch_size, sampler=one) for one in made]
        loops = [one.batches(loader) for one, loader in zip(made, loaders, strict=True)]
        phase = steps_of(loops, steps)
        expected = islice(line(seed, length), len(consumed), len(consumed) + len(phase))
        assert Counter(phase) == Counter(expected)
        consumed += phase
        state = only(one.state_dict() for one in made)
        assert (state["epoch"], state["consumed"]) == divmod(len(consumed), length)


def test_four_then_three_then_six_ranks_see_each_of_1200_samples_once() -> None:
    state, seen = None, []
    for ranks, steps in ((4, 15), (3, 20), (6, 1000)):
        made = samplers(1200, ranks, state)
        loops = [one.batches(DataLoader(Numbers(1200), 4, sampler=one)) for one in made]
        seen += steps_of(loops, steps)
        state = only(one.state_dict() for one in made)
    assert sorted(seen) == list(range(1200))
    assert state == {"epoch": 1, "seed": 99, "consumed": 0, "length": 1200}


def test_all_ranks_get_equally_many_and_the_next_epoch_goes_on_after_those_it_lent() -> None:
    made = samplers(10, 4, None)
    first, second = ([list(one) for one in made] for _ in range(2))
    assert {len(share) for share in first} == {3}
    assert Counter(chain(*first)) == Counter(islice(line(99, 10), 12))
    assert Counter(chain(*first, *second)) == Counter(islice(line(99, 10), 20))


def test_the_order_is_a_function_of_seed_and_epoch_and_stays_what_it_is() -> None:
    assert order_of(7, 0, 10).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert order_of(7, 1, 10).tolist() != order_of(7, 0, 10).tolist()
    assert order_of(8, 0, 10).tolist() != order_of(7, 0, 10).tolist()
    assert order_of(None, 3, 5).tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(np.sort(order_of(1, 2, 1000)), np.arange(1000))


def test_what_workers_fetched_ahead_is_not_consumed() -> None:
    sampler = GlobalOffsetSampler(100, seed=3)
    loader = DataLoader(Numbers(100), 5, sampler=sampler, num_workers=2, prefetch_factor=4)
    loop = sampler.batches(loader)
    given = steps_of([loop], 3)
    assert sampler.state_dict()["consumed"] == 15  # of 55 that are fetched
    loop.close()  # type: ignore[attr-defined]
    given += steps_of([sampler.batches(loader)], 100)  # left early and taken up again
    assert given == order_of(3, 0, 100).tolist()
    assert (sampler.epoch, sampler.consumed) == (1, 0)


@pytest.mark.parametrize("steps", [3, 8])
def test_a_loop_left_when_all_is_fetched_goes_on_with_what_it_was_not_given(steps: int) -> None:
    sampler = GlobalOffsetSampler(18, seed=3)
    loader = DataLoader(Numbers(18), 2, sampler=sampler, num_workers=1, prefetch_factor=9)
    given = steps_of([sampler.batches(loader)], steps)
    given += steps_of([iter(loader)], 100)[: 18 - 2 * steps]
    assert given == order_of(3, 0, 18).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_counts_by_itself_and_goes_on_with_other_ranks(workers: int) -> None:
    def loaders(ranks: int) -> list[StatefulDataLoader[int]]:
        made = samplers(60, ranks, None)
        return [
            StatefulDataLoader(Numbers(60), 2, sampler=one, num_workers=workers) for one in made
        ]

    before = loaders(4)
    seen = steps_of([iter(one) for one in before], 3)
    state = [one.state_dict() for one in before][2]
    after = loaders(3)
    for loader in after:
        loader.load_state_dict(state)
    seen += steps_of([iter(one) for one in after], 100)
    assert sorted(seen) == list(range(60))
    following = steps_of([iter(one) for one in after], 100)
    assert Counter(following) == Counter(order_of(99, 1, 60).tolist())


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("stop", [2, 4])  # inside an epoch, and at its end
def test_batches_draws_after_a_resume_what_it_would_have_drawn_without(
    kind: type[DataLoader[int]], stays: bool, stop: int
) -> None:
    """Workers that stay from epoch to epoch are started once, and only then a number is drawn."""

    def epochs(sampler: GlobalOffsetSampler) -> Iterator[int]:
        loader = kind(Numbers(8), 2, sampler=sampler, num_workers=1, persistent_workers=stays)
        while sampler.epoch < 2:
            yield from sampler.batches(loader)

    with torch.random.fork_rng(devices=[]):
        sampler = GlobalOffsetSampler(8)
        steps = epochs(sampler)
        for _ in range(stop):
            next(steps)
        resumed, numbers = GlobalOffsetSampler(8), torch.get_rng_state()
        resumed.load_state_dict(sampler.state_dict())
        expected = [float(torch.rand(())) for _ in steps]
        torch.set_rng_state(numbers)
        assert [float(torch.rand(())) for _ in epochs(resumed)] == expected


def said_by_samplers(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Not what others in this process log meanwhile."""
    log = GlobalOffsetSampler.__module__
    return [one.getMessage() for one in caplog.records if one.name == log]


def test_batches_counts_a_stateful_loader_from_where_it_was_saved() -> None:
    before = GlobalOffsetSampler(30, seed=5)
    loader = StatefulDataLoader(Numbers(30), 4, sampler=before, num_workers=2)
    steps_of([before.batches(loader)], 3)
    after = GlobalOffsetSampler(30, seed=5)
    restored = StatefulDataLoader(Numbers(30), 4, sampler=after, num_workers=2)
    restored.load_state_dict(loader.state_dict())
    assert steps_of([after.batches(restored)], 2) == order_of(5, 0, 30).tolist()[12:20]
    assert after.state_dict() == {"epoch": 0, "seed": 5, "consumed": 20, "length": 30}


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("begun", [0, 4])
def test_an_epoch_of_which_all_is_fetched_at_once_is_counted_from_where_it_begins(
    kind: type[DataLoader[int]], begun: int
) -> None:
    sampler = GlobalOffsetSampler(8, seed=3)
    sampler.load_state_dict({"epoch": 0, "seed": 3, "consumed": begun, "length": 8})
    loader = kind(Numbers(8), 2, sampler=sampler, num_workers=2, prefetch_factor=4)
    given, places = [], []
    for _ in range(2):
        for batch in sampler.batches(loader):
            given += batch.tolist()
            places.append(8 * sampler.epoch + sampler.consumed)
    assert given == list(islice(line(3, 8), begun, 16))
    assert places == list(range(begun + 2, 17, 2))


def test_batches_counts_a_stateful_loader_that_was_saved_near_the_end_of_an_epoch() -> None:
    before = GlobalOffsetSampler(30, seed=5)
    loader = StatefulDataLoader(Numbers(30), 4, sampler=before, num_workers=2)
    steps_of([before.batches(loader)], 6)
    after = GlobalOffsetSampler(30, seed=5)
    restored = StatefulDataLoader(Numbers(30), 4, sampler=after, num_workers=2)
    restored.load_state_dict(loader.state_dict())
    assert steps_of([after.batches(restored)], 1) == order_of(5, 0, 30).tolist()[24:28]
    assert after.state_dict() == {"epoch": 0, "seed": 5, "consumed": 28, "length": 30}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_samples_that_nobody_counts_is_warned_of_once(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = GlobalOffsetSampler(60)
    sampler.state_dict()  # as a run does when it is made
    for _ in DataLoader(Numbers(60), 2, sampler=sampler, num_workers=workers):
        assert sampler.state_dict()["consumed"] == 0
    (warned,) = said_by_samplers(caplog)
    assert "sampler.not_counted" in warned
    assert "sampler.batches(loader)" in warned


@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_counted_is_not_warned_of(
    workers: int, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = GlobalOffsetSampler(20)
    plain = DataLoader(Numbers(20), batch, sampler=sampler, num_workers=workers)
    for _ in sampler.batches(plain):
        sampler.state_dict()
    by_itself = GlobalOffsetSampler(20)
    stateful = StatefulDataLoader(Numbers(20), batch, sampler=by_itself, num_workers=workers)
    for _ in stateful:
        stateful.state_dict()
    assert said_by_samplers(caplog) == []


def test_what_drop_last_drops_does_not_come_back() -> None:
    sampler = GlobalOffsetSampler(10, seed=1)
    loader = DataLoader(Numbers(10), 4, sampler=sampler, drop_last=True)
    assert steps_of([sampler.batches(loader)], 9) == order_of(1, 0, 10).tolist()[:8]
    assert steps_of([sampler.batches(loader)], 9) == order_of(1, 1, 10).tolist()[:8]


def test_samples_one_by_one_are_counted() -> None:
    sampler = GlobalOffsetSampler(10, seed=1)
    loop = sampler.batches(DataLoader(Numbers(10), batch_size=None, sampler=sampler))
    assert list(islice(loop, 4)) == order_of(1, 0, 10).tolist()[:4]
    assert sampler.consumed == 4
    assert len(sampler) == 6


def test_a_loader_that_does_not_say_its_batch_size_is_refused() -> None:
    sampler = GlobalOffsetSampler(10)
    with pytest.raises(Refused, match="list does not say how many samples"):
        next(sampler.batches([1, 2, 3]))


GOOD = {"epoch": 0, "seed": 1, "consumed": 3, "length": 10}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "has epoch, seed, consumed, length"),
        ({**GOOD, "rank": 1}, "not \\['consumed'"),
        ({**GOOD, "length": 11}, "a dataset of 11 samples, this one has 10"),
        ({**GOOD, "consumed": 10}, "the epoch would be over"),
        ({**GOOD, "consumed": -1}, "consumed -1"),
        ({**GOOD, "epoch": 1.0}, "epoch 1.0"),
        ({**GOOD, "epoch": True}, "epoch True"),
        ({**GOOD, "seed": 2**80}, "seed 1208925819614629174706176"),
    ],
)
def test_a_state_that_cannot_be_is_refused(state: dict[str, Any], why: str) -> None:
    sampler = GlobalOffsetSampler(10, seed=4)
    with pytest.raises(Refused, match=why):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == {"epoch": 0, "seed": 4, "consumed": 0, "length": 10}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"length": 0}, "0 samples"),
        ({"length": 5, "rank": 2, "ranks": 2}, "rank 2 of 2"),
        ({"length": 5, "rank": 0}, "rank and ranks, or neither"),
        ({"length": 5, "seed": -1}, "seed -1"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        GlobalOffsetSampler(**arguments)


def test_a_loader_that_does_not_sample_by_it_is_refused() -> None:
    sampler = GlobalOffsetSampler(10, seed=1)
    data = Numbers(10)
    loaders: list[DataLoader[Any]] = [
        DataLoader(data, 4),
        DataLoader(data, 4, shuffle=True),
        DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0)),
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)),
        DataLoader(data, batch_size=None),
        DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 10, 10)),
        DataLoader(data, 4, sampler=SubsetRandomSampler(range(10))),
        DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 4, False)),
        StatefulDataLoader(data, 4, shuffle=True),
        DataLoader(Stream(), 4),
        DataLoader(Stream(), batch_size=None),
    ]
    for loader in loaders:
        with pytest.raises(Refused, match="sampler="):
            next(sampler.batches(loader))
    own = DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    assert sorted(torch.cat(list(sampler.batches(own))).tolist()) == list(range(10))


def test_batches_that_the_sampler_itself_gives_are_counted_as_such() -> None:
    sampler = GlobalOffsetSampler(10, seed=1)
    four = BatchSampler(sampler, 4, drop_last=False)
    loop = sampler.batches(DataLoader(Numbers(10), batch_size=None, sampler=four))
    given = torch.as_tensor(next(iter(loop))).tolist()
    assert given == order_of(1, 0, 10)[:4].tolist()
    assert sampler.consumed == 4


def test_a_loader_that_gives_batches_in_any_order_is_refused() -> None:
    sampler = GlobalOffsetSampler(10, seed=1)
    loader = DataLoader(Numbers(10), 2, sampler=sampler, num_workers=2, in_order=False)
    with pytest.raises(Refused, match="in_order"):
        next(sampler.batches(loader))
    loader = DataLoader(Numbers(10), 2, sampler=sampler, in_order=False)
    assert steps_of([sampler.batches(loader)], 5) == order_of(1, 0, 10).tolist()


@pytest.mark.parametrize("length", [[1, 2, 3], 3.0, "3"])
def test_a_length_that_is_no_whole_number_is_refused(length: Any) -> None:
    with pytest.raises(Refused, match=r"len\(dataset\)"):
        GlobalOffsetSampler(length)
