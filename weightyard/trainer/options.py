"""Options: what a program was told, refused before anything is done where it cannot be meant."""

from __future__ import annotations

from numbers import Integral

from weightyard.errors import BadSetting


def require_whole(name: str, value: object, least: int) -> None:
    """Raises BadSetting: what came from a command line is often text still."""
    if not isinstance(value, Integral) or int(value) < least:
        raise BadSetting(f"{name}={value!r:.80}: a whole number of at least {least}")
