"""Wrong arguments from Python are refused by an error that says what to give instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_world import BERT, noise, same, yard_in

import weightyard
from weightyard.errors import BadSetting, InvalidName, NoSuchThing, Refused, Unsupported
from weightyard.loader.snapshots import open_snapshot
from weightyard.yard import Yard

LAYERS = {f"layers.{number}.weight": noise(8, 8, seed=number) for number in range(12)}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with yard_in(tmp_path_factory.mktemp("wrong")) as opened:
        opened.push(LAYERS, BERT, alias="prod")
        yield opened


def test_a_ref_or_a_name_that_is_no_text_is_called_so(yard: Yard, tmp_path: Path) -> None:
    anything: Any = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidName, match="Linear"):
        yard.load(anything)
    with pytest.raises(InvalidName, match="Linear"):
        yard.load_into(anything, anything)
    with pytest.raises(InvalidName, match="PosixPath"):
        yard.push(tmp_path, tmp_path)  # type: ignore[arg-type]


def test_a_ref_where_a_name_is_meant_is_called_so(yard: Yard) -> None:
    for call in (yard.versions, yard.delete_model):
        with pytest.raises(InvalidName, match="is a ref"):
            call(f"{BERT}@prod")


def test_a_tensor_name_with_a_slip_gets_those_that_are_near(yard: Yard) -> None:
    near = r"there are layers\.11\.weight"
    with pytest.raises(NoSuchThing, match=near):
        yard.load(BERT, tensors="layers.11.weigth")
    with pytest.raises(NoSuchThing, match=near):
        yard.load(BERT, slices={"layer.11.weight": 0})
    with yard.safe_open(BERT) as weights, pytest.raises(NoSuchThing, match=near):
        weights.get_tensor("layers.11.wieght")


def test_a_type_to_which_torch_does_not_cast_is_refused(yard: Yard) -> None:
    for load in (yard.load, yard.stream):
        with pytest.raises(Unsupported, match="does not cast to it"):
            load(BERT, dtype="float4_e2m1fn_x2")


@pytest.mark.parametrize("dtype", ["bf16", "int8", torch.int64, 3, "nn"])
def test_tensors_are_cast_to_floating_point_only(yard: Yard, dtype: Any) -> None:
    for load in (yard.load, yard.stream):
        with pytest.raises(Unsupported, match="'bfloat16'"):
            load(BERT, dtype=dtype)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "3", True])
def test_a_timeout_is_a_number_of_seconds(yard: Yard, timeout: Any) -> None:
    with pytest.raises(BadSetting, match="timeout="):
        yard.load(BERT, timeout=timeout)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensors": 3}, "tensors="),
        ({"tensors": [1]}, "tensors="),
        ({"files": 3}, "files="),
        ({"slices": [1]}, "slices="),
        ({"slices": {3: 1}}, "slices="),
        ({"max_host_bytes": "1GiB"}, "max_host_bytes"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(yard: Yard, given: Any, said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        yard.load(BERT, **given)


def test_what_is_to_be_called_is_a_function(yard: Yard, tmp_path: Path) -> None:
    """Else it is called in the middle of the work, or by a stream when its first tensor comes."""
    anything: Any = 5
    for call in (
        lambda **more: yard.load(BERT, **more),
        lambda **more: yard.load_into(torch.nn.Linear(1, 1), BERT, strict=False, **more),
        lambda **more: yard.stream(BERT, **more),
        lambda **more: yard.snapshot(BERT, **more),
        lambda **more: yard.pull(BERT, tmp_path / "out", **more),
        lambda **more: yard.push(LAYERS, "team/other", **more),
    ):
        with pytest.raises(BadSetting, match="progress=5: a function"):
            call(progress=anything)
    assert not (tmp_path / "out").exists()
    with yard.gather(LAYERS) as gathered, pytest.raises(BadSetting, match="progress=5"):
        yard.preview(gathered, "team/other", progress=anything)
    with pytest.raises(BadSetting, match="on_event=5: a function"):
        weightyard.open(tmp_path / "unused", on_event=anything)


def test_more_seconds_than_a_clock_has_are_no_bound(yard: Yard) -> None:
    assert same(yard.load(BERT, timeout=1e300, verify="full"), LAYERS)


def test_the_keys_of_another_dict_say_which_tensors_are_meant(yard: Yard) -> None:
    some = dict(list(LAYERS.items())[:2])
    for names in (some.keys(), set(some), some):
        assert same(yard.load(BERT, tensors=names), some)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", ["1GiB", None, 1.5])
def test_what_is_read_ahead_is_a_number_of_bytes(yard: Yard, ahead: Any) -> None:
    with pytest.raises(BadSetting, match="ahead_bytes="):
        yard.stream(BERT, ahead_bytes=ahead)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"poll_s": "5"}, BadSetting, "poll_s='5'"),
        ({"max_host_bytes": "1GiB"}, BadSetting, "max_host_bytes='1GiB'"),
        ({"applied": 3}, InvalidName, "not a int"),
        ({"module": {"layers.0.weight": 1}}, Refused, "layers.0.weight: .* not a int"),
    ],
)
def test_what_cannot_be_followed_so_is_refused_at_once(
    yard: Yard, given: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        yard.follow(f"{BERT}@prod", **given)


def test_a_device_that_is_none_is_refused_in_one_clear_line(yard: Yard) -> None:
    for device in (None, 3.5):
        with pytest.raises(Unsupported, match=r"such as 'cpu' or 'cuda:0'$"):
            yard.load(BERT, device=device)


def test_what_cannot_be_pushed_says_what_can(yard: Yard) -> None:
    module: Any = torch.nn.Linear(2, 2)
    with pytest.raises(Refused, match=r"state_dict\(\)"):
        yard.push(module, BERT)
    nothing: Any = None
    with pytest.raises(Refused, match="NoneType"):
        yard.push(nothing, BERT)
    numbered: Any = {1: noise(2)}
    with pytest.raises(Refused, match="tensor name"):
        yard.push(numbered, BERT)


@pytest.mark.parametrize("given", [{"codec": "zip"}, {"delta": "yes", "parent": BERT}])
def test_a_codec_or_a_delta_that_there_is_not_is_refused(yard: Yard, given: Any) -> None:
    (name,) = given.keys() - {"parent"}
    with pytest.raises(BadSetting, match=f"{name}="):
        yard.push(LAYERS, BERT, **given)


def test_only_a_module_is_loaded_into(yard: Yard) -> None:
    anything: Any = "module"
    with pytest.raises(Refused, match=r"torch\.nn\.Module"):
        yard.load_into(anything, BERT)


def test_a_pattern_need_not_be_in_a_list(yard: Yard, tmp_path: Path) -> None:
    """Read letter by letter its last one, `*`, would fit everything."""
    for name in ("model.bin", "config.json"):
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text("{}")
    yard.push(tmp_path / "model", "team/files")
    folder = yard.pull("team/files", tmp_path / "out", include="model*")
    assert [file.name for file in folder.iterdir()] == ["model.bin"]
    yard.push(tmp_path / "model", "team/files", exclude="model*")
    assert [file.name for file in yard.snapshot("team/files").iterdir()] == ["config.json"]
    some = yard.snapshot("team/files@v1", include="model*")
    assert [file.name for file in some.iterdir()] == ["model.bin"]


@pytest.mark.parametrize("given", [3, [3], b"model*"])
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_patterns_that_are_no_text_are_refused_by_their_option(
    yard: Yard, tmp_path: Path, option: str, given: Any
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for call in (
        lambda **more: yard.snapshot(BERT, **more),
        lambda **more: yard.pull(BERT, tmp_path / "out", **more),
        lambda **more: yard.push(tmp_path, "team/files", **more),
    ):
        with pytest.raises(BadSetting, match=f"{option}=.*: a text, or a list of them"):
            call(**{option: given})


def test_a_path_that_is_none_is_refused(yard: Yard) -> None:
    anything: Any = 3
    with pytest.raises(BadSetting, match="3 is no path"):
        yard.pull(BERT, anything)
    with pytest.raises(BadSetting, match="3 is no path"):
        open_snapshot(anything)


@pytest.mark.parametrize("said", ["metrics", "tags", "metadata"])
def test_what_is_said_of_a_version_goes_by_names(yard: Yard, said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        yard.push(LAYERS, BERT, **{said: 3})  # type: ignore[arg-type]


def test_an_alias_that_is_no_text_is_called_so(yard: Yard) -> None:
    anything: Any = 3
    with pytest.raises(InvalidName, match="alias is text such as 'prod', not a int"):
        yard.push(LAYERS, BERT, alias=anything)


def test_an_alias_is_expected_on_a_number(yard: Yard) -> None:
    anything: Any = "v1"
    with pytest.raises(BadSetting, match="expect="):
        yard.set_alias(BERT, "prod", 1, expect=anything)
