"""The random numbers of a rank, saved and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from weightyard.errors import DoesNotFit
from weightyard.trainer.packing import pack, unpack
from weightyard.trainer.rng import Rng, derive


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


def draw() -> tuple[float, ...]:
    """A number of each kind; of normal ones the second is kept by the generator beforehand."""
    return (
        random.random(),  # noqa: TID251 as training does
        random.gauss(),
        float(np.random.random()),
        float(np.random.standard_normal()),
        float(torch.rand(())),
    )


def saved_and_read() -> dict[str, object]:
    """The state as a checkpoint brings it back."""
    items = pack("rng", Rng().state_dict())
    return unpack("rng", {fqn: _copied(one) for fqn, one in items.items()})


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_generators_go_on_with_the_numbers_they_would_have_drawn() -> None:
    derive(1, 2, 3)
    draw()  # one normal number of each pair is left over
    state = saved_and_read()
    expected = [draw() for _ in range(3)]
    derive(9, 9, 9)
    Rng().load_state_dict(state)
    assert [draw() for _ in range(3)] == expected


def test_another_bit_generator_of_numpy_comes_back_too() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(4))
        state = saved_and_read()
        expected = draw()
        np.random.seed(1)
        Rng().load_state_dict(state)
        assert draw() == expected
    finally:
        np.random.set_bit_generator(before)


def test_derived_numbers_follow_from_seed_step_and_rank() -> None:
    drawn = {}
    for given in ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 2, 3)):
        derive(*given)
        numbers = draw()
        assert drawn.setdefault(given, numbers) == numbers
    for each_kind in zip(*drawn.values(), strict=True):
        assert len(set(each_kind)) == len(drawn)


def test_a_state_of_other_generators_does_not_fit_and_says_which_and_what_to_do() -> None:
    state = Rng().state_dict()
    for key, odd in (("python", {}), ("torch", torch.zeros(3)), ("numpy", {"bit_generator": "x"})):
        advice = rf"{key}.*exclude_from_loading=\['rng'\]"
        with pytest.raises(DoesNotFit, match=advice):
            Rng().load_state_dict({**state, key: odd})
