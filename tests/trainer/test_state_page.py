"""docs/format.md is enough for state.json: a reader written from the page alone reads it."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from test_state import NAMES, VALUES, exact

from weightyard.trainer import state as states
from weightyard.trainer.state import State, encode

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
SECTION = PAGE.partition("## 12. Checkpoint")[2]

EXAMPLE = State(
    {
        "epoch": 3,
        "lr": 0.001,
        "model.name": "a\n",
        "optim.betas": (0.9, 1.0),
        "rng.bits": 2**64,
        "rng.bytes": b"\0\1",
        "rng.key": {"a": None, 7: [True, -1]},
        "worst": math.inf,
    },
    {"epoch": ("epoch",), "optim.groups.0.w": ("optim", "groups", 0, "w")},
)


def second_reader(node: Any) -> Any:
    """A value. From the table of docs/format.md §12; nothing of weightyard is used."""
    if isinstance(node, list):
        return [second_reader(one) for one in node]
    if not isinstance(node, dict):
        return node
    ((tag, inside),) = node.items()
    match tag:
        case "int":
            return int(inside, 16)
        case "float":
            return struct.unpack(">d", int(inside, 16).to_bytes(8, "big"))[0]
        case "bytes":
            return base64.b64decode(inside)
        case "tuple":
            return tuple(second_reader(one) for one in inside)
        case "dict":
            return {second_reader(key): second_reader(one) for key, one in inside}
    raise AssertionError(f"the page has no {tag}")


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_a_reader_written_from_the_page_reads_what_is_written(objects: dict[str, Any]) -> None:
    file = json.loads(encode(State(objects, {name: (name,) for name in objects})))
    assert list(file) == ["format", "objects", "paths"]
    assert file["format"] == 1
    found = {name: exact(second_reader(one)) for name, one in file["objects"].items()}
    assert found == {name: exact(one) for name, one in objects.items()}
    assert list(found) == sorted(objects, key=str.encode)
    assert file["paths"] == {name: [name] for name in objects}


def test_the_example_on_the_page_is_what_is_written() -> None:
    *_, shown = re.findall(r"```json\n(.*?)```", SECTION, re.DOTALL)
    text = "".join(shown.splitlines()).encode()
    assert text == encode(EXAMPLE)
    assert f"{len(text)} bytes with the BLAKE3 `{blake3(text).hexdigest()}`" in SECTION


def test_floats_have_the_form_the_page_shows() -> None:
    """What was saved must stay readable: another form, as of another JSON library, is refused."""
    (rule,) = re.findall(r"^A finite float is written .*$", SECTION, re.MULTILINE)
    shown = re.findall(r"`(-?[0-9.]+(?:e-?[0-9]+)?)`", rule)
    assert len(shown) == 10
    text = encode(State({"floats": [float(number) for number in shown]})).decode()
    assert text.partition("[")[2].partition("]")[0].split(",") == shown


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_written_by_the_rule_on_the_page(value: float) -> None:
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    most = len(digits) - 1 + exponent
    first, *others = map(str, digits)
    if value == 0 or -5 <= most < 16:
        form = format(Decimal(repr(value)).normalize(), "f")
        form += "" if "." in form else ".0"
    else:
        form = "-" * sign + first + "." * bool(others) + "".join(others) + f"e{most}"
    text = encode(State({"float": value})).decode()
    assert text == f'{{"format":1,"objects":{{"float":{form}}},"paths":{{}}}}'


def test_the_page_has_the_limits_of_state_json() -> None:
    (row,) = re.findall(r"^\| `state\.json` of a checkpoint \| (.*) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number in re.findall(r"\d+", row)] == [
        states.MAX_STATE_BYTES,
        states.MAX_VALUES,
        states.MAX_DEPTH,
    ]
