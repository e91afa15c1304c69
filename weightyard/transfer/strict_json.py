"""Strict JSON: what others wrote is accepted only if every part of a yard can keep it."""

from __future__ import annotations

from itertools import chain
from math import isfinite
from typing import Any

import msgspec

from weightyard.errors import BadSetting
from weightyard.records import MAX_LEVELS, is_long, nests_deeper


def strict_json(text: bytes, *, levels: int = MAX_LEVELS) -> Any:
    """The value of a JSON text. Raises ValueError for what PostgreSQL cannot keep.

    That is NaN and lone surrogates, which JSON's specification forbids too, and NUL in texts. Nor
    may the value nest deeper than `levels`.
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


def why_not_kept(value: object) -> str | None:
    """Why a value of Python's cannot be kept and come back the same; None: it can.

    It does not nest too deeply.
    """
    match value:
        case None | bool():
            return None
        case str():
            return _why_not_text(value)
        case int():
            return "a whole number has over 64 bits" if is_long(value) else None
        case float():
            return None if isfinite(value) else f"JSON has no {value}"
        case list() | tuple():
            return next(filter(None, map(why_not_kept, value)), None)
        case dict():
            keys = (_why_not_key(key) for key in value)
            return next(filter(None, chain(keys, map(why_not_kept, value.values()))), None)
    return f"JSON has no {type(value).__name__}"


def checked_reason(reason: str) -> str:
    """Why somebody does something, in a form every part of a yard can keep. Raises BadSetting."""
    if why := _why_not_text(reason):
        raise BadSetting(f"reason: {why}")
    return reason


def _why_not_key(key: object) -> str | None:
    return _why_not_text(key) if isinstance(key, str) else f"key {str(key)[:40]!a} is no text"


def _why_not_text(text: str) -> str | None:
    if "\0" in text:
        return f"{text[:40]!a} has a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{text[:40]!a} is not valid UTF-8"
    return None


def _has_nul(value: object) -> bool:
    match value:
        case str():
            return "\0" in value
        case list():
            return any(map(_has_nul, value))
        case dict():
            return any(_has_nul(key) or _has_nul(item) for key, item in value.items())
    return False
