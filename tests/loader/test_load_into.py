"""Filling modules: parameters that are there, and those on meta."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_world import BERT, left_threads, noise, same, saved, yard_in
from torch import nn

from weightyard.errors import DoesNotFit, Refused, StoreUnavailable
from weightyard.format.block import MIB
from weightyard.loader import in_packs
from weightyard.yard import Yard


class Net(nn.Module):
    """Two layers, a tie, and buffers of both kinds."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 1024, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(1024, 1000, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def on_meta(dtype: torch.dtype = torch.bfloat16) -> Net:
    module = Net(dtype).to("meta")
    module.head.weight = module.embed.weight  # torch unties what it moves to meta
    return module


def weights(*, head: bool = False) -> dict[str, torch.Tensor]:
    made = {
        "embed.weight": noise(1000, 1024, seed=1),
        "layers.0.weight": noise(1024, 1024, seed=2),
        "layers.0.bias": noise(1024, seed=3),
        "layers.1.weight": noise(1024, 1024, seed=4),
        "layers.1.bias": noise(1024, seed=5),
        "steps": torch.tensor([4, 5, 6]),
    }
    return made | ({"head.weight": made["embed.weight"]} if head else {})


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_in(tmp_path) as opened:
        yield opened


def _holds(module: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    state = module.state_dict()
    return all(same({name: state[name]}, {name: one}) for name, one in expected.items())


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("snapshot", [False, True])
def test_parameters_are_filled_where_they_are(yard: Yard, atomic: bool, snapshot: bool) -> None:
    yard.push(weights(), BERT)
    if snapshot:
        yard.snapshot(BERT)
    module = Net()
    before = {name: one.data_ptr() for name, one in module.state_dict().items()}
    report = yard.load_into(module, BERT, atomic=atomic)
    assert _holds(module, weights(head=True))
    assert {name: one.data_ptr() for name, one in module.state_dict().items()} == before
    assert report.bytes == sum(one.nbytes for one in weights().values())
    assert report.from_snapshot == snapshot
    assert all(one.requires_grad for one in module.parameters())


def test_the_report_says_where_the_parameters_are_not_where_those_on_meta_would_go(
    yard: Yard,
) -> None:
    yard.push(weights(), BERT)
    assert yard.load_into(Net(), BERT, device="cpu:0").device == "cpu"
    assert yard.load_into(on_meta(), BERT, device="cpu:0").device == "cpu:0"


def test_parameters_keep_their_dtype_and_layout(yard: Yard) -> None:
    yard.push(weights(), BERT)
    module = Net(torch.float32)
    module.layers[0].weight = nn.Parameter(torch.empty(1024, 1024).t())
    yard.load_into(module, BERT)
    expected = {
        name: one.float() if one.is_floating_point() else one for name, one in weights().items()
    }
    assert _holds(module, expected)
    assert not module.layers[0].weight.is_contiguous()


@pytest.mark.parametrize("snapshot", [False, True])
def test_parameters_on_meta_are_made_and_ties_stay(yard: Yard, snapshot: bool) -> None:
    yard.push(weights(), BERT)
    if snapshot:
        yard.snapshot(BERT)
    module = on_meta(torch.float32)
    module.embed.weight.requires_grad_(False)
    yard.load_into(module, BERT)
    assert _holds(module, weights(head=True))
    assert module.head.weight is module.embed.weight
    assert not module.embed.weight.requires_grad
    assert isinstance(module.layers[0].weight, nn.Parameter)
    again = on_meta()
    yard.load_into(again, BERT, dtype="float32")
    assert again.embed.weight.dtype == torch.float32
    assert again.steps.dtype == torch.int64


def test_a_version_with_both_names_of_a_tie_fits_and_an_untied_module_too(yard: Yard) -> None:
    yard.push(weights(head=True), BERT)
    tied, apart = Net(), Net(tied=False)
    yard.load_into(tied, BERT)
    yard.load_into(apart, BERT)
    assert _holds(tied, weights(head=True))
    assert _holds(apart, weights(head=True))
    assert apart.head.weight.data_ptr() != apart.embed.weight.data_ptr()


def test_what_the_module_ties_but_the_version_does_not_is_refused(yard: Yard) -> None:
    yard.push(weights() | {"head.weight": noise(1000, 1024, seed=9)}, BERT)
    with pytest.raises(DoesNotFit, match=r"head\.weight differs from embed\.weight"):
        yard.load_into(Net(), BERT)


def test_missing_and_unexpected_keys_are_listed_and_nothing_is_read(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = weights()
    del state["layers.1.bias"]
    yard.push(state | {"extra": noise(3)}, BERT)
    module = Net()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    with pytest.raises(DoesNotFit) as caught:
        yard.load_into(module, BERT)
    assert caught.value.missing == ("layers.1.bias",)
    assert caught.value.unexpected == ("extra",)
    assert "missing keys: layers.1.bias; unexpected keys: extra" in str(caught.value)
    assert _holds(module, before)
    report = yard.load_into(module, BERT, strict=False)
    assert (report.missing, report.unexpected) == (("layers.1.bias",), ("extra",))
    some = yard.load_into(module, BERT, strict=False, tensors="layers.0.*")
    assert (some.missing, some.unexpected) == ((), ()), "what was not asked for is not missing"
    assert _holds(module, state)
    assert _holds(module, {"layers.1.bias": before["layers.1.bias"]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"layers.0.weight": noise(1024, 1025)},
            r"layers\.0\.weight is \[1024, 1025\], in the module \[1024",
        ),
        ({"steps": torch.zeros(3)}, r"steps is torch\.float32, in the module torch\.int64"),
        (
            {"steps": torch.zeros(3, dtype=torch.int32)},
            r"steps is torch\.int32, in the module torch\.int64",
        ),
        (
            {"layers.0.bias": torch.zeros(1024, dtype=torch.int64)},
            r"layers\.0\.bias is torch\.int64, in the module torch\.bfloat16",
        ),
    ],
    ids=["shape", "float-to-int", "int-to-int", "int-to-float"],
)
@pytest.mark.parametrize("atomic", [False, True])
def test_another_shape_or_kind_is_refused_before_any_byte_is_read_also_when_not_strict(
    yard: Yard,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, torch.Tensor],
    said: str,
    atomic: bool,
) -> None:
    yard.push(weights() | change, BERT)
    yard.resolve(BERT)
    read: list[Any] = []
    monkeypatch.setattr("weightyard.transfer.reader.Reader.read", lambda *words: read.append(words))
    with pytest.raises(DoesNotFit, match=said):
        yard.load_into(Net(), BERT, strict=False, atomic=atomic)
    assert read == []


