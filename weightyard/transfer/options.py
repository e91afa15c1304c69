"""Options: arguments that cannot be meant are refused before anything is done."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral

from weightyard.errors import BadSetting


def require_whole(name: str, value: object, least: int) -> None:
    """Raises BadSetting: what comes from a command line is often still text."""
    if not isinstance(value, Integral) or int(value) < least:
        raise BadSetting(f"{name}={value!r:.80}: a whole number of at least {least}")


def require_function(name: str, value: object) -> None:
    """Raises BadSetting: it would be called in the middle of the work, or never."""
    if value is not None and not callable(value):
        raise BadSetting(f"{name}={value!r:.80}: a function, or None")


def texts_of(name: str, value: object) -> list[str] | None:
    """One text, or several such as the keys of a dict, as a list. Raises BadSetting."""
    if value is None:
        return None
    several = [value] if isinstance(value, str) else value
    if isinstance(several, Collection) and all(isinstance(one, str) for one in several):
        return list(several)
    raise BadSetting(f"{name}={value!r:.80}: a text, or a list of them")
