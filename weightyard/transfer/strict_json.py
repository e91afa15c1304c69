"""Strict JSON: what others wrote, taken only if every part of a yard can keep it."""

from __future__ import annotations

from typing import Any

import msgspec

from weightyard.records import MAX_LEVELS, nests_deeper


def strict_json(text: bytes, *, levels: int = MAX_LEVELS) -> Any:
    """The value, as JSON's specification says: no NaN, no half characters; and no NUL in texts.

    PostgreSQL keeps none of them. Nor may it nest deeper than so many levels. Raises ValueError.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise ValueError(str(why)[:200]) from None
    if text.count(b"[") + text.count(b"{") > levels and nests_deeper(value, levels):
        raise ValueError(f"it nests deeper than {levels} levels")
    if b"\\u0000" in text and _has_nul(value):
        raise ValueError("a text has a NUL character")
    return value


def _has_nul(value: object) -> bool:
    match value:
        case str():
            return "\0" in value
        case list():
            return any(map(_has_nul, value))
        case dict():
            return any(_has_nul(key) or _has_nul(item) for key, item in value.items())
    return False
