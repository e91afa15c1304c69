"""A checkpoint that claims more than it may: refused before any memory is allocated for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from training import RUN, setting, train

from weightyard.errors import Damaged, TooLarge
from weightyard.format.block import MIB
from weightyard.format.manifest import Manifest
from weightyard.opening import open_yard
from weightyard.settings import Settings
from weightyard.trainer import packing
from weightyard.trainer.parts import OptimizerPart
from weightyard.trainer.run import TrainRun
from weightyard.trainer.values import load_values
from weightyard.yard import Yard

GIB = 1 << 30
MOMENT = "optim.state.out.weight.exp_avg"


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """With a checkpoint of a run."""
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache")
    with open_yard(str(tmp_path / "store"), settings=settings) as opened:
        train(opened, 1, interval=1)
        yield opened


@pytest.fixture
def frugal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor over 64 MiB may be made."""
    for name in ("empty", "zeros"):
        make = getattr(torch, name)

        def made(size: Any, *args: Any, _make: Any = make, **options: Any) -> torch.Tensor:
            if isinstance(size, tuple):
                assert torch.Size(size).numel() < 64 * MIB
            return _make(size, *args, **options)

        monkeypatch.setattr(torch, name, made)


def claiming(manifest: Manifest, name: str, elements: int) -> Manifest:
    """A manifest in which a tensor is said to have so many elements."""
    entries = list(manifest.tensors)
    (at,) = [at for at, entry in enumerate(entries) if entry.name == name]
    (box,) = entries[at].boxes
    shape = (elements,)
    boxes = (msgspec.structs.replace(box, offset=(0,), shape=shape),)
    entries[at] = msgspec.structs.replace(entries[at], shape=shape, boxes=boxes)
    return msgspec.structs.replace(manifest, tensors=tuple(entries))


def claim(yard: Yard, monkeypatch: pytest.MonkeyPatch, name: str, elements: int) -> None:
    use = yard.use
    monkeypatch.setattr(
        yard, "use", lambda ref: (use(ref)[0], claiming(use(ref)[1], name, elements))
    )


@pytest.mark.parametrize(
    ("name", "elements"),
    [("ranks.0.rng.torch", 16 * GIB), (MOMENT, GIB << 20), ("ranks.0.rng.numpy.state.key", GIB)],
)
def test_a_resume_allocates_nothing_for_sizes_that_a_manifest_only_claims(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, frugal: None, name: str, elements: int
) -> None:
    claim(yard, monkeypatch, name, elements)
    made = setting()
    with TrainRun(yard, RUN, made.state) as run, pytest.raises(TooLarge, match=name):
        run.resume()
    assert not made.optimizer.state


def test_values_have_room_for_what_the_host_has_together(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, frugal: None
) -> None:
    """As the adapters load them."""
    name = "ranks.0.rng"
    assert load_values(yard, f"{RUN}@step-1", name)[name]["torch"].numel() > 1000
    monkeypatch.setattr(packing, "share_of_memory", lambda: 10_000)  # less than all generators need
    with pytest.raises(TooLarge, match="10000 bytes in all"):
        load_values(yard, f"{RUN}@step-1", name)
    monkeypatch.undo()
    claim(yard, monkeypatch, f"{name}.torch", GIB << 20)
    with pytest.raises(TooLarge, match=r"rng\.torch"):
        load_values(yard, f"{RUN}@step-1", name)


def test_entries_of_an_optimizer_that_contradict_each_other_are_damage() -> None:
    net = torch.nn.Linear(2, 2)
    part = OptimizerPart("optim", net, torch.optim.SGD(net.parameters()))
    odd = {"optim.state.weight.last": torch.ones(2), "optim.state.weight.last.more": 3}
    for entries in (odd, dict(reversed(odd.items()))):
        with pytest.raises(Damaged, match=r"optim\.state\.weight\.last"):
            part.restore({**part.items(), **entries})
