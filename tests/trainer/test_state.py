"""state.json: what is no tensor comes back as it was, and nothing in it can do harm."""

from __future__ import annotations

import random
import struct
from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hostile import ROUNDS, changed_bytes, changed_json, growing_at_most
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from weightyard.errors import Damaged, Refused, TooLarge, UnknownFormat, YardError
from weightyard.trainer import state as states
from weightyard.trainer.state import State, check_object, decode, encode

_KEYS = st.text() | st.integers()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(width=64)
    | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0])
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = st.from_regex(r"[a-z0-9_]{1,8}(\.[a-z0-9_]{1,8}){0,3}", fullmatch=True)


def exact(value: Any) -> Any:
    """A value with its types and bits, for comparing."""
    match value:
        case float():
            return "float", struct.pack(">d", value)
        case list() | tuple():
            return type(value), [exact(one) for one in value]
        case dict():
            return dict, [(exact(key), exact(one)) for key, one in value.items()]
    return type(value), value


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_values_come_back_with_their_types_and_bits(objects: dict[str, Any]) -> None:
    state = State(objects)
    text = encode(state)
    back = decode(text)
    assert {name: exact(one) for name, one in back.objects.items()} == {
        name: exact(one) for name, one in objects.items()
    }
    assert encode(State(dict(reversed(objects.items())))) == text  # one form


@given(
    st.recursive(
        st.integers(),
        lambda inner: st.dictionaries(
            st.text("abc", min_size=1, max_size=3), inner, min_size=1, max_size=3
        ),
    ).filter(lambda tree: isinstance(tree, dict))
)
def test_paths_lead_back_to_the_nested_state(tree: dict[str, Any]) -> None:
    tree["list"] = [torch.zeros(1), {"a": 1}]
    try:
        flat, paths = flatten_state_dict(tree)
    except ValueError:  # two keys that read alike, joined by dots
        return
    back = decode(encode(State({}, paths))).paths
    assert back == paths
    assert unflatten_state_dict(flat, dict(back)) == tree


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, {2: object()}]}, "sched['a'][1][2]: a builtins.object"),
        ((torch.zeros(2),), "sched[0]: a torch.Tensor"),
        (np.float64(1.0), "sched: a numpy.float64"),
        (Colour.RED, "sched: a test_state.Colour"),
        (OrderedDict(a=1), "sched: a collections.OrderedDict"),
        ({1.5: 2}, "sched: key 1.5 is neither text nor an int"),
        ({True: 2}, "sched: key True is neither text nor an int"),
        ({"a": ["\ud800"]}, "sched['a'][0]: text with half a character"),
        ({1, 2}, "sched: a builtins.set"),
    ],
)
def test_what_would_not_come_back_is_refused_by_its_key_path(value: Any, where: str) -> None:
    with pytest.raises(Refused) as refused:
        check_object(value, "sched")
    assert str(refused.value).startswith(where)


def test_a_container_in_itself_is_refused_and_not_followed_for_ever() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(Refused, match="over 64 containers in each other"):
        check_object(endless, "sched")


def test_a_name_that_nobody_could_show_is_refused() -> None:
    with pytest.raises(Refused, match="cannot be the name"):
        encode(State({"a\nb": 1}))


def test_too_much_state_is_refused_when_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_STATE_BYTES", 1000)
    with pytest.raises(TooLarge, match="keep large things in tensors"):
        encode(State({"text": "x" * 1000}))


@pytest.fixture
def small_memory() -> Iterator[None]:
    with growing_at_most(kib=64 * 1024):
        yield


_PLAIN = b'{"format":1,"objects":{},"paths":%s}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "truncated"),
        (b"[" * 5_000_000, "values"),
        (b'{"format":1,"objects":' + b'{"a":' * 100_000, "recursion"),
        (b'{"format":1,"objects":{"a":%s},"paths":{}}' % (b"[" * 65 + b"1" + b"]" * 65), "over 64"),
        (b'{"format":1,"objects":{"a":1,"a":1},"paths":{}}', "one form"),
        (b'{"format":1,"objects":{"b":1,"a":1},"paths":{}}', "one form"),
        (b'{"format":1,"objects":{"a":{"code":"x"}},"paths":{}}', "tag"),
        (b'{"format":1,"objects":{"a":{"bytes":"*"}},"paths":{}}', "base64"),
        (b'{"format":1,"objects":{"a":{"float":"00"}},"paths":{}}', "requires a buffer of 8"),
        (b'{"format":1,"objects":{"a":{"float":"3ff0000000000000"}},"paths":{}}', "one form"),
        (b'{"format":1,"objects":{"a":{"dict":[[1,2],[1,2]]}},"paths":{}}', "one form"),
        (b'{"format":1,"objects":{"a":{"dict":[[[],2]]}},"paths":{}}', "neither text nor an int"),
        (b'{"format":1,"objects":{},"paths":{},"more":1}', "one form"),
        (_PLAIN % b'{"a":["a",4000000000]}', "place 4000000000"),
        (_PLAIN % b'{"a":["a",-1]}', "place -1"),
        (_PLAIN % b'{"a":["a",4000000],"b":["b",4000000]}', "lists of over"),
        (_PLAIN % b'{"a":["a",1],"b":["a","x"]}', "contradicts"),
        (_PLAIN % b'{"a":["a"],"b":["a","x"]}', "contradicts"),
        (_PLAIN % b'{"a":["a","x"],"b":["a"]}', "contradicts"),
        (_PLAIN % b'{"a":[]}', "a path of 0 keys"),
        (_PLAIN % b'{"a":[1]}', "contradicts"),
    ],
)
@pytest.mark.usefixtures("small_memory")
def test_a_file_against_the_rules_is_damaged_and_takes_no_memory(text: bytes, why: str) -> None:
    with pytest.raises(Damaged, match=why):
        decode(text)


def test_a_newer_file_is_refused_as_such() -> None:
    with pytest.raises(UnknownFormat, match="reads up to 1"):
        decode(b'{"format":2,"anything":[]}')


@pytest.mark.usefixtures("small_memory")
def test_changed_files_are_refused_or_hold_every_rule() -> None:
    chance = random.Random(4)
    values = {"i": 7, "n": float("nan"), "b": b"\0\1", "t": (1, [2.5]), "d": {1: "x", "y": 2**80}}
    paths = {"i": ("i",), "m.0": ("m", 0), "m.1.w": ("m", 1, "w")}
    text = encode(State(values, paths))
    good = 0
    for number in range(ROUNDS):
        changed = changed_json(text, chance) if number % 5 else changed_bytes(text, chance)
        try:
            state = decode(changed)
        except YardError:
            continue
        good += 1
        assert encode(state) == changed
    assert 0 < good < ROUNDS / 2
