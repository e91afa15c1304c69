"""What optimizers keep: saved whatever it is made of, or refused by its key once it is there."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import RUN, as_bytes

from weightyard.errors import Refused
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.trainer.run import TrainRun
from weightyard.yard import Yard


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "store"), settings=settings) as opened:
        yield opened


class Averaging(torch.optim.Optimizer):
    """Steps along the mean of its last gradients, and keeps what it is told to besides."""

    def __init__(self, parameters: Any, extra: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._extra = extra

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                last = state.setdefault("last", [])
                last[:] = [*last[-1:], parameter.grad.clone()]
                state["extra"] = self._extra(parameter)
                parameter -= group["lr"] * sum(last) / len(last)


def of_all_kinds(parameter: torch.Tensor) -> Any:
    norms = {0: parameter.norm(), 1: [parameter.abs().max(), (True, 2.5)]}
    return {"norms": norms, "seen": [], "deep": {"er": {"n": 3}}}


def lbfgs(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(net.parameters(), max_iter=3, history_size=4)


def averaging(net: nn.Module) -> torch.optim.Optimizer:
    return Averaging(net.parameters(), of_all_kinds)


def trained(
    yard: Yard, run_name: str, make: Callable[[nn.Module], torch.optim.Optimizer], until: int
) -> tuple[int | None, dict[str, bytes], list[Any]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = make(net)
    batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        made: torch.Tensor = net(batch).square().mean()
        made.backward()
        return made

    with TrainRun(yard, run_name, {"model": net, "optim": optimizer}, interval=2) as run:
        resumed = run.resume()
        while run.steps < until:
            loss()
            optimizer.step(loss)  # type: ignore[arg-type]
            run.step()
    kept = [entries.get("extra") for entries in optimizer.state.values()]
    return resumed, as_bytes(net.state_dict()), kept


@pytest.mark.parametrize("make", [lbfgs, averaging])
def test_lists_and_dicts_in_an_optimizers_state_come_back(
    yard: Yard, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    trained(yard, RUN, make, 3)
    resumed, weights, kept = trained(yard, RUN, make, 5)
    _, never_interrupted, also_kept = trained(yard, "team/other", make, 5)
    assert resumed == 2
    assert weights == never_interrupted
    assert str(kept) == str(also_kept)


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        (lambda one: {"ids": {1, 2}}, r"optim\.state\.0\.weight\.extra\.ids: a builtins\.set"),
        (lambda one: [1, [len]], r"optim\.state\.0\.weight\.extra\[1\]\[0\]: a builtins"),
        (lambda one: [1, "text"], r"optim\.state\.0\.weight\.extra\[1\]: .*str"),
        (lambda one: one.to_sparse(), r"optim\.state\.0\.weight\.extra: .*sparse"),
    ],
)
def test_what_an_optimizer_makes_that_cannot_be_saved_is_named_by_the_first_step(
    yard: Yard, extra: Callable[[torch.Tensor], Any], path: str
) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = Averaging(net.parameters(), extra)
    with TrainRun(yard, RUN, {"model": net, "optim": optimizer}, interval=None) as run:
        run.step()  # no step of the optimizer yet
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        with pytest.raises(Refused, match=path):
            run.step()
    with pytest.raises(Refused, match=path):
        TrainRun(yard, RUN, {"model": net, "optim": optimizer})


@pytest.mark.parametrize("key", ["last.step", 0, ""])
def test_a_key_of_an_optimizers_state_that_would_come_back_as_another_is_refused(
    yard: Yard, key: Any
) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with TrainRun(yard, RUN, {"model": net, "optim": optimizer}, interval=None) as run:
        optimizer.state[net.weight][key] = torch.ones(3)
        with pytest.raises(Refused, match=rf"optim\.state\.weight: .*{key!r}"):
            run.step()
    with pytest.raises(Refused, match=rf"optim\.state\.weight: .*{key!r}"):
        TrainRun(yard, RUN, {"model": net, "optim": optimizer})


def test_a_first_group_without_parameters_is_no_hindrance(yard: Yard) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        net = nn.Linear(4, 4)
        groups = [{"params": []}, {"params": list(net.parameters()), "lr": 0.5}]
        return net, torch.optim.AdamW(groups)

    net, optimizer = made()
    with TrainRun(yard, RUN, {"model": net, "optim": optimizer}, interval=1) as run:
        net(torch.ones(4)).sum().backward()
        optimizer.step()
        run.step()
    again, fresh = made()
    fresh.param_groups[1]["lr"] = 0.1
    with TrainRun(yard, RUN, {"model": again, "optim": fresh}) as run:
        assert run.resume() == 1
    assert [len(group["params"]) for group in fresh.param_groups] == [0, 2]
    assert fresh.param_groups[1]["lr"] == 0.5
    assert torch.equal(fresh.state[again.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])


def test_several_groups_without_parameters_are_refused_when_the_run_is_made(yard: Yard) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(
        [{"params": []}, *({"params": [one]} for one in net.parameters())]
    )
    optimizer.add_param_group({"params": []})
    with pytest.raises(Refused, match="optim: 2 of its groups have no parameters"):
        TrainRun(yard, RUN, {"model": net, "optim": optimizer})


def test_what_an_optimizer_keeps_beside_its_state_is_refused_by_its_key(yard: Yard) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "ema": 0.9})
    with pytest.raises(Refused, match=r"optim: .*SGD.*'ema'"):
        TrainRun(yard, RUN, {"model": net, "optim": optimizer})


@pytest.mark.parametrize(
    "setting",
    [
        Counter({"a": 1}),
        {"seen": Counter({1: 2})},
        (1, [2], [3]),
        {"deep": {2: [1.5]}, "empty": {}},
        {},
        [{"from": 1}, []],
        [],
        ["head", "slow"],
        ({"a": 1}, [0]),
        ((0.9, []), [["a"]]),
        "head",
        [torch.arange(3)],
    ],
)
def test_a_setting_of_a_group_comes_back_whatever_it_is(yard: Yard, setting: Any) -> None:
    def made(setting: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        net = nn.Linear(6, 5)
        first = {"params": [net.weight], "setting": setting}
        return net, torch.optim.AdamW([first, {"params": [net.bias], "setting": None}])

    net, optimizer = made(setting)
    with TrainRun(yard, RUN, {"model": net, "optim": optimizer}) as run:
        run.save()
    again, fresh = made(copy.deepcopy(setting))
    with TrainRun(yard, RUN, {"model": again, "optim": fresh}) as run:
        assert run.resume() == 0
    first, other = fresh.param_groups
    assert repr(first["setting"]) == repr(setting)
    assert other["setting"] is None


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ([torch.ones(2), torch.zeros(3)], [torch.ones(2)]),
        ([torch.ones(2)], []),
        ([], [torch.ones(2), torch.zeros(3)]),
        (torch.tensor(0.5), 0.1),
        (0.5, torch.tensor(0.1)),
    ],
)
def test_a_setting_that_has_other_tensors_by_now_comes_back_as_it_was_saved(
    yard: Yard, saved: Any, here: Any
) -> None:
    def made(setting: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(6, 5)
        return net, torch.optim.AdamW([{"params": [*net.parameters()], "setting": setting}])

    for step in (1, 2):
        net, optimizer = made(copy.deepcopy(saved))
        with TrainRun(yard, RUN, {"model": net, "optim": optimizer}) as run:
            assert run.resume() == (1 if step == 2 else None)
            run.step()
            run.save()
    again, fresh = made(here)
    with TrainRun(yard, RUN, {"model": again, "optim": fresh}) as run:
        assert run.resume() == 2, "no checkpoint was passed over"
    assert repr(fresh.param_groups[0]["setting"]) == repr(saved)
