"""Which modules can follow: one that is given late, one of other dtypes, one that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from followed import PROD, Net, holds, ready, state
from loader_world import BERT, left_threads, noise, yard_in
from torch import nn
from waiting import eventually

from weightyard.errors import DoesNotFit, Refused
from weightyard.format.block import MIB
from weightyard.yard import Yard

BLOCK = 16 * MIB


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path, poll_s=0.05) as opened:
        yield opened
    assert left_threads() == []


def test_a_module_can_be_given_when_a_version_is_applied(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD) as follower:
        ready(follower, 1)
        with pytest.raises(DoesNotFit, match="unexpected keys"):
            follower.apply(nn.Linear(4, 4))
        with pytest.raises(Refused, match="changed"):
            follower.apply()
        assert follower.apply(net) == follower.version
        assert holds(net, 1)
        yard.push(state(2), BERT, alias="prod")
        ready(follower, 2)
        follower.apply(net)
        assert holds(net, 2)


def test_a_module_given_when_a_version_is_applied_is_compared_in_names_shapes_and_dtypes(
    yard: Yard,
) -> None:
    yard.push(state(1), BERT, alias="prod")
    more, other = Net(), Net()
    more.extra = nn.Parameter(torch.zeros(4))
    other.steps = torch.zeros(1)
    net = Net()
    with yard.follow(PROD) as follower:
        ready(follower, 1)
        with pytest.raises(DoesNotFit, match="extra"):
            follower.apply(more)
        with pytest.raises(DoesNotFit, match="steps"):
            follower.apply(other)
        assert holds(other, 0), "nothing of it was changed"
        follower.apply(net)
        with pytest.raises(Refused, match="another module"):
            follower.apply(Net())


def test_a_module_given_when_a_version_is_applied_gets_only_the_blocks_that_changed(
    yard: Yard,
) -> None:
    yard.push(state(1), BERT, alias="prod")
    second = state(2)
    second["embed"] = second["head"] = state(1)["embed"]
    second["embed"][0, 0] = 2.0
    net = Net()
    with yard.follow(PROD) as follower:
        ready(follower, 1)
        follower.apply(net)
        yard.push(second, BERT, alias="prod")
        ready(follower, 2)
        assert follower.report is not None
        assert follower.report.raw_bytes < net.embed.nbytes
        follower.apply()
        assert torch.equal(net.embed, second["embed"])


def test_another_module_than_the_one_followed_is_refused(yard: Yard) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        with pytest.raises(Refused, match="another module"):
            follower.apply(Net())
        follower.apply(net)
        assert holds(net, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"norm": torch.zeros(65)},
        {"more": torch.zeros(3)},
        {"steps": torch.zeros(1)},
    ],
    ids=["shape", "name", "dtype"],
)
def test_a_version_of_another_structure_is_not_taken(
    yard: Yard, change: dict[str, torch.Tensor]
) -> None:
    yard.push(state(1), BERT, alias="prod")
    net = Net()
    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        follower.apply()
        yard.push(state(2) | change, BERT, alias="prod")
        eventually(lambda: isinstance(follower.failure, DoesNotFit))
        assert follower.ready() is None
        assert holds(net, 1)
        yard.push(state(3), BERT, alias="prod")
        ready(follower, 3)


def test_a_module_of_another_float_type_keeps_it(yard: Yard) -> None:
    yard.push({"weight": noise(64, 64), "bias": noise(64, seed=1)}, BERT, alias="prod")
    second = {"weight": noise(64, 64), "bias": noise(64, seed=2)}
    net = nn.Linear(64, 64)
    with yard.follow(PROD, net) as follower:
        ready(follower, 1)
        follower.apply()
        yard.push(second, BERT, alias="prod")
        ready(follower, 2)
        follower.apply()
    assert net.weight.dtype == torch.float32
    assert all(torch.equal(net.state_dict()[name], second[name].float()) for name in second)
