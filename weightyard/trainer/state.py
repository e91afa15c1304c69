"""State: what a checkpoint holds besides its tensors, as the one file `state.json`.

    {"format": 1, "objects": {FQN: value, …}, "paths": {FQN: [key, …], …}}

`objects` are the values that are no tensors. `paths` says, for each FQN, tensors included, through
which keys of dicts (text) and places in lists (numbers) the state dict leads to it: what torch
calls the planner data. A state dict that was not flattened has none.

| value | JSON |
|---|---|
| None, bool, str, list, and finite floats (always with a point or an exponent) | as in JSON |
| int | a number; beyond ±2^53 `{"int": "-1f…"}`, hexadecimal |
| infinities and NaN | `{"float": "7ff8000000000000"}`, the bits of an IEEE 754 double |
| bytes | `{"bytes": "…"}`, base64 |
| tuple | `{"tuple": [value, …]}` |
| dict with keys of text or int | `{"dict": [[key, value], …]}`, in its own order |

Nothing else is taken: a value must come back as it was, and reading it must run no code.
The same state is the same JSON, byte for byte; `decode` accepts nothing else. Every rule:
docs/format.md §12.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec
from typing_extensions import Buffer

from weightyard.errors import Damaged, Refused, TooLarge, UnknownFormat
from weightyard.format.block import MIB
from weightyard.names import FilePath, is_tensor_name

STATE_FILE = FilePath("state.json")
"""Its path in a checkpoint."""

STATE_FORMAT = 1
"""The version written, and the newest one read."""

MAX_STATE_BYTES = 128 * MIB
"""The longest file."""

MAX_VALUES = 1 << 22
"""Commas and opening brackets in the JSON, counted before it is parsed: they bound what parsing
allocates. Also how many places the lists may have that the paths lead through."""

MAX_DEPTH = 64
"""How deep containers may nest; also how long a path may be."""

_PLAIN_INT = 1 << 53
"""Up to here every JSON reader keeps an integer exact."""

PathKey: TypeAlias = str | int


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds besides its tensors."""

    objects: Mapping[str, Any] = field(default_factory=dict)
    """By FQN."""
    paths: Mapping[str, tuple[PathKey, ...]] = field(default_factory=dict)
    """FQN → the keys that lead to it; see above."""


class _File(msgspec.Struct):
    format: Annotated[int, msgspec.Meta(ge=0)]
    objects: dict[str, Any]
    paths: dict[str, list[str | int]]


class _Head(msgspec.Struct):
    format: Annotated[int, msgspec.Meta(ge=0)]


def encode(state: State) -> bytes:
    """The content of the file. Raises Refused, naming the key; TooLarge."""
    for name in (*state.objects, *state.paths):
        if not is_tensor_name(name):
            raise Refused(f"{name[:80]!a} cannot be the name of a value in a checkpoint")
    objects = {name: _packed(state.objects[name], name, 0) for name in sorted(state.objects)}
    paths = {name: list(state.paths[name]) for name in sorted(state.paths)}
    if (flaw := _flaw_of_paths(paths)) is not None:
        raise Refused(flaw)
    text = msgspec.json.encode(_File(STATE_FORMAT, objects, paths))
    for what, size, limit in (
        ("bytes", len(text), MAX_STATE_BYTES),
        ("values", _count_values(text), MAX_VALUES),
    ):
        if size > limit:
            raise TooLarge(
                f"state besides tensors of {size} {what}; at most {limit}: keep large things in "
                "tensors"
            )
    return text


def decode(text: Buffer) -> State:
    """The state in such a file, every rule checked. Raises Damaged, UnknownFormat."""
    content = bytes(text)
    if len(content) > MAX_STATE_BYTES or _count_values(content) > MAX_VALUES:
        raise _damaged(f"over {MAX_STATE_BYTES} bytes or {MAX_VALUES} values")
    try:
        found = msgspec.json.decode(content, type=_Head).format
        if found > STATE_FORMAT:
            raise UnknownFormat(STATE_FILE.text, found, STATE_FORMAT)
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise _damaged(str(why)[:200]) from None
    if (flaw := _flaw_of_paths(file.paths)) is not None:
        raise _damaged(flaw)
    objects = {name: _unpacked(value, 0) for name, value in file.objects.items()}
    state = State(objects, {name: tuple(keys) for name, keys in file.paths.items()})
    try:
        same = encode(state) == content
    except Refused as why:
        raise _damaged(str(why)) from None
    if not same:
        raise _damaged("JSON is not in the one form allowed")
    return state