def test_on_meta_a_tensor_is_of_whatever_kind_is_stored(yard: Yard) -> None:
    stored = weights() | {"steps": torch.zeros(3)}
    yard.push(stored, BERT)
    module = on_meta()
    yard.load_into(module, BERT)
    assert _holds(module, stored)


def test_some_tensors_can_be_asked_for_and_only_those_are_missed(yard: Yard) -> None:
    yard.push({"layers.0.weight": noise(1024, 1024, seed=8)}, BERT)
    module = Net()
    yard.load_into(module, BERT, tensors="layers.0.weight")
    assert _holds(module, {"layers.0.weight": noise(1024, 1024, seed=8)})


def _failing(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind the first 17 MiB of a pack cannot be read."""
    read = type(yard.store).read

    def failing(store: Any, location: Any, reads: Any, **options: Any) -> Any:
        if "packs/" in location.path.text and reads[-1].offset > 17 * MIB:
            raise StoreUnavailable("injected")
        return read(store, location, reads, **options)

    def not_mapped(memory: memoryview) -> None:
        raise OSError("injected")

    monkeypatch.setattr(type(yard.store), "read", failing)
    monkeypatch.setattr(in_packs, "have_at_hand", not_mapped)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_failure_leaves_parameters_on_meta(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    big = {f"{n}.weight": noise(4096, 2048, seed=n) for n in range(4)}
    yard.push(big, BERT, codec="raw")
    module = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(4))).to("meta")
    _failing(yard, monkeypatch)
    with pytest.raises(StoreUnavailable):
        yard.load_into(module, BERT, dtype=dtype)
    assert all(one.is_meta for one in module.parameters())
    assert left_threads() == []


def test_a_failure_of_an_atomic_load_leaves_every_parameter_as_it_was(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.push({f"{n}.weight": noise(4096, 2048, seed=n) for n in range(4)}, BERT, codec="raw")
    layers = [nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16) for _ in range(4)]
    module = nn.Sequential(*layers)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    _failing(yard, monkeypatch)
    with pytest.raises(StoreUnavailable):
        yard.load_into(module, BERT, atomic=True)
    assert _holds(module, before)


def test_files_are_chosen_as_for_load(yard: Yard, tmp_path: Path) -> None:
    saved(tmp_path / "m" / "model.safetensors", weights())
    saved(tmp_path / "m" / "other.safetensors", {"bias": noise(4)})
    yard.push(tmp_path / "m", BERT)
    module = Net()
    yard.load_into(module, BERT)
    assert _holds(module, weights(head=True))
    linear = nn.Linear(4, 4, dtype=torch.bfloat16)
    yard.load_into(linear, BERT, files="other*", strict=False)
    assert _holds(linear, {"bias": noise(4)})
    with pytest.raises(TypeError):
        yard.load_into(module, BERT, slices={"*": 1})  # type: ignore[call-arg]
    with pytest.raises(Refused):
        yard.load_into(module, BERT, device="warp")
