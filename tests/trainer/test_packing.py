"""Values of any shape, as items of a checkpoint and back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from weightyard.errors import Damaged, Refused
from weightyard.trainer.packing import Room, pack, places, unpack
from weightyard.trainer.state import State, decode, encode


def through_a_checkpoint(items: dict[str, Any]) -> dict[str, Any]:
    """As torch flattens them, and as objects come back from state.json."""
    flat, _ = flatten_state_dict(items)
    assert flat.keys() == items.keys()
    objects = {fqn: one for fqn, one in flat.items() if not isinstance(one, torch.Tensor)}
    return {**flat, **decode(encode(State(objects))).objects}


def test_a_value_comes_back_with_what_torch_would_have_lost() -> None:
    value = {
        "empty": {},
        3: {"deep": [(), {}, [1.5, None]]},
        "pair": (torch.arange(3), ["text", torch.ones(2, 2)]),
        "large": 1 << 70,
    }
    back = unpack("data", through_a_checkpoint(pack("data", value)))
    assert torch.equal(back["pair"][0], torch.arange(3))
    assert torch.equal(back["pair"][1][1], torch.ones(2, 2))
    assert type(back["pair"]) is tuple
    assert (back["empty"], back[3], back["large"]) == (value["empty"], value[3], value["large"])


def test_counters_come_back_as_counters_and_the_dicts_beside_them_as_dicts() -> None:
    milestones = Counter({3: 1, 5: 2})
    value = {"seen": [milestones, {3: 1}], 3: Counter(), "w": torch.ones(2)}
    back = unpack("sched", through_a_checkpoint(pack("sched", value)))
    assert torch.equal(back.pop("w"), torch.ones(2))
    assert back == {"seen": [milestones, {3: 1}], 3: Counter()}
    assert [type(one) for one in (*back["seen"], back[3])] == [Counter, dict, Counter]
    whole = unpack("sched", through_a_checkpoint(pack("sched", milestones)))
    assert type(whole) is Counter
    assert whole == milestones


def test_a_tensor_alone_comes_back() -> None:
    items = pack("generator", torch.arange(3))
    assert len(items) == 2
    assert torch.equal(unpack("generator", through_a_checkpoint(items)), torch.arange(3))


def test_tensors_are_items_by_their_paths() -> None:
    items = pack("ema", OrderedDict({"layers.0.weight": torch.ones(1), "n": 1}))
    assert set(items) == {"ema", "ema.layers.0.weight"}


def test_what_cannot_be_saved_is_refused_by_its_path() -> None:
    with pytest.raises(Refused, match=r"sched\['steps'\]\[1\].*function"):
        pack("sched", {"steps": [1, lambda: 2]})
    with pytest.raises(Refused, match="this name"):
        pack("ema", {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_tensors_are_loaded_into_those_that_fit_and_else_into_new_ones() -> None:
    def entry(*size: int) -> TensorStorageMetadata:
        return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), [])

    known = {
        "ema": BytesStorageMetadata(),
        "ema.a": entry(2),
        "ema.b": entry(3),
        "emas": BytesStorageMetadata(),
    }
    live = pack("ema", {"a": torch.ones(2), "b": torch.ones(7)})
    found = places(["ema"], Metadata(known), live, Room())
    assert found.keys() == {"ema", "ema.a", "ema.b"}
    assert found["ema.a"] is live["ema.a"]
    assert found["ema.b"].shape == (3,)
    assert places(["other"], Metadata(known), {}, Room()) == {}


@pytest.mark.parametrize(
    "item",
    [None, 3, ({},), ({}, 3), ({}, [3]), ({}, [["missing"]]), ({}, [[["x"]]])],
)
def test_items_that_make_no_value_are_damaged(item: object) -> None:
    with pytest.raises(Damaged):
        unpack("data", {"data": item})