def check_object(value: object, where: str) -> None:
    """Refuse what could not be saved. Raises Refused, naming `where` and the keys below it."""
    _packed(value, where, 0)


def _packed(value: Any, where: str, depth: int) -> Any:
    """The value as JSON can hold it. Types must match exactly: a subclass would not come back."""
    if depth > MAX_DEPTH:
        raise Refused(f"{where[:200]}…: over {MAX_DEPTH} containers in each other")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _checked_text(value, where)
    if kind is int:
        return value if abs(value) <= _PLAIN_INT else {"int": format(value, "x")}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list or kind is tuple:
        items = [_packed(one, f"{where}[{at}]", depth + 1) for at, one in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        return {"dict": [_packed_pair(key, one, where, depth) for key, one in value.items()]}
    raise Refused(
        f"{where}: a {kind.__module__}.{kind.__qualname__} cannot be saved; only None, bool, int, "
        "float, str, bytes, list, tuple and dict can, and tensors by themselves"
    )


def _packed_pair(key: Any, value: Any, where: str, depth: int) -> list[Any]:
    if type(key) is not str and type(key) is not int:
        raise Refused(f"{where}: key {key!r:.80} is neither text nor an int")
    return [
        _packed(key, f"{where}: key", depth + 1),
        _packed(value, f"{where}[{key!r}]", depth + 1),
    ]


def _checked_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as why:
        raise Refused(f"{where}: text with half a character ({why.reason})") from None
    return text


def _unpacked(node: Any, depth: int) -> Any:
    """The value JSON holds. Whether it was written in the one form is seen by writing it again."""
    if depth > MAX_DEPTH:
        raise _damaged(f"over {MAX_DEPTH} containers in each other")
    if isinstance(node, list):
        return [_unpacked(one, depth + 1) for one in node]
    if not isinstance(node, dict):
        return node
    match node:
        case {"int": str(digits)}:
            return _translated(lambda: int(digits, 16))
        case {"float": str(bits)}:
            return _translated(lambda: struct.unpack(">d", bytes.fromhex(bits))[0])
        case {"bytes": str(encoded)}:
            return _translated(lambda: base64.b64decode(encoded, validate=True))
        case {"tuple": list(items)}:
            return tuple(_unpacked(one, depth + 1) for one in items)
        case {"dict": list(pairs)}:
            return dict(_unpacked_pair(pair, depth) for pair in pairs)
    raise _damaged("a value with a tag that is not known")


def _unpacked_pair(pair: Any, depth: int) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise _damaged("a dict whose entries are no pairs")
    key = _unpacked(pair[0], depth + 1)
    if type(key) is not str and type(key) is not int:
        raise _damaged("a dict with a key that is neither text nor an int")
    return key, _unpacked(pair[1], depth + 1)


def _translated(parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except (ValueError, struct.error) as why:  # binascii.Error is a ValueError
        raise _damaged(str(why)[:200]) from None


class _Place:
    """A dict or list that paths lead through, with what is at its keys."""

    __slots__ = ("below", "kind")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.below: dict[PathKey, _Place | None] = {}


def _flaw_of_paths(paths: Mapping[str, Sequence[PathKey]]) -> str | None:
    """What no nested dict could have led to, or None.

    Following the paths makes lists as long as the highest place they name, so places are bounded
    too.
    """
    root = _Place(str)
    for name, keys in paths.items():
        if not 0 < len(keys) <= MAX_DEPTH:
            return f"{name}: a path of {len(keys)} keys"
        place: _Place | None = root
        for at, key in enumerate(keys):
            last = at == len(keys) - 1
            if place is None or type(key) is not place.kind or (last and key in place.below):
                return f"{name}: its path contradicts another one"
            if isinstance(key, int) and not 0 <= key < MAX_VALUES:
                return f"{name}: place {key} of a list"
            place = place.below.setdefault(key, None if last else _Place(type(keys[at + 1])))
    if _list_places(root) > MAX_VALUES:
        return f"paths lead through lists of over {MAX_VALUES} places"
    return None


def _list_places(root: _Place) -> int:
    """How many places all lists have together."""
    total = 0
    waiting = [root]
    while waiting:
        place = waiting.pop()
        if place.kind is int:
            total += 1 + max(key for key in place.below if isinstance(key, int))
        waiting += [one for one in place.below.values() if one is not None]
    return total


def _count_values(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _damaged(why: str) -> Damaged:
    return Damaged(f"{STATE_FILE}: {why}")
